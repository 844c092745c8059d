"""Class margins against a constrained optimiser, and in the corners."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from mr2_core import class_margins

UNIFORM = [1.0, 1.0, 1.0, 1.0]


def optimum(spread, budget):
    """The γ > 0 that minimises Σ a_k/γ_k² subject to Σ γ_k^q = K, found without the formula (variables: ln γ)."""
    found = minimize(
        lambda u: spread @ np.exp(-2 * u),
        np.zeros(len(spread)),
        jac=lambda u: -2 * spread * np.exp(-2 * u),
        constraints={
            "type": "eq",
            "fun": lambda u: np.exp(budget * u).sum() - len(spread),
            "jac": lambda u: budget * np.exp(budget * u),
        },
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    assert found.success, found.message
    return np.exp(found.x)


@pytest.mark.parametrize("seed", range(4))
def test_corollary_1_minimises_the_complexity(seed):
    spread = np.random.default_rng(seed).lognormal(sigma=0.8, size=6)
    margins = class_margins(torch.tensor(spread), mean_margin=1.0)
    np.testing.assert_allclose(margins, optimum(spread, budget=1), rtol=1e-5)
    # Nothing on the budget does better.
    complexity = (spread / margins.numpy() ** 2).sum()
    others = np.random.default_rng(seed).dirichlet(np.ones(6), size=2000) * 6
    assert (complexity <= (spread / others**2).sum(axis=1)).all()


@pytest.mark.parametrize("budget", [0.5, 1.0, 2.0, 4.0])
def test_the_exponent_belongs_to_the_budget(budget):
    spread = np.random.default_rng(7).lognormal(sigma=0.8, size=5)
    best = optimum(spread, budget)
    margins = class_margins(torch.tensor(spread), mean_margin=best.mean(), exponent=1 / (budget + 2))
    np.testing.assert_allclose(margins, best, rtol=1e-5)


def test_by_hand():
    margins = class_margins(torch.tensor([1.0, 8.0, 27.0]), mean_margin=4.0)
    torch.testing.assert_close(margins, torch.tensor([2.0, 4.0, 6.0]))
    torch.testing.assert_close(
        class_margins(torch.tensor([1.0, 8.0, 27.0])), class_margins(torch.tensor([2.0, 16.0, 54.0]))
    )
    torch.testing.assert_close(class_margins(torch.tensor([1.0, 8.0, 27.0])), margins / 4)  # c̄ = 1 by default


def test_unseen_classes_have_the_mean_margin_and_seen_ones_average_to_it():
    spread = torch.tensor([1.0, torch.nan, 27.0, -5.0, 8.0])  # what an unseen class holds does not matter
    seen = torch.tensor([True, False, True, False, True])
    margins = class_margins(spread, mean_margin=0.5, seen=seen)
    torch.testing.assert_close(margins, torch.tensor([0.25, 0.5, 0.75, 0.5, 0.5]))
    assert torch.equal(class_margins(spread, mean_margin=0.5, seen=seen & False), torch.full((5,), 0.5))


def test_a_zero_spread_counts_as_unknown():
    margins = class_margins(torch.tensor([0.0, 1.0, 8.0]), mean_margin=3.0)
    torch.testing.assert_close(margins, torch.tensor([3.0, 2.0, 4.0]))
    assert torch.equal(class_margins(torch.zeros(3), mean_margin=3.0), torch.full((3,), 3.0))


def test_exponent_zero_is_uniform_and_a_negative_one_reverses():
    spread = torch.tensor([0.3, 5.0, 2.0, 11.0])
    torch.testing.assert_close(class_margins(spread, exponent=0.0), torch.ones(4))
    margins = class_margins(spread, exponent=-0.5, mean_margin=2.0)
    torch.testing.assert_close(margins, 8 * spread**-0.5 / (spread**-0.5).sum())
    assert margins.argsort().tolist() == spread.argsort(descending=True).tolist()


@pytest.mark.parametrize("exponent", [1 / 3, 1.0, 2.0, -1.0])
def test_extreme_scales(exponent):
    spread = torch.tensor([1e-45, 1e-38, 1e-12, 1.0, 1e12, 3e38])
    margins = class_margins(spread, mean_margin=2.0, exponent=exponent)
    assert (margins > 0).all()
    assert margins.isfinite().all()
    assert (torch.full((6,), 1e3) / margins).isfinite().all()  # so a logit divided by its margin is, too
    assert margins.mean().item() == pytest.approx(2.0, rel=1e-6)
    assert (margins.diff() * np.sign(exponent) >= 0).all()


def test_types():
    assert class_margins(torch.ones(3, dtype=torch.float64)).dtype == torch.float64
    assert class_margins(torch.ones(3)).dtype == torch.float32
    assert class_margins(torch.ones(3), mean_margin=2).tolist() == [2.0, 2.0, 2.0]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    spread=st.lists(st.just(0.0) | st.floats(-30, 30).map(lambda power: 10.0**power), min_size=1, max_size=12),
    mean_margin=st.floats(1e-3, 1e3),
    exponent=st.floats(-2, 2),
    data=st.data(),
)
def test_positive_finite_and_averaging_to_the_budget(spread, mean_margin, exponent, data):
    spread = torch.tensor(spread)
    seen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(spread), max_size=len(spread))))
    margins = class_margins(spread, mean_margin=mean_margin, exponent=exponent, seen=seen)
    assert margins.isfinite().all()
    assert (margins > 0).all()
    assert (margins[~seen | (spread == 0)] == torch.tensor(mean_margin)).all()
    if seen.any():
        assert margins[seen].mean().item() == pytest.approx(mean_margin, rel=1e-5)
    order = torch.randperm(len(spread), generator=torch.Generator().manual_seed(0))
    shuffled = class_margins(spread[order], mean_margin=mean_margin, exponent=exponent, seen=seen[order])
    torch.testing.assert_close(shuffled, margins[order])


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"spread": UNIFORM}, TypeError, "spread has type list"),
        ({"spread": np.ones(4)}, TypeError, "spread has type ndarray"),
        ({"spread": torch.ones(4, dtype=torch.int64)}, TypeError, "spread has type torch.int64"),
        ({"spread": torch.ones(4, 1)}, ValueError, r"spread has shape \[4, 1\]; expected \[K\]"),
        ({"spread": torch.ones(0)}, ValueError, r"spread has shape \[0\]"),
        ({"spread": torch.tensor([1.0, -1.0])}, ValueError, "spread lies in -1.0 … 1.0; expected"),
        ({"spread": torch.tensor([1.0, torch.nan])}, ValueError, "spread lies in nan"),
        ({"spread": torch.tensor([1.0, torch.inf])}, ValueError, "spread lies in 1.0 … inf"),
        ({"mean_margin": 0.0}, ValueError, "mean_margin is 0.0; expected"),
        ({"mean_margin": -1.0}, ValueError, "mean_margin is -1.0"),
        ({"mean_margin": float("nan")}, ValueError, "mean_margin is nan"),
        ({"mean_margin": float("inf")}, ValueError, "mean_margin is inf"),
        ({"mean_margin": "1"}, ValueError, "mean_margin is '1'"),
        ({"exponent": float("nan")}, ValueError, "exponent is nan; expected"),
        ({"exponent": float("inf")}, ValueError, "exponent is inf"),
        ({"exponent": -float("inf")}, ValueError, "exponent is -inf"),
        ({"exponent": None}, ValueError, "exponent is None"),
        ({"seen": torch.ones(4)}, TypeError, "seen has type torch.float32; expected a bool"),
        ({"seen": [True] * 4}, TypeError, "seen has type list"),
        ({"seen": torch.ones(3, dtype=torch.bool)}, ValueError, r"seen has shape \[3\]; expected \[4\]"),
    ],
)
def test_bad_input(arguments, error, names):
    with pytest.raises(error, match=names):
        class_margins(**({"spread": torch.tensor(UNIFORM)} | arguments))
