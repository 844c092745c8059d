"""Every method under one interface, and the properties that make each the control or the ablation that it is."""

import copy

import pytest
import torch
from torch.nn import functional as F

from mr2_core import MR2Loss, margin_cross_entropy
from mr2_core.methods import METHODS, build_method

K, D = 4, 6
NEEDED = {"jtt": {"first_epochs": 1, "upweight": 5.0}, "supcon-two-stage": {"first_epochs": 1}}


def batch(seed=0, size=24):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % K
    features = (1 + labels[:, None]) * torch.randn(size, D, generator=generator)  # spreads that differ by class
    return torch.randn(size, K, generator=generator), features, labels


@pytest.mark.parametrize("name", METHODS)
def test_interface(name):
    needed = NEEDED.get(name, {})
    loss = build_method(name, K, D, **needed)
    for seed in range(3):
        logits, features, labels = batch(seed)
        logits.requires_grad_()
        features.requires_grad_()
        out = loss(logits, features, labels)
        weight = getattr(loss, "representation_weight", 0.0)
        assert torch.equal(out.total, out.logit + weight * out.representation)
        assert {value.shape for value in out} == {torch.Size([])}
        out.total.backward()
        assert logits.grad.abs().sum() > 0
        assert logits.grad.isfinite().all()
    state = copy.deepcopy(loss.state_dict())
    other = build_method(name, K, D, **needed)
    other.load_state_dict(state)
    assert other.eval()(*batch(7)) == loss.eval()(*batch(7))
    torch.testing.assert_close(loss.state_dict(), state, rtol=0, atol=0)
    assert METHODS[name].paper
    assert 1900 < METHODS[name].year < 2100


def test_erm_is_cross_entropy():
    logits, features, labels = batch()
    expected = -(F.one_hot(labels, K) * logits.log_softmax(dim=1)).sum(dim=1).mean()
    out = build_method("erm", K, D)(logits, features, labels)
    torch.testing.assert_close(out.logit, expected)
    assert out.total == out.logit
    assert out.representation == 0
    half = build_method("erm", K, D)(logits.bfloat16(), features, labels)
    assert half.total.dtype == torch.float32
    torch.testing.assert_close(half.total, F.cross_entropy(logits.bfloat16().float(), labels))


def test_uniform_margins():
    loss = build_method("uniform", K, D, mean_margin=1.5)
    logits, features, labels = batch()
    out = loss(logits, features, labels)
    assert loss.statistics.spread.unique().numel() == K
    assert torch.equal(loss.margins, torch.full((K,), 1.5))
    torch.testing.assert_close(out.total, F.cross_entropy(logits / 1.5, labels))
    assert out.representation == 0
    assert build_method("uniform", K, D).mean_margin == 1


def test_mr2_and_its_printed_setting():
    assert type(build_method("mr2", K, D)) is MR2Loss
    assert build_method("mr2", K, D).representation == "relative"
    paper = build_method("mr2-paper", K, D, representation_weight=0.5)
    assert type(paper) is MR2Loss
    assert (paper.representation, paper.representation_weight) == ("printed", 0.5)


def test_weights_of_the_weighted_form():
    loss = build_method("mr2-weighted", K, D, mean_margin=2.0, warmup=0, representation_weight=0.1)
    logits, features, labels = batch()
    out = loss(logits, features, labels)
    margins = loss.margins.tolist()
    assert max(margins) > 1.5 * min(margins)
    each = [
        margins[y] / 2.0 * margin_cross_entropy(z[None], torch.tensor([y]), loss.margins).item()
        for z, y in zip(logits, labels.tolist(), strict=True)
    ]
    assert out.logit.item() == pytest.approx(sum(each) / len(each), rel=1e-6)


@pytest.mark.parametrize(("name", "balance"), [("mr2", "γ₁/(γ₁+γ₂)"), ("mr2-weighted", "1/2")])
def test_where_the_classes_of_one_point_balance(name, balance):
    """Among examples with equal features, at which share of class 1 is an undecided classifier content?"""
    loss = build_method(name, 2, D, representation_weight=0.0, warmup=0)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(20) % 2
    loss(torch.zeros(20, 2), (1.0 + 2 * labels[:, None]) * torch.randn(20, D, generator=generator), labels)
    first, second = loss.eval().margins.tolist()
    assert second > 1.5 * first
    slopes = []
    for y in (0, 1):
        logits = torch.zeros(1, 2, requires_grad=True)
        loss(logits, torch.zeros(1, D), torch.tensor([y])).total.backward()
        slopes.append(abs(logits.grad[0, 0].item()))
    share = slopes[1] / (slopes[0] + slopes[1])  # of class 1 (index 0), so that the slopes cancel
    assert share == pytest.approx(first / (first + second) if name == "mr2" else 0.5, rel=1e-5), balance


def test_placebo_deals_the_same_margins_to_other_classes():
    placebo, mr2 = (build_method(name, 50, D, warmup=0) for name in ("mr2-placebo", "mr2"))
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 50
    features = (1.0 + labels[:, None]) * torch.randn(200, D, generator=generator)
    for loss in (placebo, mr2):
        loss(torch.zeros(200, 50), features, labels)
    assert torch.equal(placebo.margins.sort().values, mr2.margins.sort().values)
    assert (placebo.margins != mr2.margins).sum() > 40
    assert torch.equal(placebo.margins, mr2.margins[placebo.permutation])


def test_placebo_s_permutation_follows_the_seed_of_its_run():
    def permutation(seed):
        torch.manual_seed(seed)
        return build_method("mr2-placebo", 50, D).permutation

    assert torch.equal(permutation(0), permutation(0))
    assert not torch.equal(permutation(0), permutation(1))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mr3", {}, "method is 'mr3'; expected one of erm, uniform, mr2"),
        ("erm", {"mean_margin": 2.0}, "method 'erm' does not accept these hyperparameters: .*mean_margin"),
        ("uniform", {"exponent": 1.0}, "method 'uniform' does not accept these hyperparameters: .*exponent"),
        ("mr2", {"lambda_": 0.1}, "method 'mr2' does not accept these hyperparameters: .*lambda_"),
        ("mr2", {"decay": 2.0}, "decay is 2.0; expected"),
    ],
)
def test_bad_input(name, options, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        build_method(name, K, D, **options)


def test_methods_that_know_class_frequencies_count_the_labels_they_are_given():
    labels = torch.repeat_interleave(torch.arange(K), torch.tensor([40, 20, 10, 5, 5][:K]))
    counts = labels.bincount(minlength=K).tolist()
    for name in ("class-balanced", "ldam", "ldam-drw", "logit-adjustment", "eql", "vs", "ldt"):
        given, counted = build_method(name, K, D, counts=counts), build_method(name, K, D, labels=labels)
        logits, features, targets = batch()
        assert counted(logits, features, targets) == given(logits, features, targets)
        equal = build_method(name, K, D, counts=[7] * K)
        assert build_method(name, K, D, labels=labels, counts=[7] * K)(logits, features, targets) == equal(
            logits, features, targets
        ), "counts that are given come first"
    assert type(build_method("erm", K, D, labels=labels)).__name__ == "ERM"
