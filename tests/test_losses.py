"""The two losses and MR2Loss against loops over examples, classes and pairs, and in the corners."""

import copy
import io
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mr2_core import ClassStatistics, MR2Loss, margin_cross_entropy, representation_loss

STATISTICS = ["second_moment", "deviation", "centred", "relative"]
FORMS = ["printed", "relative"]
LABELS = torch.tensor([0, 2, 0, 1, 0, 1, 3])  # three, two, one and one of a class; class 4 is absent
K, D = 5, 4


def sample(seed=0, batch=len(LABELS), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, K, generator=generator, dtype=torch.float64)
    features = torch.randn(batch, D, generator=generator, dtype=torch.float64)
    labels = LABELS if batch == len(LABELS) else torch.randint(4, (batch,), generator=generator)
    return logits.to(dtype), features.to(dtype), labels


def batches(count, seed=0, batch=12):
    return [sample(seed + i, batch, torch.float32) for i in range(count)]


# The formulas, one example, class and pair at a time.


def margin_loop(logits, labels, margins):
    total = 0.0
    for z, y in zip(logits, labels.tolist(), strict=True):
        powers = [torch.exp(z[k] / margins[y]) for k in range(len(z))]
        total = total - torch.log(powers[y] / sum(powers))
    return total / len(labels)


def pair_loop(features, labels, mean_deviation, form):
    total, anchors = 0.0, 0
    for i in range(len(labels)):
        terms = []
        for j in range(len(labels)):
            if j != i and labels[j] == labels[i]:
                square = sum((features[i, d] - features[j, d]) ** 2 for d in range(features.shape[1]))
                if form == "printed":
                    terms.append(torch.exp(square - 2 * mean_deviation))
                else:
                    terms.append(torch.exp(square / mean_deviation - 2))
        anchors += bool(terms)
        if terms:
            total = total + torch.log(1 + sum(terms) / (1 if form == "printed" else len(terms)))
    return total / (len(labels) if form == "printed" else anchors)


def value_and_gradient(function, inputs):
    leaf = inputs.clone().requires_grad_()
    value = function(leaf)
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_margin_cross_entropy_is_the_formula(dtype):
    logits, _, labels = sample()
    margins = torch.tensor([0.5, 1.5, 0.9, 2.0, 0.1], dtype=torch.float64)
    expected = value_and_gradient(lambda z: margin_loop(z, labels, margins), logits)
    found = value_and_gradient(lambda z: margin_cross_entropy(z, labels, margins.to(dtype)), logits.to(dtype))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for new, old in zip(found, expected, strict=True):
        torch.testing.assert_close(new.double(), old, rtol=tolerance, atol=tolerance)


def test_margins_of_one_are_plain_cross_entropy():
    logits, _, labels = sample()
    assert torch.equal(margin_cross_entropy(logits, labels, torch.ones(K)), F.cross_entropy(logits, labels))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mean_deviation", [0.3, 2.5, 20.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_representation_loss_is_the_formula(form, mean_deviation, dtype):
    _, features, labels = sample()
    scale = torch.tensor(mean_deviation, dtype=dtype)
    expected = value_and_gradient(lambda x: pair_loop(x, labels, mean_deviation, form), features)
    found = value_and_gradient(lambda x: representation_loss(x, labels, scale, form), features.to(dtype))
    assert expected[0] > 0
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for new, old in zip(found, expected, strict=True):
        torch.testing.assert_close(new.double(), old, rtol=tolerance, atol=tolerance)
    assert found[0].dtype == dtype


def test_printed_is_the_default_form():
    _, features, labels = sample()
    scale = torch.tensor(1.0)
    assert representation_loss(features, labels, scale) == representation_loss(features, labels, scale, "printed")


def test_gradients_agree_with_finite_differences():
    logits, features, labels = sample()
    margins = torch.tensor([0.5, 1.5, 0.9, 2.0, 0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: margin_cross_entropy(z, labels, margins), logits.requires_grad_())
    features.requires_grad_()
    for form in FORMS:

        def loss(x, form=form):
            return representation_loss(x, labels, torch.tensor(1.3, dtype=torch.float64), form)

        assert torch.autograd.gradcheck(loss, features)
        assert torch.autograd.gradgradcheck(loss, features)


def test_pairs_far_from_the_origin():
    """Distances are expanded into squares; the batch's own centre keeps them from cancelling in float32."""
    _, features, labels = sample()
    scale = torch.tensor(1.0)
    for form in FORMS:
        near = value_and_gradient(lambda x, form=form: representation_loss(x, labels, scale, form), features.float())
        far = value_and_gradient(
            lambda x, form=form: representation_loss(x, labels, scale, form), features.float() + 1000
        )
        for new, old in zip(far, near, strict=True):
            torch.testing.assert_close(new, old, rtol=2e-3, atol=2e-3)  # float32 itself keeps 1e-4 at 1000


def test_relative_form_does_not_see_the_scale_and_the_printed_one_does():
    _, features, labels = sample()
    scale = torch.tensor(1.3, dtype=torch.float64)
    for form, invariant in (("relative", True), ("printed", False)):
        value, gradient = value_and_gradient(lambda x, form=form: representation_loss(x, labels, scale, form), features)
        for factor in (0.1, 7.0):
            rescaled, steeper = value_and_gradient(
                lambda x, form=form, factor=factor: representation_loss(x, labels, scale * factor**2, form),
                features * factor,
            )
            assert torch.isclose(rescaled, value, rtol=1e-9) == invariant
            assert torch.allclose(steeper * factor, gradient, rtol=1e-9) == invariant


def test_relative_form_does_not_grow_with_the_batch():
    _, features, labels = sample()
    scale = torch.tensor(1.3)
    pair = torch.zeros(2, D), torch.zeros(2, dtype=torch.int64)  # two examples in the same place
    for form, value in (("relative", math.log1p(math.exp(-2))), ("printed", math.log1p(math.exp(-2.6)))):
        assert representation_loss(*pair, scale, form).item() == pytest.approx(value, rel=1e-6)
    many = torch.zeros(40, D), torch.zeros(40, dtype=torch.int64)
    assert representation_loss(*many, scale, "relative").item() == pytest.approx(math.log1p(math.exp(-2)), rel=1e-6)
    assert representation_loss(*many, scale, "printed").item() == pytest.approx(math.log1p(39 * math.exp(-2.6)))


@pytest.mark.parametrize("form", FORMS)
def test_without_pairs_or_deviation(form):
    _, features, _ = sample()
    for labels, scale in ((torch.arange(7), 1.0), (LABELS[:1], 1.0), (LABELS, 0.0)):
        if scale == 0 and form == "printed":
            continue  # printed, a margin of 0 is a margin
        value, gradient = value_and_gradient(
            lambda x, labels=labels, scale=scale: representation_loss(x, labels, torch.tensor(scale), form),
            features[: len(labels)],
        )
        assert value == 0
        assert not gradient.any()


def test_anchors_without_a_positive():
    """They count as 0 in the printed form, and do not count in the relative one."""
    _, features, _ = sample()
    scale, pair = torch.tensor(1.0), torch.tensor([0, 0])
    labels = torch.tensor([0, 0, 1, 2, 3])
    printed, relative = (representation_loss(features[:2], pair, scale, form) for form in FORMS)
    assert representation_loss(features[:5], labels, scale, "printed").item() == pytest.approx(printed.item() * 2 / 5)
    assert representation_loss(features[:5], labels, scale, "relative").item() == pytest.approx(relative.item())


@pytest.mark.parametrize("form", FORMS)
def test_no_overflow(form):
    for scale in (1e-4, 1e4, 1e15):
        features = scale * sample(dtype=torch.float32)[1]
        mean_deviation = torch.tensor(scale) ** 2 if form == "relative" else torch.tensor(1.0)
        value, gradient = value_and_gradient(
            lambda x, s=mean_deviation: representation_loss(x, LABELS, s, form), features
        )
        assert value.isfinite()
        assert gradient.isfinite().all()


# MR2Loss


def expected_statistic(statistics, name, p):
    """The four statistics from the moments, class by class in float64."""

    def square(vector):
        return (vector.abs() ** p).sum() ** (2 / p)

    mean, deviation = statistics.mean.double(), statistics.p_deviation.double()
    centre = mean[statistics.seen].mean(dim=0)
    return torch.stack(
        [
            {
                "second_moment": square(mean[k]) + deviation[k],
                "deviation": deviation[k],
                "centred": square(mean[k] - centre) + deviation[k],
                "relative": deviation[k] / square(mean[k]),
            }[name]
            for k in range(len(mean))
        ]
    )


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("p", [2.0, 3.0])
@pytest.mark.parametrize("form", FORMS)
def test_mr2_is_its_parts(statistic, p, form):
    options = {"mean_margin": 1.4, "representation_weight": 0.3, "decay": 0.8, "exponent": 0.5}
    loss = MR2Loss(K, D, statistic=statistic, p=p, representation=form, **options)
    statistics = ClassStatistics(K, D, decay=0.8, p=p)
    for logits, features, labels in batches(4):
        out = loss(logits, features, labels)
        statistics.update(features, labels)  # first the statistics, then the losses
        power = expected_statistic(statistics, statistic, p) ** 0.5
        margins = torch.full((K,), 1.4, dtype=torch.float64)
        margins[:4] = 1.4 * 4 * power[:4] / power[:4].sum()
        torch.testing.assert_close(loss.margins.double(), margins, rtol=1e-5, atol=1e-6)
        mean_deviation = statistics.deviation[:4].double().mean()
        assert loss.mean_deviation.item() == pytest.approx(mean_deviation.item(), rel=1e-6)
        logit = margin_loop(logits.double(), labels, margins).item()
        pairs = pair_loop(features.double(), labels, mean_deviation, form).item()
        assert out.logit.item() == pytest.approx(logit, rel=1e-5)
        assert out.representation.item() == pytest.approx(pairs, rel=1e-4)
        assert out.total.item() == pytest.approx(logit + 0.3 * pairs, rel=1e-5)
        assert torch.equal(out.total, out.logit + 0.3 * out.representation)
        assert out._fields == ("total", "logit", "representation")
        assert {x.shape for x in out} == {torch.Size([])}


def test_margins_and_mean_deviation_carry_no_gradient():
    loss = MR2Loss(K, D, representation_weight=0)
    logits, features, labels = (x.requires_grad_() if x.is_floating_point() else x for x in batches(1)[0])
    loss(logits, features, labels).total.backward()
    assert features.grad is None
    found = logits.grad
    expected = torch.autograd.grad(margin_cross_entropy(logits, labels, loss.margins.detach()), logits)[0]
    assert torch.equal(found, expected)

    loss = MR2Loss(K, D, representation_weight=2.0)
    out = loss(logits, features, labels)
    found = torch.autograd.grad(out.total, features)[0]
    pairs = representation_loss(features, labels, loss.mean_deviation.detach(), "relative")
    torch.testing.assert_close(found, 2 * torch.autograd.grad(pairs, features)[0])


def test_defaults_and_the_paper_s_setting():
    loss = MR2Loss(K, D)
    assert (loss.mean_margin, loss.statistics.decay, loss.statistics.p) == (1, 0.9, 2)
    assert (loss.statistic, loss.exponent, loss.representation) == ("second_moment", 1 / 3, "relative")
    assert (loss.representation_weight, loss.warmup) == (0.1, 0)
    paper = MR2Loss.paper(K, D)
    assert (paper.statistic, paper.exponent, paper.representation) == ("second_moment", 1 / 3, "printed")
    assert (paper.representation_weight, paper.statistics.decay, paper.statistics.p) == (0.1, 0.9, 2)
    changed = MR2Loss.paper(K, D, mean_margin=2.0, representation_weight=0.01)
    assert (changed.mean_margin, changed.representation_weight, changed.representation) == (2, 0.01, "printed")


@pytest.mark.parametrize("form", FORMS)
def test_before_any_update(form):
    loss = MR2Loss(K, D, mean_margin=1.7, representation=form).eval()
    logits, features, labels = batches(1)[0]
    features.requires_grad_()
    out = loss(logits, features, labels)
    assert out.representation == 0
    assert torch.equal(loss.margins, torch.full((K,), 1.7))
    assert out.total.item() == pytest.approx(F.cross_entropy(logits / 1.7, labels).item())
    assert not torch.autograd.grad(out.total + 0 * features.sum(), features)[0].any()


def test_eval_mode_moves_nothing():
    loss = MR2Loss(K, D)
    for batch in batches(3):
        loss(*batch)
    state = copy.deepcopy(loss.state_dict())
    loss.eval()
    first = loss(*batches(1, seed=9)[0])
    for batch in batches(3, seed=5):
        loss(*batch)
    torch.testing.assert_close(loss.state_dict(), state, rtol=0, atol=0)
    assert loss(*batches(1, seed=9)[0]) == first
    loss.train()(*batches(1, seed=9)[0])
    assert not torch.equal(loss.statistics.mean, state["statistics.mean"])


def test_statistics_survive_epochs():
    """Going in and out of eval mode, as every epoch does, changes nothing."""
    through, broken = MR2Loss(K, D), MR2Loss(K, D)
    for batch in batches(6):
        through(*batch)
        broken(*batch)
        broken.eval()(*batches(1, seed=50)[0])
        broken.train()
    torch.testing.assert_close(through.state_dict(), broken.state_dict(), rtol=0, atol=0)


def test_classes_seen_once_do_not_lower_the_mean_deviation():
    loss = MR2Loss(3, 2, statistic="deviation", mean_margin=2.0)
    assert loss.mean_deviation == 0
    logits = torch.zeros(3, 3)
    loss(logits, torch.tensor([[0.0, 1.0], [0.0, 3.0], [9.0, 9.0]]), torch.tensor([0, 0, 1]))
    assert loss.mean_deviation == 1
    assert loss.margins.tolist() == [2.0, 2.0, 2.0]  # class 1 has no deviation yet, class 2 no example


def test_relative_statistic_of_a_class_about_the_origin_is_finite():
    for scale in (1e-4, 1.0, 1e4):
        loss = MR2Loss(2, 2, statistic="relative")
        features = scale * torch.tensor([[3.0, 4.0], [-3.0, -4.0], [1.0, 0.0], [1.0, 1.0]])
        out = loss(torch.zeros(4, 2), features, torch.tensor([0, 0, 1, 1]))
        assert out.total.isfinite()
        assert loss.class_statistic[0].item() == pytest.approx(1 / torch.finfo(torch.float32).eps)
        assert loss.class_statistic[1].item() == pytest.approx(0.25 / 1.25)


def test_warmup():
    loss = MR2Loss(K, D, warmup=2, mean_margin=1.5, representation_weight=0.2)
    without = MR2Loss(K, D, mean_margin=1.5, representation_weight=0.2)
    for step, batch in enumerate(batches(4)):
        loss.eval()(*batch)  # does not count
        out, plain = loss.train()(*batch), without(*batch)
        torch.testing.assert_close(loss.statistics.state_dict(), without.statistics.state_dict(), rtol=0, atol=0)
        assert out.representation == plain.representation
        if step < 2:
            assert torch.equal(loss.margins, torch.full((K,), 1.5))
            assert out.logit.item() == pytest.approx(F.cross_entropy(batch[0] / 1.5, batch[2]).item())
        else:
            assert torch.equal(loss.margins, without.margins)
            assert torch.equal(out.total, plain.total)
    assert loss.updates == 4
    assert loss.updates.dtype == torch.int64
    assert loss.half().updates == 4


def test_a_refused_batch_changes_nothing():
    loss = MR2Loss(K, D)
    logits, features, labels = batches(1)[0]
    loss(logits, features, labels)
    state = copy.deepcopy(loss.state_dict())
    for broken in (
        (logits * torch.nan, features, labels),
        (logits, features / 0, labels),
        (logits[:5], features, labels),
    ):
        with pytest.raises(ValueError, match="expected"):
            loss(*broken)
    torch.testing.assert_close(loss.state_dict(), state, rtol=0, atol=0)


# Uniform margins are an optimiser setting.


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(6, D), nn.Tanh())
        self.head = nn.Linear(D, K)
        self.double()

    def forward(self, x):
        features = self.backbone(x)
        return self.head(features), features


def train(network, optimiser, loss, steps=40):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, labels = torch.randn(16, 6, generator=generator).double(), torch.randint(K, (16,), generator=generator)
        logits, features = network(x)
        optimiser.zero_grad()
        loss(logits, features, labels).backward()
        optimiser.step()


@pytest.mark.parametrize("c", [2.0, 0.5, 1.75])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam", "adamw"])
def test_mean_margin_is_a_learning_rate(c, optimiser):
    """c̄ = plain cross-entropy with the head's initialisation divided by c̄ and other settings of the head's optimiser.

    SGD, with momentum or without: learning rate / c̄², weight decay · c̄². Adam: learning rate / c̄, ε · c̄, and an L2
    weight decay · c̄²; a decoupled weight decay · c̄. The backbone's settings stay as they are.
    """
    rate, decay, eps = 0.1, 0.01, 1e-8
    kind = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    more = {"momentum": {"momentum": 0.9, "nesterov": True}, "adam": {"eps": eps}, "adamw": {"eps": eps}}
    head = {
        "sgd": {"lr": rate / c**2, "weight_decay": decay * c**2},
        "momentum": {"lr": rate / c**2, "weight_decay": decay * c**2},
        "adam": {"lr": rate / c, "weight_decay": decay * c**2, "eps": eps * c},
        "adamw": {"lr": rate / c, "weight_decay": decay * c, "eps": eps * c},
    }[optimiser]
    settings = {"lr": rate, "weight_decay": decay, **more.get(optimiser, {})}

    margins, plain = Network(), Network()
    with torch.no_grad():
        for parameter in plain.head.parameters():
            parameter /= c
    uniform = MR2Loss(K, D, mean_margin=c, exponent=0.0, representation_weight=0.0)
    train(margins, kind[optimiser](margins.parameters(), **settings), lambda z, f, y: uniform(z, f, y).total)
    groups = [{"params": plain.backbone.parameters()}, {"params": plain.head.parameters(), **head}]
    train(plain, kind[optimiser](groups, **settings), lambda z, f, y: F.cross_entropy(z, y))

    start = Network()
    for (name, ours), theirs, before in zip(
        margins.named_parameters(), plain.parameters(), start.parameters(), strict=True
    ):
        expected = theirs * c if name.startswith("head") else theirs
        assert not torch.allclose(ours, before, rtol=0.05)
        if math.log2(c).is_integer() and optimiser != "adam":
            assert torch.equal(ours, expected)  # powers of two are exact in floating point, and so is the equivalence
        else:
            torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)
