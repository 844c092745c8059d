"""The two losses and MR2Loss against loops over examples, classes and pairs, and in the corners."""

import copy
import importlib.util
import io
import math
import pickle
import shutil
from pathlib import Path

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


def sample(seed=0, labels=LABELS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(labels), K, generator=generator, dtype=torch.float64)
    features = torch.randn(len(labels), D, generator=generator, dtype=torch.float64)
    return logits.to(dtype), features.to(dtype), labels


def batches(count, seed=0):
    """Batches of 12 examples in float32; class 4 never occurs."""
    generator = torch.Generator().manual_seed(seed)
    return [sample(seed + i, torch.randint(4, (12,), generator=generator), torch.float32) for i in range(count)]


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
    options = {"mean_margin": 1.4, "representation_weight": 0.3, "decay": 0.8, "exponent": 0.5, "warmup": 0}
    loss = MR2Loss(K, D, statistic=statistic, p=p, representation=form, **options)
    statistics = ClassStatistics(K, D, decay=0.8, p=p)
    for logits, features, labels in batches(4):
        out = loss(logits, features, labels)
        statistics.update(features, labels)  # first the statistics, then the losses
        power = expected_statistic(statistics, statistic, p) ** 0.5
        known = statistics.seen & (power > 0)
        margins = torch.full((K,), 1.4, dtype=torch.float64)
        margins[known] *= known.sum() * power[known] / power[known].sum()
        torch.testing.assert_close(loss.margins.double(), margins, rtol=1e-5, atol=1e-6)
        mean_deviation = statistics.deviation[statistics.deviation > 0].double().mean()
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
    loss = MR2Loss(K, D, warmup=0, representation_weight=0)
    logits, features, labels = (x.requires_grad_() if x.is_floating_point() else x for x in batches(1)[0])
    loss(logits, features, labels).total.backward()
    assert features.grad is None
    found = logits.grad
    expected = torch.autograd.grad(margin_cross_entropy(logits, labels, loss.margins.detach()), logits)[0]
    assert torch.equal(found, expected)

    loss = MR2Loss(K, D, warmup=0, representation_weight=2.0)
    out = loss(logits, features, labels)
    found = torch.autograd.grad(out.total, features)[0]
    pairs = representation_loss(features, labels, loss.mean_deviation.detach(), "relative")
    torch.testing.assert_close(found, 2 * torch.autograd.grad(pairs, features)[0])


@pytest.mark.parametrize("form", FORMS)
def test_mean_deviation_is_a_constant_to_the_gradient(form):
    _, features, labels = sample()
    mean_deviation = torch.tensor(1.3, requires_grad=True)
    representation_loss(features.requires_grad_(), labels, mean_deviation, form).backward()
    assert features.grad.any()
    assert mean_deviation.grad is None


def test_defaults_and_the_paper_s_setting():
    loss = MR2Loss(K, D)
    assert (loss.mean_margin, loss.statistics.decay, loss.statistics.p) == (1, 0.9, 2)
    assert (loss.statistic, loss.exponent, loss.representation) == ("second_moment", 1 / 3, "relative")
    assert (loss.representation_weight, loss.warmup) == (0.01, 100)
    paper = MR2Loss.paper(K, D)
    assert (paper.statistic, paper.exponent, paper.representation) == ("second_moment", 1 / 3, "printed")
    assert (paper.representation_weight, paper.warmup, paper.statistics.decay, paper.statistics.p) == (0.1, 0, 0.9, 2)
    changed = MR2Loss.paper(K, D, mean_margin=2.0, representation_weight=0.01)
    assert (changed.mean_margin, changed.representation_weight, changed.representation) == (2, 0.01, "printed")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_before_any_update(form, statistic):
    loss = MR2Loss(K, D, warmup=0, mean_margin=1.7, representation=form, statistic=statistic).eval()
    logits, features, labels = batches(1)[0]
    features.requires_grad_()
    out = loss(logits, features, labels)
    assert out.representation == 0
    assert torch.equal(loss.class_statistic, torch.zeros(K))
    assert torch.equal(loss.margins, torch.full((K,), 1.7))
    assert out.total.item() == pytest.approx(F.cross_entropy(logits / 1.7, labels).item())
    assert not torch.autograd.grad(out.total + 0 * features.sum(), features)[0].any()


def test_eval_mode_moves_nothing():
    loss = MR2Loss(K, D, warmup=0)
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
    through, broken = MR2Loss(K, D, warmup=0), MR2Loss(K, D, warmup=0)
    for batch in batches(6):
        through(*batch)
        broken(*batch)
        broken.eval()(*batches(1, seed=50)[0])
        broken.train()
    torch.testing.assert_close(through.state_dict(), broken.state_dict(), rtol=0, atol=0)


def test_classes_seen_once_do_not_lower_the_mean_deviation():
    loss = MR2Loss(3, 2, warmup=0, statistic="deviation", mean_margin=2.0)
    assert loss.mean_deviation == 0
    logits = torch.zeros(3, 3)
    loss(logits, torch.tensor([[0.0, 1.0], [0.0, 3.0], [9.0, 9.0]]), torch.tensor([0, 0, 1]))
    assert loss.mean_deviation == 1
    assert loss.margins.tolist() == [2.0, 2.0, 2.0]  # class 1 has no deviation yet, class 2 no example


def test_relative_statistic_of_a_class_about_the_origin_is_finite():
    for scale in (1e-4, 1.0, 1e4):
        loss = MR2Loss(2, 2, warmup=0, statistic="relative")
        features = scale * torch.tensor([[3.0, 4.0], [-3.0, -4.0], [1.0, 0.0], [1.0, 1.0]])
        out = loss(torch.zeros(4, 2), features, torch.tensor([0, 0, 1, 1]))
        assert out.total.isfinite()
        assert loss.class_statistic[0].item() == pytest.approx(1 / torch.finfo(torch.float32).eps)
        assert loss.class_statistic[1].item() == pytest.approx(0.25 / 1.25)


def test_warmup():
    loss = MR2Loss(K, D, warmup=2, mean_margin=1.5, representation_weight=0.2)
    without = MR2Loss(K, D, warmup=0, mean_margin=1.5, representation_weight=0.2)
    for step, batch in enumerate(batches(4)):
        loss.eval()(*batch)  # does not count
        out, plain = loss.train()(*batch), without(*batch)
        torch.testing.assert_close(loss.statistics.state_dict(), without.statistics.state_dict(), rtol=0, atol=0)
        if step < 2:
            assert out.representation == 0
            assert out.total == out.logit
            assert torch.equal(loss.margins, torch.full((K,), 1.5))
            assert out.logit.item() == pytest.approx(F.cross_entropy(batch[0] / 1.5, batch[2]).item())
        else:
            assert torch.equal(loss.margins, without.margins)
            assert out.representation == plain.representation > 0
            assert torch.equal(out.total, plain.total)
    assert loss.statistics.updates == 4
    assert loss.half().statistics.updates == 4


def test_statistics_updated_by_hand_count():
    loss = MR2Loss(K, D, warmup=1)
    for step, (_, features, labels) in enumerate(batches(2)):
        loss.statistics.update(features, labels)
        assert torch.equal(loss.margins, torch.ones(K)) == (step == 0)


def test_a_refused_batch_changes_nothing():
    loss = MR2Loss(K, D, warmup=0)
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
    options = {"lr": rate, "weight_decay": decay, **more.get(optimiser, {})}

    margins, plain = Network(), Network()
    with torch.no_grad():
        for parameter in plain.head.parameters():
            parameter /= c
    uniform = MR2Loss(K, D, mean_margin=c, exponent=0.0, representation_weight=0.0)
    train(margins, kind[optimiser](margins.parameters(), **options), lambda z, f, y: uniform(z, f, y).total)
    groups = [{"params": plain.backbone.parameters()}, {"params": plain.head.parameters(), **head}]
    train(plain, kind[optimiser](groups, **options), lambda z, f, y: F.cross_entropy(z, y))

    start = Network()
    for (name, ours), theirs, before in zip(
        margins.named_parameters(), plain.parameters(), start.parameters(), strict=True
    ):
        expected = theirs * c if name.startswith("head") else theirs
        assert not torch.allclose(ours, before, rtol=0.05)
        if math.log2(c).is_integer():
            assert torch.equal(ours, expected)  # powers of two are exact in floating point, and so is the equivalence
        else:
            torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


# Copies, processes, graphs


def run(network, loss, optimiser, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        logits, features = network(torch.randn(10, 6, generator=generator).double())
        out = loss(logits, features, torch.randint(K, (10,), generator=generator))
        optimiser.zero_grad()
        out.total.backward()
        optimiser.step()


def test_save_load_and_continue_is_never_having_stopped():
    def fresh(seed):
        network, loss = Network(seed), MR2Loss(K, D, statistic="deviation", warmup=4, p=3)
        return network, loss, torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.9)

    through = fresh(0)
    run(*through, 0, 12)
    begun, stream = fresh(0), io.BytesIO()
    run(*begun, 0, 5)
    torch.save([part.state_dict() for part in begun], stream)
    stream.seek(0)
    resumed = fresh(1)
    for part, state in zip(resumed, torch.load(stream, weights_only=True), strict=True):
        part.load_state_dict(state)
    run(*resumed, 5, 12)
    for ours, theirs in zip(resumed[:2], through[:2], strict=True):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert set(resumed[1].state_dict()) == {
        "statistics.updates",
        "statistics.mean",
        "statistics.deviation",
        "statistics._p_deviation",
        "statistics.seen",
    }


def test_a_copy_continues_as_the_original():
    first, *rest = batches(3)
    original, through = MR2Loss(K, D, warmup=0), MR2Loss(K, D, warmup=0)
    original(*first)
    through(*first)
    copies = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    for batch in rest:
        expected = through(*batch)
        assert all(other(*batch) == expected for other in copies)
    assert original.statistics.updates == 1


def rank(number, address, folder):
    """One of two processes, each with half of every batch."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=number, world_size=2)
    loss, outputs = MR2Loss(K, D, warmup=0, statistic="centred"), []
    for batch in batches(4):
        outputs.append(torch.stack(loss(*(part[number::2] for part in batch))))
    torch.save({"state": loss.state_dict(), "margins": loss.margins, "outputs": outputs}, folder / f"{number}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one_on_the_joined_batch(tmp_path):
    torch.multiprocessing.spawn(rank, ((tmp_path / "rendezvous").as_uri(), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in (0, 1))
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
    loss = MR2Loss(K, D, warmup=0, statistic="centred")
    for batch, ours, theirs in zip(batches(4), first["outputs"], second["outputs"], strict=True):
        joined = loss(*batch)
        torch.testing.assert_close((ours[1] + theirs[1]) / 2, joined.logit, rtol=1e-5, atol=0)
        for number, output in enumerate(
            (ours, theirs)
        ):  # margins and s̄ are those of the joined batch, pairs a rank's own
            _, features, labels = (part[number::2] for part in batch)
            pairs = representation_loss(features, labels, loss.mean_deviation, "relative")
            torch.testing.assert_close(output[2], pairs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(first["state"], loss.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first["margins"], loss.margins, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("backend", "form"), [("aot_eager", "printed"), ("aot_eager", "relative"), ("inductor", "relative")]
)
def test_compiled_equals_eager(backend, form):
    if backend == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    eager = MR2Loss(K, D, representation=form, statistic="relative", warmup=1)
    compiled = torch.compile(copy.deepcopy(eager), backend=backend, fullgraph=True)
    for logits, features, labels in batches(3):
        found, expected = [], []
        for loss, collected in ((compiled, found), (eager, expected)):
            leaves = logits.clone().requires_grad_(), features.clone().requires_grad_()
            out = loss(*leaves, labels)
            out.total.backward()
            collected += [*out, leaves[0].grad, leaves[1].grad]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled.state_dict(), {f"_orig_mod.{k}": v for k, v in eager.state_dict().items()})
    # No value is looked at in a graph: a row that is not finite spoils its loss, never the statistics.
    compiled(logits, features.index_fill(0, torch.tensor([1]), torch.nan), labels)
    assert all(buffer.isfinite().all() for buffer in compiled.buffers())


def test_the_benchmark_s_reference_agrees():
    path = Path(__file__).parent.parent / "benchmarks" / "loop_reference.py"
    specification = importlib.util.spec_from_file_location("loop_reference", path)
    reference = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(reference)
    options = {"mean_margin": 1.3, "representation_weight": 0.2, "decay": 0.8}
    losses = MR2Loss.paper(K, D, **options), reference.LoopMR2(K, D, **options)
    for batch in batches(4):
        torch.testing.assert_close(tuple(losses[0](*batch)), losses[1](*batch), rtol=1e-5, atol=1e-6)


# Every shape, pattern of labels, type and scale


@st.composite
def situations(draw):
    """A module and five batches for it."""
    k, d = draw(st.integers(2, 7)), draw(st.sampled_from([1, 2, 3, 8, 33]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    loss = MR2Loss(
        k,
        d,
        statistic=draw(st.sampled_from(STATISTICS)),
        representation=draw(st.sampled_from(FORMS)),
        p=draw(st.sampled_from([1.0, 2.0, 3.0, 12.0])),
        decay=draw(st.sampled_from([0.0, 0.5, 0.9, 0.999])),
        exponent=draw(st.sampled_from([0.0, 0.25, 1 / 3, 1.0, -1 / 3])),
        mean_margin=draw(st.sampled_from([0.1, 1.0, 5.0])),
        warmup=draw(st.integers(0, 2)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = 10 ** draw(st.floats(-4, 4))
    made = []
    for _ in range(5):
        b = draw(st.integers(1, 12))
        pattern = draw(st.sampled_from(["any", "one class", "distinct", "a class absent", "in turn"]))
        labels = {
            "any": torch.randint(k, (b,), generator=generator),
            "one class": torch.full((b,), draw(st.integers(0, k - 1))),
            "distinct": torch.randperm(k, generator=generator)[:b],
            "a class absent": torch.randint(1, k, (b,), generator=generator),
            "in turn": torch.arange(b) % k,
        }[pattern]
        features = torch.randn(len(labels), d, generator=generator)
        kind = draw(st.sampled_from(["plain", "rectified", "zero", "equal", "unit", "far", "uneven"]))
        features = {
            "plain": features,
            "rectified": features.relu(),
            "zero": 0 * features,
            "equal": features[:1].expand_as(features),
            "unit": F.normalize(features, dim=1),
            "far": features + 100,
            "uneven": features * 10.0 ** torch.randint(-4, 1, (len(labels), 1), generator=generator),
        }[kind]
        features = (scale * features).clamp(-6e4, 6e4)  # what float16 holds
        logits = torch.randn(len(labels), k, generator=generator) * 10 ** draw(st.floats(-4, 4))
        made.append((logits.clamp(-6e4, 6e4).to(dtype), features.to(dtype), labels))
    autocast = draw(st.sampled_from([None, torch.bfloat16, torch.float16]))
    return loss, made, autocast


def test_nothing_is_ever_non_finite():
    seen = 0

    @settings(max_examples=450, deadline=None, derandomize=True, database=None)
    @given(situations())
    def check(situation):
        nonlocal seen
        loss, made, autocast = situation
        for logits, features, labels in made:
            logits.requires_grad_()
            features.requires_grad_()
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                out = loss(logits, features, labels)
            assert torch.stack(out).isfinite().all()
            assert out.representation >= 0
            out.total.backward()
            # Gradients go as 1/γ and as d/s̄, which may be more than float16 holds; nothing else may go wrong.
            most = torch.finfo(logits.dtype).max
            assert logits.grad[most * loss.margins[labels] > 1].isfinite().all()
            steepest = 4 * loss.representation_weight * (features.max() - features.min()).float()
            if loss.representation == "printed" or steepest <= most * loss.mean_deviation:
                assert features.grad.isfinite().all()
            assert all(buffer.isfinite().all() for buffer in loss.buffers())
            assert (loss.statistics.deviation >= 0).all()
            assert (loss.margins > 0).all()
            margins = loss.margins[loss.statistics.seen]
            assert margins.mean().item() == pytest.approx(loss.mean_margin, rel=1e-4)
            assert loss.eval()(logits, features, labels).total.isfinite()
            loss.train()
            seen += 1

    check()
    assert seen >= 2000


# Bad input


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_classes": 1}, ValueError, "num_classes is 1; expected an integer of at least 2"),
        ({"num_classes": 10.0}, TypeError, "num_classes is 10.0; expected an integer of at least 2"),
        ({"num_classes": True}, TypeError, "num_classes is True; expected an integer"),
        ({"feature_dim": 0}, ValueError, "feature_dim is 0; expected an integer of at least 1"),
        ({"feature_dim": "64"}, TypeError, "feature_dim is '64'; expected an integer"),
        ({"mean_margin": 0}, ValueError, "mean_margin is 0; expected a finite number greater than 0"),
        ({"mean_margin": -1.0}, ValueError, "mean_margin is -1.0; expected"),
        ({"exponent": math.inf}, ValueError, "exponent is inf; expected a finite number"),
        ({"decay": 1.0}, ValueError, r"decay is 1.0; expected a number in \[0, 1\)"),
        ({"decay": -0.1}, ValueError, "decay is -0.1; expected"),
        ({"decay": math.nan}, ValueError, "decay is nan; expected"),
        ({"decay": None}, ValueError, "decay is None; expected"),
        ({"p": 0.5}, ValueError, "p is 0.5; expected a finite norm of at least 1"),
        ({"p": math.inf}, ValueError, "p is inf; expected"),
        (
            {"representation_weight": -0.1},
            ValueError,
            "representation_weight is -0.1; expected a finite number, at least 0",
        ),
        ({"representation_weight": math.inf}, ValueError, "representation_weight is inf; expected"),
        (
            {"statistic": "variance"},
            ValueError,
            "statistic is 'variance'; expected one of second_moment, deviation, cen",
        ),
        ({"representation": "both"}, ValueError, "representation is 'both'; expected one of printed, relative"),
        ({"warmup": -1}, ValueError, "warmup is -1; expected an integer of at least 0"),
        ({"warmup": 1.5}, TypeError, "warmup is 1.5; expected an integer"),
        ({"logits": torch.zeros(6, 4)}, ValueError, r"logits has shape \[6, 4\]; expected \[B, 3\]"),
        ({"logits": torch.zeros(6)}, ValueError, r"logits has shape \[6\]; expected \[B, 3\]"),
        (
            {"logits": torch.zeros(5, 3)},
            ValueError,
            r"labels has shape \[6\]; expected \[5\], one class index for each",
        ),
        (
            {"logits": torch.zeros(6, 3, dtype=torch.int64)},
            TypeError,
            "logits has type torch.int64; expected a floating",
        ),
        ({"logits": torch.full((6, 3), math.nan)}, ValueError, "logits holds NaN or infinite values; expected finite"),
        ({"logits": np.zeros((6, 3))}, TypeError, "logits has type ndarray; expected a floating-point tensor"),
        ({"features": torch.zeros(6, 5)}, ValueError, r"features has shape \[6, 5\]; expected \[6, 4\]"),
        ({"features": torch.zeros(4)}, ValueError, r"features has shape \[4\]; expected \[6, 4\]"),
        ({"features": torch.zeros(5, 4)}, ValueError, r"features has shape \[5, 4\]; expected \[6, 4\]"),
        ({"features": torch.zeros(6, 4, 1)}, ValueError, r"features has shape \[6, 4, 1\]; expected \[6, 4\]"),
        ({"features": torch.zeros(6, 4).int()}, TypeError, "features has type torch.int32; expected a floating-point"),
        ({"features": torch.full((6, 4), math.inf)}, ValueError, "features holds NaN or infinite values; expected"),
        ({"features": torch.eye(6, 4).log()}, ValueError, "features holds NaN or infinite values"),
        ({"features": 1 / (torch.eye(6, 4) - 1)}, ValueError, "features holds NaN or infinite values"),
        ({"logits": -torch.eye(6, 3).log()}, ValueError, "logits holds NaN or infinite values"),
        ({"features": None}, TypeError, r"features has type NoneType; expected a floating-point tensor \[6, 4\]"),
        ({"labels": torch.tensor([0, 1, 2, 3, 0, 1])}, ValueError, "labels lie in 0 … 3; expected 0 … 2"),
        ({"labels": torch.tensor([0, 1, 2, -1, 0, 1])}, ValueError, "labels lie in -1 … 2; expected 0 … 2"),
        (
            {"labels": torch.zeros(6)},
            TypeError,
            r"labels has type torch.float32; expected class indices, an int64 tensor",
        ),
        ({"labels": torch.full((6, 3), 1 / 3)}, TypeError, "labels has type torch.float32; expected class indices"),
        ({"labels": torch.zeros(6, 3, dtype=torch.int64)}, ValueError, r"labels has shape \[6, 3\]; expected \[6\]"),
        (
            {"labels": torch.zeros(6, dtype=torch.uint8)},
            TypeError,
            "labels has type torch.uint8; expected class indices",
        ),
        ({"labels": [0, 1, 2, 0, 1, 2]}, TypeError, "labels has type list; expected class indices, an int64 tensor"),
        ({"labels": np.zeros(6, dtype=np.int64)}, TypeError, "labels has type ndarray; expected class indices"),
        (
            {"logits": torch.zeros(0, 3), "features": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
            ValueError,
            r"logits has shape \[0, 3\]; expected at least one row",
        ),
    ],
)
def test_bad_input(change, error, says):
    given = {"logits": torch.zeros(6, 3), "features": torch.zeros(6, 4), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    inputs = [change.get(name, value) for name, value in given.items()]
    options = {"num_classes": 3, "feature_dim": 4} | {k: v for k, v in change.items() if k not in given}

    def refused(train):
        loss = MR2Loss(**options).train(train)
        return loss(*inputs) if change.keys() <= given.keys() else None  # a bad option is refused before any call

    for train in (True, False):
        with pytest.raises(error, match=f"^{says}") as caught:
            refused(train)
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert str(caught.value)[-1] in ".?"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"margins": torch.ones(4)}, ValueError, r"margins has shape \[4\]; expected \[3\]"),
        ({"margins": torch.ones(3, 1)}, ValueError, r"margins has shape \[3, 1\]; expected \[3\]"),
        ({"margins": 1.0}, TypeError, r"margins has type float; expected a floating-point tensor \[3\]"),
        ({"margins": torch.ones(3).int()}, TypeError, "margins has type torch.int32; expected"),
        ({"margins": torch.tensor([1.0, 0.0, 1.0])}, ValueError, "margins lie in 0.0 … 1.0; expected positive"),
        ({"margins": torch.tensor([1.0, -2.0, 1.0])}, ValueError, "margins lie in -2.0 … 1.0; expected positive"),
        ({"margins": torch.tensor([1.0, math.nan, 1.0])}, ValueError, "margins lie in nan"),
        ({"margins": torch.tensor([1.0, math.inf, 1.0])}, ValueError, "margins lie in 1.0 … inf"),
        ({"logits": torch.full((6, 3), -math.inf)}, ValueError, "logits holds NaN or infinite values"),
        ({"labels": torch.full((6,), 3)}, ValueError, "labels lie in 3 … 3; expected 0 … 2"),
        ({"labels": torch.zeros(7, dtype=torch.int64)}, ValueError, r"labels has shape \[7\]; expected \[6\]"),
    ],
)
def test_bad_input_to_margin_cross_entropy(change, error, says):
    given = {"logits": torch.zeros(6, 3), "labels": torch.zeros(6, dtype=torch.int64), "margins": torch.ones(3)}
    with pytest.raises(error, match=f"^{says}"):
        margin_cross_entropy(**(given | change))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"mean_deviation": torch.tensor(-1.0)},
            ValueError,
            "mean_deviation is -1.0; expected a finite number of at le",
        ),
        ({"mean_deviation": torch.tensor(math.nan)}, ValueError, "mean_deviation is nan; expected"),
        ({"mean_deviation": torch.tensor(math.inf)}, ValueError, "mean_deviation is inf; expected"),
        ({"mean_deviation": torch.ones(3)}, ValueError, r"mean_deviation has shape \[3\]; expected a scalar"),
        ({"form": "squared"}, ValueError, "form is 'squared'; expected one of printed, relative"),
        ({"features": torch.zeros(6)}, ValueError, r"features has shape \[6\]; expected \[B, D\]"),
        ({"features": torch.zeros(6, 4).long()}, TypeError, "features has type torch.int64; expected a floating-point"),
        ({"features": torch.full((6, 4), math.nan)}, ValueError, "features holds NaN or infinite values"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, r"labels has shape \[5\]; expected \[6\]"),
    ],
)
def test_bad_input_to_representation_loss(change, error, says):
    given = {"features": torch.zeros(6, 4), "labels": torch.zeros(6, dtype=torch.int64), "mean_deviation": 1.0}
    with pytest.raises(error, match=f"^{says}"):
        representation_loss(**(given | change))


def test_integers_from_numpy_will_do():
    loss = MR2Loss(np.int64(5), np.int64(4), warmup=np.int64(0), mean_margin=np.float32(1.5))
    assert loss(*batches(1)[0]).total.isfinite()
