"""Each baseline against an independent reference, in degenerate batches, and trained and resumed through ``fit``."""

import ast
import copy
import inspect
import itertools
import math
import multiprocessing
import os
import signal
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize
import torch
import torchvision
from pytorch_metric_learning.losses import SupConLoss
from scipy.special import log_softmax, softmax
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from torch.nn import functional as F

from mr2_core import baselines, margin_cross_entropy, methods, training
from mr2_core.methods import METHODS, build_method
from mr2_core.models import build_model
from mr2_core.training import BatchLoader, Interrupted, Settings, fit

K, D = 5, 6
COUNTS = [100, 50, 20, 10, 5]
NEEDED = {"jtt": {"first_epochs": 1, "upweight": 5.0}, "supcon-two-stage": {"first_epochs": 1}}
BASELINES = [name for name, method in METHODS.items() if method.build.__module__ == "mr2_core.baselines"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def build(name, num_classes=K, feature_dim=D, **hyperparameters):
    return build_method(name, num_classes, feature_dim, **(NEEDED.get(name, {}) | hyperparameters))


def batch(size=40, num_classes=K, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (size,), generator=generator)
    logits, features = (torch.randn(size, width, generator=generator) for width in (num_classes, D))
    return (2 * logits).to(dtype), features.to(dtype), labels


def exactly(*tensors):
    """What a reference computes with: the same numbers, in float64."""
    return [tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in tensors]


def cross_entropies(logits, labels):
    return -log_softmax(logits, axis=1)[np.arange(len(labels)), labels]


# References: logits, features and labels to the loss, in float64


def label_smoothing(z, _, y):
    target = np.full(z.shape, 0.3 / K) + 0.7 * np.eye(K)[y]
    return -(target * log_softmax(z, axis=1)).sum(axis=1).mean()


def focal(z, _, y):
    p = softmax(z, axis=1)[np.arange(len(y)), y]
    return np.mean([-((1 - one) ** 1.5) * math.log(one) for one in p])


def class_balanced(z, _, y):
    effective = np.array([sum(0.9**i for i in range(n)) for n in COUNTS])  # the series that (1 − βⁿ)/(1 − β) sums
    weights = K / effective / sum(1 / effective)
    return log_loss(y, softmax(z, axis=1), sample_weight=weights[y], normalize=False, labels=range(K)) / len(y)


def ldam(z, _, y):
    losses = []
    for row, label in zip(z, y, strict=True):
        margin = 0.4 * (5 / COUNTS[label]) ** 0.25
        others = sum(math.exp(3 * row[k]) for k in range(K) if k != label)
        truth = math.exp(3 * (row[label] - margin))
        losses.append(-math.log(truth / (truth + others)))
    return np.mean(losses)


def logit_adjustment(z, _, y):
    odds = np.exp(z) * (np.array(COUNTS) / 185) ** 0.7
    return log_loss(y, odds / odds.sum(axis=1, keepdims=True), labels=range(K))


def eql(z, _, y):
    losses = []
    for row, label in zip(z, y, strict=True):
        kept = [k for k in range(K) if k == label or COUNTS[k] / 185 >= 0.1]  # classes 3 and 4 are rare
        losses.append(-math.log(math.exp(row[label]) / sum(math.exp(row[k]) for k in kept)))
    return np.mean(losses)


def vs(z, _, y):
    losses = []
    for row, label in zip(z, y, strict=True):
        factor, shift = [(n / 100) ** 0.2 for n in COUNTS], [1.2 * math.log(n / 185) for n in COUNTS]
        gaps = [
            shift[k] - shift[label] + factor[k] * row[k] - factor[label] * row[label] for k in range(K) if k != label
        ]
        losses.append(math.log(1 + sum(map(math.exp, gaps))))
    return np.mean(losses)


def ldt(z, _, y):
    mean = sum(n**0.2 for n in COUNTS) / K
    margins = torch.tensor([mean / n**0.2 for n in COUNTS], dtype=torch.float64)
    return margin_cross_entropy(torch.from_numpy(z), torch.from_numpy(y), margins).item()


def cvar(z, _, y):
    losses = cross_entropies(z, y)
    most = 1 / (0.33 * len(y))
    return -scipy.optimize.linprog(-losses, A_eq=np.ones((1, len(y))), b_eq=[1], bounds=(0, most)).fun


def chi_square(z, _, y):
    losses = cross_entropies(z, y)

    def dual(eta):  # of the supremum, which is its minimum
        return eta + math.sqrt(1 + 2 * 0.8) * math.sqrt(np.mean(np.maximum(losses - eta, 0) ** 2))

    return scipy.optimize.minimize_scalar(dual, bounds=(-20, losses.max()), options={"xatol": 1e-9}).fun


def class_mean(z, _, y):
    return sum(cross_entropies(z, y)[y == k].mean() for k in range(K)) / K


def cross_entropy(z, _, y):
    return log_loss(y, softmax(z, axis=1), labels=range(K))


REFERENCES = [
    ("label-smoothing", {"smoothing": 0.3}, label_smoothing),
    ("focal", {"focus": 1.5}, focal),
    ("class-balanced", {"beta": 0.9, "counts": COUNTS}, class_balanced),
    ("ldam", {"max_margin": 0.4, "scale": 3.0, "counts": COUNTS}, ldam),
    ("logit-adjustment", {"tau": 0.7, "counts": COUNTS}, logit_adjustment),
    ("eql", {"threshold": 0.1, "gamma": 1.0, "counts": COUNTS}, eql),
    ("vs", {"gamma": 0.2, "tau": 1.2, "counts": COUNTS}, vs),
    ("ldt", {"gamma": 0.2, "counts": COUNTS}, ldt),
    ("cvar-dro", {"alpha": 0.33}, cvar),
    ("chi2-dro", {"radius": 0.8}, chi_square),
    ("group-dro", {"step": 0.0}, class_mean),
    ("fair-dro", {}, class_mean),
    ("label-smoothing", {"smoothing": 0.0}, cross_entropy),
    ("focal", {"focus": 0.0}, cross_entropy),
    ("class-balanced", {"beta": 0.0, "counts": COUNTS}, cross_entropy),
    ("eql", {"threshold": 1.0, "gamma": 0.0}, cross_entropy),
    ("cvar-dro", {"alpha": 1.0}, cross_entropy),
    ("chi2-dro", {"radius": 0.0}, cross_entropy),
    *((name, {}, cross_entropy) for name in ("mixup", "lff", "jtt", "supcon-two-stage")),
]
each_reference = pytest.mark.parametrize(
    ("name", "options", "reference"), REFERENCES, ids=lambda value: getattr(value, "__name__", None)
)


@pytest.mark.parametrize("dtype", DTYPES)
@each_reference
def test_formula(name, options, reference, dtype):
    inputs = batch(dtype=dtype)
    out = build(name, **options)(*inputs)
    assert out.total.dtype == torch.promote_types(dtype, torch.float32)
    assert out.total.item() == pytest.approx(float(reference(*exactly(*inputs))), rel=2e-6)
    assert out.logit == out.total
    assert out.representation == 0


@each_reference
def test_gradient(name, options, reference):
    loss, (logits, features, labels) = build(name, **options), batch(12, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: loss(z, features, labels).total, logits.requires_grad_(), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_focal_of_two_classes_is_torchvision_s(dtype):
    logits, features, labels = batch(num_classes=2, dtype=dtype)
    mine = build("focal", 2, focus=2.5)(logits, features, labels).total
    difference = (logits[:, 1].double() - logits[:, 0].double()).float()
    theirs = torchvision.ops.sigmoid_focal_loss(difference, labels.float(), alpha=-1, gamma=2.5, reduction="mean")
    torch.testing.assert_close(mine.float(), theirs, rtol=1e-5, atol=1e-7)


# What class-balanced data does


@pytest.mark.parametrize("counts", [None, [37] * K])
@pytest.mark.parametrize("name", ["class-balanced", "logit-adjustment", "vs", "ldt", "eql"])
def test_on_balanced_data_it_is_erm(name, counts):
    logits, features, labels = batch()
    mine, erm = (logits.clone().requires_grad_() for _ in range(2))
    loss = build(name, counts=counts)(mine, features, labels).total
    expected = build_method("erm", K, D)(erm, features, labels).total
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(mine.grad, erm.grad, rtol=1e-5, atol=1e-8)


def test_on_balanced_data_ldam_is_one_additive_margin_which_is_not_erm():
    logits, features, labels = batch()
    loss = build("ldam", max_margin=0.7)(logits, features, labels).total
    shifted = logits.clone()
    shifted[range(len(labels)), labels] -= 0.7
    torch.testing.assert_close(loss, F.cross_entropy(shifted, labels))
    assert loss > 1.1 * F.cross_entropy(logits, labels)
    deferred = build("ldam-drw", max_margin=0.7)
    deferred.begin_epoch(None, None, 99, 100)
    assert torch.equal(deferred(logits, features, labels).total, loss)


@pytest.mark.parametrize(("threshold", "rare"), [(0.1999, False), (0.2, False), (0.2001, True), (1.0, True)])
def test_on_balanced_data_eql_is_erm_only_where_its_threshold_excludes_every_class(threshold, rare):
    logits, features, labels = batch(400)
    loss = build("eql", threshold=threshold, gamma=0.5)(logits, features, labels).total
    erm = F.cross_entropy(logits, labels)
    assert loss < 0.8 * erm if rare else loss.item() == pytest.approx(erm.item(), rel=1e-6)


def test_eql_drops_each_rare_negative_with_its_probability():
    torch.manual_seed(0)
    loss = build("eql", 100, threshold=1.0, gamma=0.9)
    labels = torch.arange(100).repeat(10)
    kept = loss.each(torch.zeros(1000, 100), labels).exp()
    assert kept.min() >= 1
    assert (kept - 1).mean().item() / 99 == pytest.approx(0.1, abs=0.005)
    assert kept.unique().numel() > 10
    torch.testing.assert_close(loss.eval().each(torch.zeros(1000, 100), labels).exp(), torch.full((1000,), 100.0))


@pytest.mark.parametrize("name", ["group-dro", "fair-dro"])
def test_on_balanced_data_class_weights_still_move(name):
    logits, features, labels = batch()
    logits[labels == 0, 0] = -9
    loss = build(name)
    if name == "fair-dro":
        loss.begin_epoch(Fixed(logits), FixedLoader(logits, labels), 1, 10)
        weights = loss.weights
    else:
        loss(logits, features, labels)
        weights = loss.shares
    assert weights[0] == weights.max() > 1 / K
    assert weights.sum().item() == pytest.approx(1)


# Methods with a state, with pairs, or with further arguments


def test_deferred_weights_come_when_their_time_has_come():
    logits, features, labels = batch()
    loss, ldam = build("ldam-drw", defer=0.5, beta=0.9, counts=COUNTS), build("ldam", counts=COUNTS)
    plain = ldam.each(logits, labels)
    for epoch in range(6):
        loss.begin_epoch(None, None, epoch, 6)
        weights = torch.ones(K)
        if epoch >= 3:
            effective = torch.tensor([sum(0.9**i for i in range(n)) for n in COUNTS])
            weights = K / effective / (1 / effective).sum()
        expected = sum(weights[y] * one for y, one in zip(labels, plain, strict=True)) / weights[labels].sum()
        torch.testing.assert_close(loss(logits, features, labels).total, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 15])  # of 24: with 15 some examples have no positive
def test_pairs_of_supcon_are_those_of_pytorch_metric_learning(dtype, classes):
    _, vectors, labels = batch(24, classes, dtype)
    singles = (torch.bincount(labels, minlength=classes) == 1).sum()
    assert (singles > 0) == (classes == 15)
    mine = vectors.clone().requires_grad_()
    theirs = vectors.double().requires_grad_()
    loss = baselines.supervised_contrastive(mine, labels, 0.2)
    expected = SupConLoss(temperature=0.2)(theirs, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype.itemsize > 2 else {"rtol": 0.02, "atol": 1e-3}
    torch.testing.assert_close(mine.grad.double(), theirs.grad, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_supcon_adds_pairs_of_projections(dtype):
    logits, features, labels = batch(dtype=dtype)
    loss = build("supcon", representation_weight=0.3, temperature=0.5, width=4).to(
        torch.promote_types(dtype, torch.float32)
    )
    out = loss(logits, features, labels)
    first, _, second = loss.project
    x, w1, b1, w2, b2 = exactly(features, *(p.detach() for p in (*first.parameters(), *second.parameters())))
    projected = np.maximum(x @ w1.T + b1, 0) @ w2.T + b2
    assert projected.shape[1] == 4
    pairs = SupConLoss(temperature=0.5)(torch.from_numpy(projected), labels).item()
    assert out.representation.item() == pytest.approx(pairs, rel=1e-5)
    assert out.logit.item() == pytest.approx(cross_entropy(*exactly(logits, features, labels)), rel=1e-6)
    assert out.total.item() == pytest.approx(out.logit.item() + 0.3 * pairs, rel=1e-5)


def test_gradients_of_the_pairs():
    logits, features, labels = batch(10, dtype=torch.float64)
    loss = build("supcon").double()
    assert torch.autograd.gradcheck(lambda x: loss(logits, x, labels).total, features.requires_grad_())
    centre = build("center", representation_weight=0.5).double()
    centre(*batch(dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: centre.eval()(logits, x, labels).total, features.requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
def test_centres(dtype):
    loss = build("center", representation_weight=0.7, alpha=0.6)
    centres = np.zeros((K, D))
    for seed in range(4):
        inputs = batch(8, dtype=dtype, seed=seed)
        z, x, y = exactly(*inputs)
        distance = np.mean([((x[i] - centres[y[i]]) ** 2).sum() for i in range(8)]) / 2
        moved = centres.copy()
        for k in range(K):
            members = x[y == k]
            moved[k] -= 0.6 * sum((centres[k] - row for row in members), np.zeros(D)) / (1 + len(members))
        for moving in (False, True):
            out = loss.train(moving)(*inputs)
            assert out.representation.item() == pytest.approx(distance, rel=1e-5)
            assert out.total.item() == pytest.approx(cross_entropy(z, x, y) + 0.7 * distance, rel=1e-5)
        centres = moved
        np.testing.assert_allclose(loss.centres, centres, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_dro_over_some_batches(dtype):
    loss = build("group-dro", step=0.5)
    shares = np.full(K, 1 / K)
    for seed in range(4):
        inputs = batch(6, dtype=dtype, seed=seed)  # not every class is in every batch
        z, _, y = exactly(*inputs)
        losses = cross_entropies(z, y)
        means = np.array([losses[y == k].mean() if (y == k).any() else 0 for k in range(K)])
        assert loss.eval()(*inputs).total.item() == pytest.approx(shares @ means, rel=1e-5)
        shares = shares * np.exp(0.5 * means)
        shares /= shares.sum()
        assert loss.train()(*inputs).total.item() == pytest.approx(shares @ means, rel=1e-5)
        np.testing.assert_allclose(loss.shares, shares, rtol=1e-5)


def test_group_dro_can_accumulate_gradients():
    loss = build("group-dro", step=0.5)
    logits, features, labels = batch()
    logits.requires_grad_()
    (loss(logits, features, labels).total + loss(logits, features, labels).total).backward()
    assert logits.grad.isfinite().all()


def test_fair_dro_s_best_response_is_the_worst_case_of_its_ball():
    loss = build("fair-dro", radius=0.02)  # so small that no weight is negative
    errors = torch.tensor([0.1, 0.4, 0.2, 0.9, 0.3], dtype=torch.float64)
    best = loss.best_response(errors)
    assert (best @ errors).item() == pytest.approx(np.mean(errors.numpy()) + math.sqrt(0.04) * np.std(errors.numpy()))
    assert 0.5 * ((K * best - 1) ** 2).mean().item() == pytest.approx(0.02)
    torch.testing.assert_close(best, baselines.worst_case_weights(errors, 0.02), rtol=1e-6, atol=0)
    assert torch.equal(loss.best_response(torch.full((K,), 0.25)), torch.full((K,), 1 / K))


def test_fair_dro_s_weights_are_positive_for_all_errors_in_a_small_ball_alone():
    extreme = 1 - torch.eye(K)  # one class has no error, the others no hit
    assert all((build("fair-dro", radius=1 / (2 * K)).best_response(errors) > 0).all() for errors in extreme)
    assert all((build("fair-dro", radius=1 / K).best_response(errors) < 0).sum() == 1 for errors in extreme)


class Fixed(torch.nn.Module):
    """A model that knows its logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, index):
        assert not self.training
        return self.logits[index], None


class FixedLoader:
    """Batches of indices."""

    device = torch.device("cpu")

    def __init__(self, logits, labels):
        self.logits, self.labels = logits, labels

    def in_order(self):
        return torch.arange(len(self.labels)).split(7)


def test_fair_dro_moves_towards_it_by_steps_that_shrink():
    loss = build("fair-dro", radius=0.3)
    logits, features, labels = batch()
    wrong = (logits.argmax(dim=1) != labels).double().numpy()
    errors = np.array([wrong[labels.numpy() == k].mean() for k in range(K)])
    centred = errors - errors.mean()
    best = 1 / K + math.sqrt(2 * 0.3 / K) * centred / np.linalg.norm(centred)
    expected, model = np.full(K, 1 / K), Fixed(logits).train()
    for epoch, step in enumerate([0, 1, 0.75, 0.5]):
        loss.begin_epoch(model, FixedLoader(logits, labels), epoch, 4)
        expected += step * (best - expected)
        np.testing.assert_allclose(loss.weights, expected, rtol=1e-5, atol=1e-7)
        loss.weights.mul_(0.9)  # so that the target is not reached at once and later steps show
        expected *= 0.9
    assert model.training
    losses = cross_entropies(*exactly(logits, labels))
    total = sum(expected[k] * losses[labels.numpy() == k].mean() for k in range(K))
    assert loss(logits, features, labels).total.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_worst_case_weights(dtype):
    for size, radius in [(1, 1.0), (2, 0.3), (30, 0.01), (30, 1.0), (30, 5.0), (30, 100.0)]:
        losses = torch.rand(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        weights = baselines.worst_case_weights(losses, radius).double()
        assert weights.sum().item() == pytest.approx(1, abs=0.02)
        assert (weights >= 0).all()
        ball = 0.5 * ((size * weights - 1) ** 2).mean().item()
        assert ball <= radius + 0.03 * (1 + radius)
        if radius < (size - 1) / 2:  # else the ball holds every weighting, and the worst is the largest loss
            assert ball == pytest.approx(radius, rel=0.03)
        else:
            assert weights.max() == 1
    ties = torch.tensor([1.0, 3.0, 3.0, 3.0, 3.0, 2.0])
    torch.testing.assert_close(baselines.worst_case_weights(ties, 5.0), torch.tensor([0, 0.25, 0.25, 0.25, 0.25, 0]))
    torch.testing.assert_close(baselines.worst_case_weights(torch.zeros(4), 1.0), torch.full((4,), 0.25))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixup_mixes_losses(dtype):
    logits, features, labels = batch(dtype=dtype)
    partners = labels.flip(0)
    out = build("mixup")(logits, features, labels, partners, 0.3)
    z, x, y = exactly(logits, features, labels)
    expected = 0.3 * cross_entropy(z, x, y) + 0.7 * cross_entropy(z, x, y[::-1])
    assert out.total.item() == pytest.approx(expected, rel=1e-6)
    assert out.logit == out.total


@pytest.mark.parametrize("dtype", DTYPES)
def test_jtt_weighs_examples(dtype):
    logits, features, labels = batch(dtype=dtype)
    weights = torch.linspace(0.1, 3, len(labels))
    out = build("jtt")(logits, features, labels, weights)
    z, _, y = exactly(logits, features, labels)
    expected = log_loss(y, softmax(z, axis=1), sample_weight=weights.numpy(), normalize=False, labels=range(K))
    assert out.total.item() == pytest.approx(expected / len(y), rel=1e-6)
    assert out.logit == out.total


@pytest.mark.parametrize("dtype", DTYPES)
def test_lff_learns_by_relative_difficulty(dtype):
    logits, features, labels = batch(dtype=dtype)
    images = torch.randn(len(labels), 7, generator=torch.Generator().manual_seed(1))
    loss = build("lff", q=0.6)
    model = torch.nn.Sequential(torch.nn.Linear(7, K), Pair())
    loss.begin(model, None, None)
    assert not torch.equal(loss.biased[0].weight, model[0].weight)
    logits.requires_grad_()
    out = loss(logits, features, labels, images)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2):
        biased = loss.biased(images)[0]
    z, b, y = exactly(logits.detach(), biased, labels)
    own, other = cross_entropies(z, y), cross_entropies(b, y)
    weights = other / (other + own)
    p = softmax(b, axis=1)[np.arange(len(y)), y]
    assert out.logit.item() == pytest.approx((weights * own).mean(), rel=1e-5)
    assert out.total.item() == pytest.approx((weights * own).mean() + ((1 - p**0.6) / 0.6).mean(), rel=1e-5)
    out.total.backward()
    slope = weights[:, None] * (softmax(z, axis=1) - np.eye(K)[y]) / len(y)  # the weights are constants
    np.testing.assert_allclose(logits.grad.double(), slope, rtol=0.02 if dtype.itemsize == 2 else 1e-4, atol=1e-5)
    assert loss.biased[0].weight.grad.abs().sum() > 0


class Pair(torch.nn.Module):
    def forward(self, logits):
        return logits, logits


def test_relative_difficulty_by_hand():
    own, biased = torch.tensor([1.0, 0.0, 3.0, 0.0]), torch.tensor([3.0, 2.0, 0.0, 0.0])
    assert baselines.relative_difficulty(own, biased).tolist() == [0.75, 1, 0, 0]


def test_generalised_cross_entropy_between_its_limits():
    each = torch.linspace(0, 6, 20, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(baselines.generalised_cross_entropy(each, 1e-9), each, rtol=1e-6, atol=0)
    torch.testing.assert_close(baselines.generalised_cross_entropy(each, 1.0), 1 - (-each).exp())
    assert torch.autograd.gradcheck(lambda x: baselines.generalised_cross_entropy(x, 0.7), each)


def test_sums_over_classes_are_joined_over_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda sums: sums.mul_(2)
    )  # another process with the same batch
    logits, features, labels = batch(12)
    center, twice = build("center"), build("center")
    group, alone = build("group-dro", step=0.5), build("group-dro", step=0.5)
    center(logits, features, labels)
    group(logits, features, labels)
    monkeypatch.undo()
    twice(logits.repeat(2, 1), features.repeat(2, 1), labels.repeat(2))
    alone(logits, features, labels)
    torch.testing.assert_close(center.centres, twice.centres)
    torch.testing.assert_close(group.shares, alone.shares)  # means do not depend on it


JOINT = {
    "group-dro": {"step": 0.5},
    "cvar-dro": {"alpha": 0.33},
    "chi2-dro": {"radius": 0.8},
    "fair-dro": {},
    "ldam-drw": {"defer": 0.0, "counts": COUNTS},
}


def two_steps(name, share):
    """Two steps with every n-th example of a batch; the last total, the gradient and the buffers."""
    loss = build(name, **JOINT[name])
    if name == "ldam-drw":
        loss.begin_epoch(None, None, 0, 1)
    if name == "fair-dro":
        loss.weights.copy_(torch.linspace(-0.1, 0.5, K))
    for seed in range(2):
        logits, features, labels = batch(10, seed=seed)
        head = torch.ones(K, requires_grad=True)
        total = loss(head * logits[share], features[share], labels[share]).total
        total.backward()
    return total.detach(), head.grad, dict(loss.named_buffers())


def in_two_processes(task, folder):
    """Run ``task(rank, port, folder)`` for two ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(["mr2_core.studies", "sklearn.datasets"])  # as in test_studies
    torch.multiprocessing.start_processes(task, (port, folder), nprocs=2, start_method="forkserver")


def in_a_group(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = {name: two_steps(name, slice(rank, None, 2)) for name in JOINT}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_weigh_the_whole_batch_as_one_would(tmp_path):
    in_two_processes(in_a_group, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name in JOINT:
        total, gradient, buffers = two_steps(name, slice(None))
        torch.testing.assert_close((first[name][0] + second[name][0]) / 2, total)
        torch.testing.assert_close((first[name][1] + second[name][1]) / 2, gradient)
        for found in (first, second):
            torch.testing.assert_close(found[name][2], buffers)


def stages_in_a_group(rank, port, folder):
    """An epoch of each method with a second network or stage, in one of two processes."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    settings = Settings(epochs=1, batch_size=18, precision="float32")
    with training.process_group("cpu"):
        for name in ("jtt", "lff", "supcon-two-stage"):
            model, loss = network(name, **NEEDED.get(name, {}))
            start = copy.deepcopy(model.head.state_dict())
            fit(model, loss, loader(), settings, progress=False)
            torch.save([start, model.state_dict()], folder / f"{name}-{rank}.pt")


def test_methods_with_stages_train_in_two_processes(tmp_path):
    in_two_processes(stages_in_a_group, tmp_path)
    for name in ("jtt", "lff", "supcon-two-stage"):
        (start, first), (_, second) = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in (0, 1))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        assert not torch.equal(first["head.weight"], start["weight"])


# Corners


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_classes", "labels"),
    [(5, [2, 2, 2, 2]), (5, [0, 1, 2, 3]), (2, [0, 1, 1, 0]), (2, [1]), (3, [0])],
    ids=["one class", "singletons", "two classes", "one of two", "one example"],
)
@pytest.mark.parametrize("name", BASELINES)
def test_degenerate_batches_stay_finite(name, num_classes, labels, dtype):
    labels = torch.tensor(labels)
    loss = build(name, num_classes)
    further = {"mixup": (labels.flip(0), 0.4), "jtt": (torch.ones(len(labels)),), "lff": (torch.ones(len(labels), 3),)}
    if name == "lff":
        loss.begin(torch.nn.Sequential(torch.nn.Linear(3, num_classes), Pair()), None, None)
    for scale in (0.0, 1.0, 1e4):
        logits = (scale * torch.randn(len(labels), num_classes)).to(dtype).requires_grad_()
        features = (scale * torch.randn(len(labels), D) / 100).to(dtype).requires_grad_()
        out = loss(logits, features, labels, *further.get(name, ()))
        assert all(value.isfinite() for value in out)
        out.total.backward()
        assert logits.grad.isfinite().all()
        assert features.grad is None or features.grad.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())
    assert all(buffer.isfinite().all() for buffer in loss.buffers())


@pytest.mark.parametrize("focus", [0.0, 0.5, 1.0])
def test_focal_is_finite_where_an_example_is_certain(focus):
    logits = torch.tensor([[200.0, 0.0], [0.0, 0.0]], requires_grad=True)
    build("focal", 2, focus=focus)(logits, torch.zeros(2, D), torch.tensor([0, 0])).total.backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[1].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("jtt", {}, "method 'jtt' needs first_epochs and upweight, which"),
        ("jtt", {"first_epochs": 3}, "method 'jtt' needs upweight, which"),
        ("supcon-two-stage", {"width": 3}, "method 'supcon-two-stage' needs first_epochs, which"),
        ("supcon-two-stage", {"first_epochs": 3, "depth": 2}, "method 'supcon-two-stage' does not accept .*depth"),
        ("focal", {"gamma": 2.0}, "method 'focal' does not accept these hyperparameters: .*gamma"),
        ("focal", {"focus": -1.0}, r"focus is -1.0; expected a number in \[0, inf\)"),
        ("focal", {"focus": "2"}, r"focus is '2'; expected a number in \[0, inf\)"),
        ("focal", {"focus": math.nan}, r"focus is nan; expected"),
        ("mixup", {"alpha": 0.0}, r"alpha is 0.0; expected a number in \(0, inf\)"),
        ("label-smoothing", {"smoothing": 1.0}, r"smoothing is 1.0; expected a number in \[0, 1\)"),
        ("class-balanced", {"beta": 1.0}, r"beta is 1.0; expected a number in \[0, 1\)"),
        ("class-balanced", {"counts": [1, 2]}, r"counts is \[1.0, 2.0\]; expected 5 positive numbers, one a class"),
        ("vs", {"counts": [1, 2, 3, 4, 0]}, r"counts is \[1.0, .*0.0\]; expected 5 positive numbers"),
        ("lff", {"q": 0.0}, r"q is 0.0; expected a number in \(0, 1\]"),
        ("jtt", {"first_epochs": 0, "upweight": 2.0}, "first_epochs is 0; expected an integer of at least 1"),
        ("jtt", {"first_epochs": 1, "upweight": 0.5}, r"upweight is 0.5; expected a number in \[1, inf\)"),
        ("ldam", {"max_margin": -0.1}, "max_margin is -0.1; expected"),
        ("ldam", {"scale": 0}, "scale is 0; expected"),
        ("ldam-drw", {"defer": 2.0}, "defer is 2.0; expected"),
        ("logit-adjustment", {"tau": math.inf}, "tau is inf; expected"),
        ("eql", {"threshold": 1.1}, "threshold is 1.1; expected"),
        ("eql", {"gamma": -0.1}, "gamma is -0.1; expected"),
        ("vs", {"gamma": -0.1}, "gamma is -0.1; expected"),
        ("ldt", {"gamma": -0.1}, "gamma is -0.1; expected"),
        ("supcon", {"temperature": 0.0}, "temperature is 0.0; expected"),
        ("supcon", {"representation_weight": -1}, "representation_weight is -1; expected"),
        ("center", {"alpha": 1.5}, "alpha is 1.5; expected"),
        ("group-dro", {"step": -1}, "step is -1; expected"),
        ("cvar-dro", {"alpha": 0}, "alpha is 0; expected"),
        ("chi2-dro", {"radius": -1}, "radius is -1; expected"),
        ("fair-dro", {"radius": -1}, "radius is -1; expected"),
    ],
)
def test_bad_hyperparameters_are_named_in_a_sentence(name, options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}[^\n]*[.]$"):
        build_method(name, K, D, **options)


@pytest.mark.parametrize("name", BASELINES)
def test_bad_inputs(name):
    logits, features, labels = batch(4)
    with pytest.raises(ValueError, match=r"^logits has shape \[4, 4\]; expected \[B, 5\]"):
        build(name)(logits[:, 1:], features, labels)
    with pytest.raises(ValueError, match="^labels lie in"):
        build(name)(logits, features, labels + 5)


def test_registry():
    tree = ast.parse(inspect.getsource(methods))
    (registry,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "METHODS")
    keys = [key.value for key in registry.keys]
    assert len(keys) == len(set(keys)) == len(METHODS)  # a dictionary would keep the last of two in silence
    builds = [method.build for method in METHODS.values()]
    assert len(builds) == len(set(builds))
    assert len(BASELINES) == 19
    assert {method.year for name, method in METHODS.items() if name in BASELINES} <= set(range(2016, 2024))


# Through fit, on scikit-learn's digits

DIGITS = load_digits()
IMAGES = (DIGITS.images[:36, :, :, None] * 15).astype(np.uint8)
LABELS = DIGITS.target[:36]
GREY = {"mean": (0.3,), "std": (0.38,)}
SETTINGS = Settings(epochs=2, batch_size=18, learning_rate=0.02, precision="bf16", augment=("crop", "flip"))


def loader(**changes):
    return BatchLoader(IMAGES, LABELS, **({"batch_size": 18, "augment": SETTINGS.augment, **GREY} | changes))


def network(name, seed=0, **hyperparameters):
    torch.manual_seed(seed)
    short = {"warmup": 1} if name in ("mr2", "mr2-weighted", "mr2-placebo") else {}  # a run has four steps
    return build_model("compact-grey", 10), build(name, 10, 128, **short, **hyperparameters)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_and_resumes_bit_for_bit(name, tmp_path):
    model, loss = network(name)
    before = copy.deepcopy(model.state_dict())
    whole = fit(model, loss, loader(), SETTINGS, progress=False)
    changed = [not torch.equal(value, before[key]) for key, value in model.state_dict().items()]
    assert all(changed)
    assert all(math.isfinite(record["loss"]) for record in whole)

    path, stops = tmp_path / "run.pt", 0
    while True:
        # Once there is a checkpoint everything comes from it, whatever the initialisation.
        resumed, resumed_loss = network(name, seed=stops if path.exists() else 0)
        hook = resumed.register_forward_hook(stop_in_training)
        try:
            history = fit(resumed, resumed_loss, loader(), SETTINGS, checkpoint=path, progress=False)
            break
        except Interrupted:
            stops += 1
        finally:
            hook.remove()
    assert stops == (6 if name in NEEDED else 4)  # a first stage of two steps, then four
    for mine, other in ((model, resumed), (loss, resumed_loss)):
        assert mine.state_dict().keys() == other.state_dict().keys()
        for key, value in mine.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key
    for key in ("loss", "train_accuracy"):
        assert [record[key] for record in history] == [record[key] for record in whole]
    assert {file.name for file in tmp_path.iterdir()} == {"run.pt", "run.jsonl"}


def stop_in_training(module, *_):
    if module.training:
        os.kill(os.getpid(), signal.SIGTERM)


def test_order_and_views_of_a_loader():
    both = zip(loader().epoch(1), loader().epoch(1, view=1), loader().order(1), strict=True)
    for (images, labels), (other, same), chosen in both:
        assert torch.equal(labels, same)
        assert torch.equal(labels, torch.from_numpy(LABELS)[chosen])
        assert not torch.equal(images, other)
    assert torch.equal(next(loader().order(1, 1)), chosen)
    plain = torch.cat(list(loader().in_order()))
    expected = (IMAGES.transpose(0, 3, 1, 2) / 255 - 0.3) / 0.38
    np.testing.assert_allclose(plain, expected, atol=1e-5)


def test_batches_of_mixup():
    torch.manual_seed(3)
    loss = build("mixup", alpha=0.5)
    mixed = list(loss.batches(loader(), 0, 0))
    shares = [share for *_, share in mixed]
    assert len(set(shares)) == len(mixed) == 2
    for (images, labels), (out, first, second, share) in zip(loader().epoch(0), mixed, strict=True):
        assert 0 < share < 1
        assert torch.equal(first, labels)
        # Whose partner is whose shows in what is left when the image's own part is taken away.
        rest = (out - share * images) / (1 - share)
        partner = torch.cdist(rest.flatten(1), images.flatten(1)).argmin(dim=1)
        torch.testing.assert_close(rest, images[partner], rtol=1e-3, atol=1e-3)
        assert torch.equal(second, labels[partner])
    draws = [next(iter(loss.batches(loader(), 0, 0)))[-1] for _ in range(200)]
    assert np.var(draws) == pytest.approx(1 / (4 * (2 * 0.5 + 1)), rel=0.2)  # of Beta(α, α)


def test_batches_of_supcon_hold_two_views():
    for (images, labels), (both, twice) in zip(loader().epoch(1), build("supcon").batches(loader(), 1, 0), strict=True):
        assert torch.equal(both[:18], images)
        assert not torch.equal(both[18:], images)
        assert torch.equal(twice, labels.repeat(2))
    model, loss = network("supcon")
    (record,) = fit(model, loss, loader(), Settings(epochs=1, batch_size=18, augment=()), progress=False)
    assert 0 <= record["train_accuracy"] <= 1
    assert record["loss"] < 12


def test_first_stage_of_jtt():
    model, loss = network("jtt", first_epochs=2, upweight=7.0)
    start = copy.deepcopy(model)
    first = copy.deepcopy(model)
    fit(first, build("erm", 10, 128), loader(), SETTINGS, progress=False)
    first.eval()
    with torch.no_grad():
        wrong = torch.cat([first(images)[0].argmax(dim=1) for images in loader().in_order()]) != loader().labels
    assert 0 < wrong.sum() < len(wrong)
    seen = []
    handle = model.register_forward_pre_hook(lambda module, _: seen.append(copy.deepcopy(module.state_dict())))
    fit(model, loss, loader(), SETTINGS, progress=False)
    handle.remove()
    for key, value in start.state_dict().items():
        assert torch.equal(seen[-4][key], value)  # at the first of four steps the model itself is untouched
    ratio = loss.weights / loss.weights.min()
    assert torch.equal(ratio.round().long(), torch.where(wrong, 7, 1))
    assert loss.weights.mean().item() == pytest.approx(1)
    (images, labels, weights), *_ = loss.batches(loader(), 0, 0)
    assert torch.equal(weights, loss.weights[next(loader().order(0))])


def test_time_of_a_first_stage_counts(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))  # an epoch looks twice
    history = fit(*network("jtt", first_epochs=3), loader(), SETTINGS, progress=False)
    assert [record["seconds"] for record in history] == [4, 1]


def test_stages_of_supcon():
    model, loss = network("supcon-two-stage", first_epochs=1)
    start = copy.deepcopy(model.state_dict())
    middle = []
    fit(
        model,
        loss,
        loader(),
        SETTINGS,
        after_epoch=lambda model, _: middle.append(copy.deepcopy(model.train().state_dict())) or {},
        progress=False,
    )
    assert len(middle) == 2
    for key in start:
        in_head = key.startswith("head")
        assert torch.equal(middle[0][key], middle[1][key]) == (not in_head), key
    expected = network("supcon-two-stage")[0]
    fit(expected, baselines.Contrastive(10, 128), loader(), Settings(**{**vars(SETTINGS), "epochs": 1}), progress=False)
    for key, value in expected.state_dict().items():
        if key.startswith("backbone"):
            assert torch.equal(value, middle[0][key]), key
        else:
            assert torch.equal(value, start[key]), key


def test_second_network_of_lff_is_trained():
    model, loss = network("lff")
    fit(model, loss, loader(), SETTINGS, progress=False)
    assert any(key.startswith("biased.") for key in loss.state_dict())
    states = {"model": model.state_dict(), "biased": loss.biased.state_dict()}
    assert states["model"].keys() == states["biased"].keys()
    steps = [int(value) for key, value in states["biased"].items() if key.endswith("num_batches_tracked")]
    assert set(steps) == {4}
    assert not any(torch.equal(states["model"][key], states["biased"][key]) for key in ("head.weight", "head.bias"))
    assert all(parameter.grad is not None for parameter in loss.biased.parameters())


def test_second_network_of_lff_has_other_weights_in_every_layer_or_says_which_it_cannot_draw():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2)
    loss = build("lff")
    loss.begin(layer, None, None)
    for (name, old), new in zip(layer.named_parameters(), loss.biased.parameters(), strict=True):
        assert name.endswith("bias") or (old != new).all(), name  # biases may start at zero
    layer.register_parameter("position", torch.nn.Parameter(torch.randn(3)))
    with pytest.raises(ValueError, match="lff cannot draw position anew: give its module a method reset_parameters"):
        build("lff").begin(layer, None, None)
