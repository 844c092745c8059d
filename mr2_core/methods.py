"""Training methods by name: each a loss module with the signature of :class:`mr2_core.MR2Loss`."""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mr2_core import baselines
from mr2_core.losses import MR2Loss, MR2Output


class ERM(nn.Module):
    """Empirical risk minimisation: cross-entropy."""

    def __init__(self, num_classes: int, feature_dim: int):
        super().__init__()

    def forward(self, logits: Tensor, features: Tensor, labels: Tensor) -> MR2Output:
        """Return the loss as ``total`` and ``logit``; the representation term is 0."""
        loss = F.cross_entropy(logits.float(), labels)
        return MR2Output(loss, loss, torch.zeros_like(loss))


class UniformMargins(MR2Loss):
    """One margin c̄ for every class: a temperature, which is to say a learning rate, and so the control of every γ."""

    def __init__(self, num_classes: int, feature_dim: int, *, mean_margin: float = 1.0):
        super().__init__(num_classes, feature_dim, mean_margin=mean_margin, exponent=0.0, representation_weight=0.0)


class WeightedMR2(MR2Loss):
    """Each example's margin loss weighted by γ_y/c̄, which makes the per-class temperature Fisher-consistent again."""

    def logit_loss(self, logits: Tensor, labels: Tensor, margins: Tensor) -> Tensor:
        """Weighted mean of the margin cross-entropy."""
        each = F.cross_entropy(logits / margins[labels][:, None], labels, reduction="none")
        return (margins[labels] / self.mean_margin * each).mean()


class PlaceboMR2(MR2Loss):
    """MR2 whose margins are dealt to classes by one random permutation for the whole run.

    Any permutation, so that on average one class keeps its own margin; with two classes half of the runs are MR2.
    """

    def __init__(self, num_classes: int, feature_dim: int, **changes):
        super().__init__(num_classes, feature_dim, **changes)
        self.register_buffer("permutation", torch.randperm(num_classes))

    @property
    def margins(self) -> Tensor:
        """[K]: those of the permuted classes."""
        return super().margins[self.permutation]


class Method(NamedTuple):
    """A row of the registry."""

    build: type[nn.Module]
    paper: str
    year: int


METHODS = {
    "erm": Method(ERM, "Vapnik, Principles of risk minimization for learning theory", 1991),
    "uniform": Method(UniformMargins, "control: one margin for all classes", 2026),
    "mr2": Method(MR2Loss, "Margin regularization for performance disparity reduction, arXiv 2602.00205", 2026),
    "mr2-paper": Method(MR2Loss.paper, "the same, as printed", 2026),
    "mr2-weighted": Method(WeightedMR2, "ablation: margin loss weighted by the margin", 2026),
    "mr2-placebo": Method(PlaceboMR2, "control: margins permuted over classes", 2026),
    "label-smoothing": Method(baselines.LabelSmoothing, "Szegedy et al., Rethinking the Inception architecture", 2016),
    "mixup": Method(baselines.Mixup, "Zhang et al., mixup: beyond empirical risk minimization", 2018),
    "focal": Method(baselines.Focal, "Lin et al., Focal loss for dense object detection", 2017),
    "class-balanced": Method(baselines.ClassBalanced, "Cui et al., Class-balanced loss, effective number", 2019),
    "lff": Method(baselines.LfF, "Nam et al., Learning from failure", 2020),
    "jtt": Method(baselines.JTT, "Liu et al., Just train twice", 2021),
    "ldam": Method(baselines.LDAM, "Cao et al., Label-distribution-aware margin loss", 2019),
    "ldam-drw": Method(baselines.LDAMDRW, "the same, with deferred re-weighting", 2019),
    "logit-adjustment": Method(
        baselines.LogitAdjustment, "Menon et al., Long-tail learning via logit adjustment", 2021
    ),
    "eql": Method(baselines.EQL, "Tan et al., Equalization loss for long-tailed object recognition", 2020),
    "vs": Method(baselines.VS, "Kini et al., Label-imbalanced and group-sensitive classification", 2021),
    "ldt": Method(baselines.LDT, "Behnia et al., Implicit geometry of cross-entropy parameterizations", 2023),
    "supcon": Method(baselines.SupCon, "Khosla et al., Supervised contrastive learning, with cross-entropy", 2020),
    "supcon-two-stage": Method(baselines.SupConTwoStage, "the same, then a head on frozen features", 2020),
    "center": Method(baselines.Center, "Wen et al., A discriminative feature learning approach", 2016),
    "group-dro": Method(baselines.GroupDRO, "Sagawa et al., Distributionally robust neural networks", 2020),
    "cvar-dro": Method(baselines.CVaR, "Levy et al., Large-scale distributionally robust optimization", 2020),
    "chi2-dro": Method(baselines.ChiSquare, "the same, with a χ² ball", 2020),
    "fair-dro": Method(baselines.FairDRO, "Jung et al., Re-weighting based group fairness regularization", 2023),
}


def build_method(name: str, num_classes: int, feature_dim: int, *, labels=None, **hyperparameters) -> nn.Module:
    """Build a method's loss by name.

    Parameters
    ----------
    name : str
        One of ``METHODS``.
    num_classes, feature_dim : int
        K and D.
    labels : Tensor, optional
        [M], int64: those of all training examples, of which methods that know class frequencies take their ``counts``.
        Without labels and ``counts`` such a method takes classes to be equally frequent.
    **hyperparameters
        Of the method.

    Raises
    ------
    ValueError
        On an unknown name, and on hyperparameters that the method does not have, lacks or cannot take.
    """
    if name not in METHODS:
        raise ValueError(f"method is {name!r}; expected one of {', '.join(METHODS)}.")
    build = METHODS[name].build
    parameters = inspect.signature(build).parameters
    needed = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if labels is not None and "counts" in parameters:
        hyperparameters = {"counts": labels.bincount(minlength=num_classes).tolist()} | hyperparameters
    if missing := [key for key in needed if key not in hyperparameters]:
        raise ValueError(f"method {name!r} needs {' and '.join(missing)}, which no default can replace.")
    try:
        return build(num_classes, feature_dim, **hyperparameters)
    except TypeError as error:
        raise ValueError(f"method {name!r} does not accept these hyperparameters: {error}.") from error
