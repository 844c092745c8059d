"""The terms of Proposition 1: each against an independent reference, and every inequality the right way round."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mr2_core import bound, class_margins
from mr2_core.bound import (
    ascent,
    class_by_class,
    class_spread,
    complexity,
    confidence,
    joint,
    lipschitz,
    margin_losses,
    supremum,
)

LN2 = math.log(2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def instance(seed, counts, dim, scale=1.0, dispersion=0.5):
    """Gaussian classes with their own centres and widths: features [N, D], labels [N], margins [K], all float64."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    widths = np.exp(dispersion * rng.normal(size=len(counts)))
    features = rng.normal(size=(len(counts), dim))[labels] + widths[labels, None] * rng.normal(size=(len(labels), dim))
    margins = np.exp(0.3 * rng.normal(size=len(counts)))
    return torch.tensor(scale * features / dim**0.5), torch.tensor(labels), torch.tensor(margins)


def all_signs(size):
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=size)), dtype=torch.float64)


def exact_supremum(features, labels, margins, weight_norm, priors):
    """S5 over every vector of signs, in loops."""
    counts = [(labels == k).sum().item() for k in range(len(margins))]
    total = 0.0
    for signs in itertools.product((-1, 1), repeat=len(features)):
        vector = [0.0] * features.shape[1]
        for sign, row, k in zip(signs, features.tolist(), labels.tolist(), strict=True):
            for d, entry in enumerate(row):
                vector[d] += sign * priors[k] / counts[k] * entry / margins[k].item()
        total += math.sqrt(sum(entry**2 for entry in vector))
    return weight_norm * len(margins) * total / 2 ** len(features)


# Step 1: the error is at most the clipped loss, and that at most the unclipped one


def test_losses_by_loops():
    logits = 3 * torch.randn(50, 4, dtype=torch.float64, generator=generator())
    labels, margins = torch.arange(50) % 4, torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    expected = []
    for z, k in zip(logits.tolist(), labels.tolist(), strict=True):
        powers = [math.exp(score / margins[k].item()) for score in z]
        expected.append(-math.log2(powers[k] / sum(powers)))
    unclipped, clipped = (margin_losses(logits, labels, margins, clipped) for clipped in (False, True))
    np.testing.assert_allclose(unclipped, expected, rtol=1e-12)
    np.testing.assert_allclose(clipped, np.minimum(expected, 1), rtol=1e-12)
    assert ((unclipped > 1) & (clipped == 1)).any()  # it clips something, and not everything
    assert (clipped < 1).any()


@given(st.integers(0, 2**31), st.integers(2, 6), st.floats(0.01, 30))
@settings(max_examples=50, deadline=None)
def test_the_error_is_below_the_losses(seed, num_classes, scale):
    logits = scale * torch.randn(40, num_classes, dtype=torch.float64, generator=generator(seed))
    labels = torch.arange(40) % num_classes
    margins = torch.rand(num_classes, dtype=torch.float64, generator=generator(seed)) * 3 + 0.1
    error = (logits.argmax(dim=1) != labels).double()
    clipped, unclipped = margin_losses(logits, labels, margins), margin_losses(logits, labels, margins, clipped=False)
    assert (error <= clipped + 1e-12).all()
    assert (clipped <= unclipped).all()
    assert (clipped[error == 1] > 1 - 1e-12).all()


def test_ln_2_is_the_right_unit():
    """A tie of two classes is worth 1 exactly: no larger unit would keep the loss above the error."""
    tie = torch.tensor([[5.0, 5.0]], dtype=torch.float64)
    margins = torch.tensor([0.3, 3.0], dtype=torch.float64)
    assert margin_losses(tie, torch.tensor([0]), margins, clipped=False).item() == pytest.approx(1, rel=1e-12)


# Step 2: Lipschitz constants that hold, and that no smaller number could replace


@given(st.integers(0, 2**31), st.integers(2, 6), st.floats(0.1, 10), st.booleans())
@settings(max_examples=60, deadline=None)
def test_lipschitz(seed, num_classes, scale, clipped):
    one, other = scale * torch.randn(2, 60, num_classes, dtype=torch.float64, generator=generator(seed))
    other = one + torch.rand(60, 1, dtype=torch.float64, generator=generator(seed)) * (other - one)
    labels = torch.arange(60) % num_classes
    margins = torch.rand(num_classes, dtype=torch.float64, generator=generator(seed)) * 3 + 0.1
    change = margin_losses(one, labels, margins, clipped) - margin_losses(other, labels, margins, clipped)
    limit = lipschitz(margins, clipped)[labels] * (one - other).norm(dim=1)
    assert (change.abs() <= limit * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize(("clipped", "gap"), [(True, 1e-4), (False, -200.0)])
def test_lipschitz_is_attained(clipped, gap):
    """Two classes: the clipped loss is steepest just right of the tie, the unclipped one far on the wrong side."""
    margins = torch.tensor([0.5, 2.0], dtype=torch.float64)
    z = torch.tensor([[gap, 0.0], [0.0, gap]], dtype=torch.float64, requires_grad=True)
    margin_losses(z, torch.tensor([0, 1]), margins, clipped).sum().backward()
    np.testing.assert_allclose(z.grad.norm(dim=1), lipschitz(margins, clipped), rtol=1e-3)


# Step 3: the confidence term


def test_confidence_by_hand():
    assert confidence(torch.tensor([25, 25]), 0.05) == pytest.approx(3 * math.sqrt(math.log(40) / 100))
    assert confidence(torch.tensor([25, 25]), 0.01) > confidence(torch.tensor([25, 25]), 0.05)
    counts, priors = torch.tensor([90, 10]), torch.tensor([0.9, 0.1])
    overall, balanced = confidence(counts, 0.05, priors), confidence(counts, 0.05)
    assert overall == pytest.approx(3 * math.sqrt(math.log(40) / 200))  # weights 1/N whatever the counts
    assert balanced == pytest.approx(3 * math.sqrt(math.log(40) / 2 * (0.25 / 90 + 0.25 / 10)))


def test_confidence_could_not_be_half():
    """A loss that is 0 or 1 by the toss of a coin: a third of the term is exceeded rarely enough, a sixth is not."""
    third, delta = confidence(torch.tensor([15, 15]), 0.05) / 3, 0.05
    heads = [sum(math.comb(30, k) for k in range(31) if k > 30 * (0.5 + gap)) / 2**30 for gap in (third, third / 2)]
    assert heads[0] <= delta / 2 < heads[1]


def test_symmetrisation_needs_its_factor_2():
    """All functions with values 0 and 1 on M points: the gap is 1 − N/M, and the complexity 1/2."""
    points, sample = 12, 2
    gaps, complexities = [], []
    for drawn in itertools.product(range(points), repeat=sample):
        gaps.append(1 - len(set(drawn)) / points)
        totals = torch.zeros(2**sample, points, dtype=torch.float64)
        totals.index_add_(1, torch.tensor(drawn), all_signs(sample))
        complexities.append(totals.clamp(min=0).sum(dim=1).mean().item() / sample)
    gap, rademacher = np.mean(gaps), np.mean(complexities)
    assert 1.7 * rademacher < gap <= 2 * rademacher


# Step 4: contraction, exactly, on a finite set of heads


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_contraction(seed, clipped):
    features, labels, margins = instance(seed, [3, 2], 2, scale=3.0)
    heads = torch.randn(30, 2, 2, dtype=torch.float64, generator=generator(seed))
    logits = torch.stack([features @ head.T for head in heads])  # [heads, N, K]
    losses = torch.stack([margin_losses(z, labels, margins, clipped) for z in logits])
    left = (all_signs(5) @ losses.T).amax(dim=1).mean()
    constants = lipschitz(margins, clipped)[labels]
    contracted = (constants[:, None] * logits).flatten(1)
    right = math.sqrt(2) * (all_signs(10) @ contracted.T).amax(dim=1).mean()
    assert 0 < left < right
    # What the module makes of it: √2 times the constant is 1/ln 2 (2/ln 2 unclipped) over the margin.
    np.testing.assert_allclose(math.sqrt(2) * constants, (1 if clipped else 2) / LN2 / margins[labels], rtol=1e-12)


def test_contraction_needs_root_two():
    """One example just right of a tie and two heads that hardly differ: both sides are equal."""
    margins, labels = torch.tensor([0.6, 1.4], dtype=torch.float64), torch.tensor([0])
    logits = torch.tensor([[[0.0, 0.0]], [[1e-4, -1e-4]]], dtype=torch.float64)
    losses = torch.stack([margin_losses(z, labels, margins) for z in logits])
    left = (all_signs(1) @ losses.T).amax(dim=1).mean().item()
    right = math.sqrt(2) * (all_signs(2) @ (lipschitz(margins)[0] * logits).flatten(1).T).amax(dim=1).mean().item()
    assert left == pytest.approx(right, rel=1e-3)


# Step 5: the supremum


@pytest.mark.parametrize("priors", [None, torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)])
def test_supremum_against_every_sign(priors):
    features, labels, margins = instance(1, [4, 3, 2], 3)
    exact = exact_supremum(features, labels, margins, 1.7, [1 / 3] * 3 if priors is None else priors.tolist())
    estimate = supremum(features, labels, margins, 1.7, generator(), draws=20_000, priors=priors)
    assert abs(estimate.value - exact) < 4 * estimate.error
    assert estimate.error < 0.005 * exact


def test_supremum_is_one():
    """No head reaches more than the closed form, and the rows Λ v_k/‖v_k‖ reach it."""
    features, labels, margins = instance(2, [5, 4], 3)
    signs = all_signs(2)[torch.randint(4, (9,), generator=generator())]  # [N, K]
    rows = features * (1 / (2 * labels.bincount().double()) / margins)[labels][:, None]
    vectors = signs.T @ rows  # v_k
    closed = 2.0 * vectors.norm(dim=1).sum()
    heads = torch.randn(1000, 2, 3, dtype=torch.float64, generator=generator())
    heads *= 2 / heads.norm(dim=2, keepdim=True)
    reached = torch.einsum("ik,id,hkd->h", signs, rows, heads)
    assert reached.max() <= closed
    best = 2 * vectors / vectors.norm(dim=1, keepdim=True)
    assert torch.einsum("ik,id,kd->", signs, rows, best).item() == pytest.approx(closed.item())


def test_supremum_of_orthogonal_features_has_no_noise_and_no_jensen_gap(monkeypatch):
    features = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    labels, margins = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = 2 * 5.0 / 4 * math.sqrt(1 + 4 + 9 / 4 + 16 / 4)  # KΛ/N √Σ ‖φ_i‖²/γ²
    for chunk in (bound.CHUNK, 10):  # all draws at once, or two at a time and one left over
        monkeypatch.setattr(bound, "CHUNK", chunk)
        estimate = supremum(features, labels, margins, 5.0, generator(), draws=7)
        assert estimate.value == pytest.approx(expected, rel=1e-12)
        assert estimate.error < 1e-12
    spread, counts = class_spread(features, labels, 2)
    assert joint(spread, counts, margins, 5.0) == pytest.approx(expected, rel=1e-12)


def test_supremum_of_equal_features_is_a_random_walk():
    """E|Σ ε_i| = N C(N, N/2)/2^N for even N."""
    features, labels = torch.ones(20, 1, dtype=torch.float64), torch.arange(20) % 2
    walk = 20 * math.comb(20, 10) / 2**20
    estimate = supremum(features, labels, torch.full((2,), 0.5), 3.0, generator(), draws=50_000)
    assert abs(estimate.value - 2 * 3.0 / 20 / 0.5 * walk) < 4 * estimate.error


def test_standard_error_is_the_spread_of_repetitions():
    features, labels, margins = instance(3, [6, 6], 2)
    found = [supremum(features, labels, margins, 1.0, generator(seed), draws=50) for seed in range(200)]
    values, errors = np.array(found).T
    assert values.std() == pytest.approx(errors.mean(), rel=0.2)


# Step 6: spreads, Jensen, and the chain class by class


def test_spread_is_the_mean_square():
    features, labels, _ = instance(4, [7, 5, 1], 6)
    spread, counts = class_spread(features, labels, 4)
    assert counts.tolist() == [7, 5, 1, 0]
    assert spread[3] == 0
    for k in range(3):
        rows = features[labels == k].numpy()
        mean = rows.mean(axis=0)
        assert spread[k].item() == pytest.approx((mean**2).sum() + ((rows - mean) ** 2).sum(axis=1).mean())


def test_joint_and_class_by_class_by_loops():
    spread, counts = torch.tensor([2.0, 3.0, 0.5]), torch.tensor([10, 40, 5])
    margins, priors = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.2, 0.7, 0.1])
    for given_priors, shares in ((None, [1 / 3] * 3), (priors, [0.2, 0.7, 0.1])):
        terms = [
            shares[k] * math.sqrt(spread[k].item() / counts[k].item()) / margins[k].item() for k in range(len(shares))
        ]
        expected = 4.0 * 3 * math.sqrt(sum(term**2 for term in terms))
        assert joint(spread, counts, margins, 4.0, given_priors) == pytest.approx(expected, rel=1e-6)
        assert class_by_class(spread, counts, margins, 4.0, given_priors) == pytest.approx(12 * sum(terms), rel=1e-6)


def test_joint_is_the_root_mean_square_of_the_supremum():
    """Jensen's side of step 6: S6² is the expected square, here over every vector of signs."""
    features, labels, margins = instance(5, [5, 3, 2], 4)
    spread, counts = class_spread(features, labels, 3)
    rows = features * (1 / (3 * counts.double()) / margins)[labels][:, None]
    squares = (all_signs(10) @ rows).square().sum(dim=1)
    assert joint(spread, counts, margins, 2.0) == pytest.approx(2.0 * 3 * squares.mean().sqrt().item(), rel=1e-9)


@given(
    st.integers(0, 2**31),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 6),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_jensen_costs_at_most_root_two(seed, counts, dim, weighted):
    """S6/√2 ≤ S5 ≤ S6 ≤ class by class ≤ √K S6, with S5 exact."""
    features, labels, margins = instance(seed, counts, dim)
    priors = torch.softmax(torch.randn(len(counts), generator=generator(seed)), 0).double() if weighted else None
    spread, counts = class_spread(features, labels, len(counts))
    weights = (1 / len(counts) if priors is None else priors) / counts.double() / margins
    norms = (all_signs(len(labels))[: 2 ** (len(labels) - 1)] @ (features * weights[labels][:, None])).norm(dim=1)
    exact = 3.0 * len(counts) * norms.mean().item()
    upper = joint(spread, counts, margins, 3.0, priors)
    second = class_by_class(spread, counts, margins, 3.0, priors)
    slack = 1 + 1e-9
    assert upper / math.sqrt(2) <= exact * slack
    assert exact <= upper * slack
    assert upper <= second * slack
    assert second <= math.sqrt(len(counts)) * upper * slack


def test_no_inequality_of_step_6_can_be_turned_round():
    two = torch.ones(2, 1, dtype=torch.float64)  # E|ε1 + ε2| = 1 = √2/√2: Jensen at its worst
    labels, ones = torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64)
    estimate = supremum(two, labels, ones, 1.0, generator(), draws=20_000)
    spread, counts = class_spread(two, labels, 2)
    assert joint(spread, counts, ones, 1.0) / math.sqrt(2) == pytest.approx(estimate.value, abs=4 * estimate.error)
    # All terms equal: Cauchy–Schwarz costs nothing, the chain class by class costs √K
    assert class_by_class(spread, counts, ones, 1.0) == pytest.approx(math.sqrt(2) * joint(spread, counts, ones, 1.0))
    # One term only: the chain class by class costs nothing
    spread = torch.tensor([1.0, 0.0])
    assert class_by_class(spread, counts, ones, 1.0) == pytest.approx(joint(spread, counts, ones, 1.0))


# Step 7: the forms of the complexity term


def test_forms_by_hand():
    """K = 4 classes of n = 25: N = 100."""
    spread, counts = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 25)
    margins, norm = torch.tensor([0.5, 1.0, 1.5, 2.0]), 3.0
    root = math.sqrt(sum(a / g**2 for a, g in ((1, 0.5), (2, 1), (3, 1.5), (4, 2))))
    expected = {
        "clipped": 2 / LN2 * norm * math.sqrt(4 / 100) * root,
        "unclipped": 4 / LN2 * norm * math.sqrt(4 / 100) * root,
        "class by class": 4 / LN2 * norm * 4 / math.sqrt(100) * root,
        "printed": 4 * math.sqrt(2) * norm * 4 / math.sqrt(100) * root,
    }
    assert set(expected) == set(bound.CONSTANTS)
    for form, value in expected.items():
        assert complexity(spread, counts, margins, norm, form) == pytest.approx(value, rel=1e-6)
    assert complexity(spread, counts, margins, norm) == pytest.approx(expected["clipped"], rel=1e-6)


def test_uniform_margins_equal_spreads_and_two_classes():
    """S6 = KΛ√(a/N)/c̄; with K = 2 the printed form exceeds the clipped one by 2√2 ln 2 · √2 = 4 ln 2."""
    for num_classes, count in ((2, 8), (10, 30)):
        spread, counts = torch.full((num_classes,), 2.25), torch.full((num_classes,), count)
        margins = torch.full((num_classes,), 0.75)
        expected = num_classes * 5.0 * 1.5 / math.sqrt(num_classes * count) / 0.75
        assert joint(spread, counts, margins, 5.0) == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(class_margins(spread, mean_margin=0.75), margins)
    two = torch.ones(2), torch.tensor([3, 3]), torch.ones(2), 1.0
    assert complexity(*two, "printed") / complexity(*two) == pytest.approx(4 * LN2)


def test_a_class_of_zero_spread_asks_for_nothing():
    features, labels, margins = instance(6, [6, 6, 6], 4)
    features[labels == 1] = 0
    spread, counts = class_spread(features, labels, 3)
    assert spread[1] == 0
    tiny = margins.clone()
    tiny[1] = 1e-6
    assert joint(spread, counts, tiny, 1.0) == joint(spread, counts, margins, 1.0)
    assert supremum(features, labels, tiny, 1.0, generator()) == supremum(features, labels, margins, 1.0, generator())


def test_corollary_1_minimises_every_form_of_the_balanced_bound():
    spread, counts = torch.tensor(np.random.default_rng(0).lognormal(size=5)), torch.full((5,), 10)
    best = class_margins(spread)
    for form in bound.CONSTANTS:
        least = complexity(spread, counts, best, 1.0, form)
        for other in 5 * torch.tensor(np.random.default_rng(1).dirichlet(np.ones(5), size=200)):
            assert least < complexity(spread, counts, other, 1.0, form)


def test_priors_choose_the_question():
    """Few images of a class ask for more margin in the mean of the class errors, for less in the overall error."""
    spread, counts = torch.ones(2, dtype=torch.float64), torch.tensor([90, 10])
    shares = counts / counts.sum()
    for priors, exponent in ((None, -1 / 3), (shares.double(), 1 / 3)):
        best = counts.double() ** exponent / (counts.double() ** exponent).mean()
        least = joint(spread, counts, best, 1.0, priors)
        for first in np.linspace(0.05, 1.95, 100):
            other = torch.tensor([first, 2 - first], dtype=torch.float64)
            assert least <= joint(spread, counts, other, 1.0, priors)


# The sandwich


@given(
    st.integers(0, 2**31),
    st.lists(st.integers(2, 12), min_size=2, max_size=5),
    st.integers(1, 12),
    st.floats(0.2, 10),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_sandwich(seed, counts, dim, weight_norm, clipped, weighted):
    """Ascent ≤ Rad ≤ S5/ln 2 (unclipped 2 S5/ln 2) ≤ S6/ln 2 …, on random instances."""
    features, labels, margins = instance(seed, counts, dim)
    priors = torch.softmax(torch.randn(len(counts), generator=generator(seed)), 0).double() if weighted else None
    spread, counts = class_spread(features, labels, len(counts))
    fixed = (features, labels, margins, weight_norm, generator(seed))
    lower = ascent(*fixed, clipped=clipped, steps=40, priors=priors)
    middle = supremum(*fixed, draws=500, priors=priors)
    factor = (1 if clipped else 2) / LN2
    assert lower.value >= 0
    assert lower.value - 4 * lower.error <= factor * (middle.value + 4 * middle.error)
    assert middle.value - 4 * middle.error <= joint(spread, counts, margins, weight_norm, priors) * (1 + 1e-9)
    form = "clipped" if clipped else "unclipped"
    upper = complexity(spread, counts, margins, weight_norm, form, priors)
    assert 2 * factor * (middle.value - 4 * middle.error) <= upper * (1 + 1e-9)


@pytest.mark.parametrize(("clipped", "ratio"), [(True, 0.03), (False, 0.15)])
def test_sandwich_is_neither_upside_down_nor_empty(clipped, ratio):
    features, labels, margins = instance(7, [10, 10, 10], 8)
    spread, counts = class_spread(features, labels, 3)
    lower = ascent(features, labels, margins, 4.0, generator(), clipped=clipped, draws=16)
    middle = supremum(features, labels, margins, 4.0, generator())
    factor = (1 if clipped else 2) / LN2
    assert ratio * factor * middle.value < lower.value - 3 * lower.error
    assert lower.value + 3 * lower.error < factor * (middle.value - 3 * middle.error)
    assert middle.value + 3 * middle.error < joint(spread, counts, margins, 4.0)


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("priors", [None, torch.tensor([0.1, 0.9], dtype=torch.float64)])
def test_ascent_against_a_grid_of_heads(clipped, priors):
    """Two classes on a line: every head and every sign can be tried."""
    features = torch.tensor([[1.0], [0.4], [-0.8], [-0.3]], dtype=torch.float64)
    labels, margins = torch.tensor([0, 1, 1, 1]), torch.tensor([0.5, 1.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5 / 3, 0.5 / 3, 0.5 / 3] if priors is None else [0.1, 0.3, 0.3, 0.3])
    grid = torch.linspace(-3, 3, 61, dtype=torch.float64)
    heads = torch.cartesian_prod(grid, grid)[:, :, None]  # [heads, K, 1]
    losses = torch.stack([margin_losses(features @ head.T, labels, margins, clipped) for head in heads])
    exact = (all_signs(4) * weights @ losses.T).amax(dim=1).mean().item()
    found = ascent(features, labels, margins, 3.0, generator(), clipped=clipped, draws=400, priors=priors)
    assert found.value < exact + 3 * found.error
    assert found.value > 0.9 * exact - 3 * found.error
    assert found.error < 0.1 * exact


def test_ascent_never_does_worse_than_no_head():
    """One step on one example hurts the others as often as not; the head 0 is worth 0."""
    features, labels, margins = instance(11, [6, 6], 4)
    hurried = {"clipped": False, "draws": 2, "steps": 1, "batch": 1}
    found = [ascent(features, labels, margins, 5.0, generator(seed), **hurried).value for seed in range(20)]
    assert min(found) >= 0
    assert max(found) > 0


def test_ascent_stays_within_the_norm():
    """With Λ = 0 all losses are equal, so nothing can be gained; with a larger Λ more can be."""
    features, labels, margins = instance(8, [10, 10], 5)
    found = [ascent(features, labels, margins, norm, generator(), clipped=False).value for norm in (0.0, 1.0, 4.0)]
    assert found[0] == 0
    assert 2 * found[1] < found[2]
    # A linear function of z would gain exactly in proportion to Λ; near 0 the loss is one.
    small = [ascent(features, labels, margins, norm, generator(), clipped=False).value for norm in (1e-3, 2e-3)]
    assert small[1] == pytest.approx(2 * small[0], rel=1e-2)


def test_ascent_in_small_batches_is_a_lower_bound_too():
    features, labels, margins = instance(9, [20, 20], 5)
    whole = ascent(features, labels, margins, 3.0, generator(), clipped=False)
    parts = ascent(features, labels, margins, 3.0, generator(), clipped=False, batch=10)
    assert 0.9 * whole.value < parts.value < whole.value + 3 * whole.error


# Determinism, types and refusals


def test_estimates_follow_the_generator_alone():
    features, labels, margins = instance(10, [5, 5], 4)
    for estimator in (supremum, ascent):
        torch.manual_seed(0)
        first = estimator(features, labels, margins, 1.0, generator(3))
        torch.manual_seed(1)
        assert estimator(features, labels, margins, 1.0, generator(3)) == first
        assert estimator(features, labels, margins, 1.0, generator(4)) != first
        single = estimator(features.float(), labels, margins.float(), 1.0, generator(3))
        assert isinstance(single.value, float)


FEATURES, LABELS, MARGINS, COUNTS = torch.ones(4, 3), torch.tensor([0, 0, 1, 1]), torch.ones(2), torch.tensor([2, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: margin_losses(torch.ones(4, 3), LABELS, MARGINS), r"logits has shape \[4, 3\]; expected \[B, 2\]"),
        (lambda: margin_losses(torch.ones(4, 2), LABELS + 1, MARGINS), r"labels lie in 1 … 2; expected 0 … 1"),
        (lambda: margin_losses(torch.ones(4, 2), LABELS, -MARGINS), "margins lie in -1.0 … -1.0; expected positive"),
        (lambda: lipschitz(torch.ones(2, 2)), r"shape \[2, 2\]; expected a floating-point tensor \[K\]"),
        (lambda: lipschitz(COUNTS), r"type torch.int64.*; expected a floating-point tensor \[K\]"),
        (lambda: lipschitz([1.0, 1.0]), r"type list; expected a floating-point tensor \[K\]"),
        (lambda: confidence(COUNTS, 0.0), "delta is 0.0; expected a probability"),
        (lambda: confidence(COUNTS, 1), "delta is 1; expected a probability"),
        (lambda: confidence(torch.tensor([4, 0]), 0.1), r"counts is \[4, 0\]; expected .* at least 1 example"),
        (lambda: confidence(COUNTS, 0.1, torch.ones(2)), r"priors is \[1.0, 1.0\]; expected 2 probabilities that sum"),
        (lambda: confidence(COUNTS, 0.1, torch.ones(1)), r"priors is \[1.0\]; expected 2 probabilities"),
        (lambda: confidence(COUNTS, 0.1, torch.tensor([1.5, -0.5])), "expected 2 probabilities"),
        (lambda: confidence(COUNTS, 0.1, torch.tensor([torch.nan, 1])), "expected 2 probabilities"),
        (lambda: supremum(FEATURES, LABELS, MARGINS, -1.0, generator()), "weight_norm is -1.0; expected Λ"),
        (lambda: supremum(FEATURES, LABELS, MARGINS, math.nan, generator()), "weight_norm is nan; expected Λ"),
        (lambda: supremum(FEATURES, LABELS, MARGINS, 1.0, generator(), draws=1), "draws is 1; expected an integer"),
        (lambda: supremum(FEATURES, LABELS, torch.ones(3), 1.0, generator()), r"counts is \[2, 2, 0\]; expected"),
        (lambda: supremum(FEATURES / 0, LABELS, MARGINS, 1.0, generator()), "features holds NaN or infinite"),
        (lambda: supremum(FEATURES, LABELS[:3], MARGINS, 1.0, generator()), r"labels has shape \[3\]; expected \[4\]"),
        (lambda: ascent(FEATURES, LABELS, MARGINS, 1.0, generator(), steps=0), "steps is 0; expected an integer"),
        (lambda: ascent(FEATURES, LABELS, MARGINS, 1.0, generator(), batch=0.5), "batch is 0.5; expected an integer"),
        (lambda: ascent(FEATURES, LABELS, MARGINS, 1.0, generator(), draws=1), "draws is 1; expected an integer"),
        (lambda: class_spread(FEATURES, LABELS, 1), "labels lie in 0 … 1; expected 0 … 0"),
        (
            lambda: joint(torch.ones(3), COUNTS, MARGINS, 1.0),
            r"shapes \[3\], \[2\], \[2\]; expected one number a class",
        ),
        (lambda: joint([1.0, 1.0], COUNTS, MARGINS, 1.0), r"spread has type list; expected a tensor \[K\]"),
        (lambda: confidence([2, 2], 0.1), "counts has type list; expected a tensor"),
        (lambda: confidence(COUNTS, 0.1, [0.5, 0.5]), "priors has type list; expected a tensor"),
        (lambda: joint(-MARGINS, COUNTS, MARGINS, 1.0), "spread lies in -1.0 … -1.0; expected finite numbers"),
        (lambda: joint(MARGINS / 0, COUNTS, MARGINS, 1.0), "spread lies in inf … inf; expected finite numbers"),
        (lambda: class_by_class(MARGINS, COUNTS, 0 * MARGINS, 1.0), "margins lie in 0.0 … 0.0; expected positive"),
        (lambda: complexity(MARGINS, COUNTS, MARGINS, 1.0, "best"), "form is 'best'; expected one of clipped, unclipp"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
