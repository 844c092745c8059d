"""The two losses of MR2 and the module that joins them to the running statistics."""

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mr2_core.margins import check_law, class_margins
from mr2_core.statistics import ClassStatistics, check_integer, check_labels, check_rows, extremes, kind, squared_norm

STATISTICS = ("second_moment", "deviation", "centred", "relative")
FORMS = ("printed", "relative")


def margin_cross_entropy(logits: Tensor, labels: Tensor, margins: Tensor) -> Tensor:
    r"""Cross-entropy at a temperature of the true class's own.

    .. math:: \ell_\gamma(z, y) = -\ln\,\mathrm{softmax}_y(z/\gamma_y)

    Parameters
    ----------
    logits : Tensor
        [B, K].
    labels : Tensor
        [B], int64 in 0 … K − 1.
    margins : Tensor
        [K], positive.

    Returns
    -------
    Tensor
        Scalar: the mean over the batch.

    Raises
    ------
    ValueError, TypeError
        On wrong shapes or types, and in eager mode on a CPU on wrong values.

    References
    ----------
    The logit loss ℓ_{γ,ce} of arXiv 2602.00205.
    """
    check_rows("logits", logits)
    check_labels(labels, *logits.shape)
    if not isinstance(margins, Tensor) or not margins.is_floating_point():
        raise TypeError(f"margins has type {kind(margins)}; expected a floating-point tensor [{logits.shape[1]}].")
    if margins.shape != logits.shape[1:]:
        raise ValueError(f"margins has shape {list(margins.shape)}; expected [{logits.shape[1]}], one margin a class.")
    if (found := extremes(margins)) and not 0 < found[0] <= found[1] < torch.inf:
        raise ValueError(f"margins lie in {found[0]} … {found[1]}; expected positive, finite numbers.")
    return F.cross_entropy(logits / margins[labels][:, None], labels)


def representation_loss(features: Tensor, labels: Tensor, mean_deviation: Tensor, form: str = "printed") -> Tensor:
    r"""Pull together the pairs of a class that lie further apart than the average class is wide.

    With the positives :math:`P_i = \{j \ne i : y_j = y_i\}` and :math:`d_{ij}^2 = \lVert\varphi_i-\varphi_j\rVert^2`,
    over the distinct pairs of a class :math:`d^2` averages :math:`2\lVert\hat s\rVert^2\,n/(n-1)`, hence the margin
    :math:`2\bar s`:

    .. math::

        \text{printed:}\quad  & \ln\Bigl[1 + \sum_{j\in P_i} e^{\,d_{ij}^2 - 2\bar s}\Bigr] \\
        \text{relative:}\quad & \ln\Bigl[1 + \frac{1}{|P_i|}\sum_{j\in P_i} e^{\,d_{ij}^2/\bar s - 2}\Bigr]

    Parameters
    ----------
    features : Tensor
        [B, D].
    labels : Tensor
        [B], int64.
    mean_deviation : Tensor
        Scalar: s̄, the mean over classes of the mean squared Euclidean deviation; a constant to the gradient.
    form : {"printed", "relative"}
        ``printed`` is the formula of arXiv 2602.00205, averaged over all anchors: one without a positive counts as 0.
        ``relative``, the default of :class:`MR2Loss`, changes neither when features and s̄ are rescaled together nor
        with the number of positives, and averages over the anchors that have one. Since s̄ is a constant to the
        gradient, a step still gains from shrinking all features. It is 0 while s̄ is 0, when there is no scale.

    Returns
    -------
    Tensor
        Scalar, float32 or wider.

    Raises
    ------
    ValueError, TypeError
        On wrong shapes, types or form, and in eager mode on a CPU on values that are negative or not finite.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; expected one of {', '.join(FORMS)}.")
    check_rows("features", features)
    check_labels(labels, len(features))
    mean_deviation = torch.as_tensor(mean_deviation, device=features.device).detach()
    if mean_deviation.ndim:
        raise ValueError(f"mean_deviation has shape {list(mean_deviation.shape)}; expected a scalar.")
    if (found := extremes(mean_deviation)) and not 0 <= found[0] < torch.inf:
        raise ValueError(f"mean_deviation is {found[0]}; expected a finite number of at least 0.")
    with torch.autocast(features.device.type, enabled=False):
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        # Distances do not depend on the origin; at the batch's own centre the expanded square cancels least.
        distance = SquaredDistances.apply(features - features.mean(dim=0).detach())

    same = labels[:, None] == labels
    positives = same.sum(dim=1) - 1
    if form == "printed":
        exponent = distance - 2 * mean_deviation
    else:
        scale = torch.where(mean_deviation > 0, mean_deviation, torch.inf)
        exponent = distance / scale - (2 + positives.clamp(min=1).to(distance.dtype).log())
    # ln(1 + Σ exp), without overflow, is −ln softmax of the row at the anchor, whose own exponent 0 stands for the 1.
    exponent = exponent.masked_fill(~same, -torch.inf).fill_diagonal_(0)
    loss = -exponent.log_softmax(dim=1).diagonal()
    if form == "printed":
        return loss.mean()
    return torch.where(mean_deviation > 0, loss.sum() / (positives > 0).sum().clamp(min=1), 0)


class SquaredDistances(torch.autograd.Function):
    """‖φ_i − φ_j‖² of all pairs, [B, D] → [B, B]; its gradient takes one matrix product, where autograd takes two."""

    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        """Expand the square."""
        ctx.save_for_backward(rows)
        inner = rows @ rows.T
        square = inner.diagonal()
        return square[:, None] + square - 2 * inner

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Return 2 Σ_j (g_ij + g_ji) (φ_i − φ_j), a graph Laplacian times φ."""
        (rows,) = ctx.saved_tensors
        both = gradient + gradient.T
        laplacian = both.sum(dim=1).diag() - both
        with torch.autocast(rows.device.type, enabled=False):
            return 2 * laplacian @ rows


class MR2Output(NamedTuple):
    """What :class:`MR2Loss` returns: ``total = logit + representation_weight * representation``, three scalars."""

    total: Tensor
    logit: Tensor
    representation: Tensor


class MR2Loss(nn.Module):
    r"""Margin cross-entropy with margins from running class statistics, plus the representation loss.

    In ``train()`` mode a call first updates the statistics, then uses the updated margins and s̄ as constants. In
    ``eval()`` mode nothing moves. Before any update the margins are c̄ and the representation term is 0.

    Parameters
    ----------
    num_classes, feature_dim : int
        K and D.
    mean_margin : float
        c̄ > 0.
    representation_weight : float
        λ ≥ 0. With 0 the pairs are not even computed, and ``representation`` is 0.
    decay, p : float
        Of :class:`ClassStatistics`.
    statistic : {"second_moment", "deviation", "centred", "relative"}
        What the margins grow with: :math:`a_k=\lVert\hat\mu_k\rVert^2+\lVert\hat s_k\rVert^2` (the paper's);
        :math:`\lVert\hat s_k\rVert^2`; :math:`\lVert\hat\mu_k-\hat\mu_G\rVert^2+\lVert\hat s_k\rVert^2` about the mean
        of the class means; :math:`\lVert\hat s_k\rVert^2/\lVert\hat\mu_k\rVert^2`.
    exponent : float
        1/3 in Corollary 1.
    representation : {"relative", "printed"}
        The form of :func:`representation_loss`.
    warmup : int
        Updates of the statistics during which the margins stay c̄ and the representation term 0. Features that are
        still random are cheaper to shrink than to sort, so that pairs alone can collapse a network at its start; and
        classes seen once report no deviation, so that margins from ``deviation`` or ``relative`` would diverge.

    Raises
    ------
    ValueError, TypeError
        If an argument is outside its range.

    Examples
    --------
    >>> loss = MR2Loss(num_classes=100, feature_dim=512)
    >>> features = torch.randn(8, 512, requires_grad=True)
    >>> logits, labels = features[:, :100], torch.arange(8) % 4
    >>> loss(logits, features, labels).total.backward()
    """

    def __init__(
        self,
        num_classes: int,
        feature_dim: int,
        *,
        mean_margin: float = 1.0,
        representation_weight: float = 0.01,
        decay: float = 0.9,
        p: float = 2.0,
        statistic: str = "second_moment",
        exponent: float = 1 / 3,
        representation: str = "relative",
        warmup: int = 100,
    ):
        super().__init__()
        check_law(mean_margin, exponent)
        check_integer("warmup", warmup, 0)
        if not (isinstance(representation_weight, Real) and 0 <= representation_weight < float("inf")):
            raise ValueError(
                f"representation_weight is {representation_weight!r}; expected a finite number, at least 0."
            )
        if statistic not in STATISTICS:
            raise ValueError(f"statistic is {statistic!r}; expected one of {', '.join(STATISTICS)}.")
        if representation not in FORMS:
            raise ValueError(f"representation is {representation!r}; expected one of {', '.join(FORMS)}.")
        self.mean_margin, self.representation_weight = mean_margin, representation_weight
        self.statistic, self.exponent, self.representation = statistic, exponent, representation
        self.statistics = ClassStatistics(num_classes, feature_dim, decay=decay, p=p)
        self.warmup = warmup

    @classmethod
    def paper(cls, num_classes: int, feature_dim: int, **changes) -> "MR2Loss":
        """The printed setting: γ from the second moment to the power 1/3, printed pairs, λ = 0.1, β = 0.9, no warm-up.

        The paper tunes c̄ and λ by data set; pass ``mean_margin`` and ``representation_weight`` to do the same.
        """
        printed = {
            "statistic": "second_moment",
            "exponent": 1 / 3,
            "representation": "printed",
            "representation_weight": 0.1,
            "decay": 0.9,
            "warmup": 0,
        }
        return cls(num_classes, feature_dim, **(printed | changes))

    @property
    def class_statistic(self) -> Tensor:
        """[K]: the statistic that the margins grow with."""
        moments = self.statistics
        if self.statistic == "second_moment":
            return moments.spread
        if self.statistic == "deviation":
            return moments.p_deviation
        if self.statistic == "centred":
            centre = moments.mean.sum(dim=0) / moments.seen.sum().clamp(min=1)  # unseen means are 0
            return squared_norm(moments.mean - centre, moments.p) + moments.p_deviation
        # A mean within rounding error of 0 is taken for that error, so that the ratio stays finite.
        least = torch.finfo(torch.float32)
        square = torch.maximum(squared_norm(moments.mean, moments.p), least.eps * moments.p_deviation)
        return moments.p_deviation / square.clamp(min=least.tiny)

    @property
    def margins(self) -> Tensor:
        """[K]: the margins that the present statistics ask for, c̄ during the warm-up."""
        margins = class_margins(
            self.class_statistic, mean_margin=self.mean_margin, exponent=self.exponent, seen=self.statistics.seen
        )
        return torch.where(self.settled, margins, self.mean_margin)

    @property
    def settled(self) -> Tensor:
        """Scalar, bool: whether the warm-up is over."""
        return self.statistics.updates > self.warmup

    @property
    def mean_deviation(self) -> Tensor:
        """Scalar: s̄, the Euclidean deviation averaged over the classes that have one (one example has none)."""
        deviation = self.statistics.deviation
        return deviation.sum() / (deviation > 0).sum().clamp(min=1)

    logit_loss = staticmethod(margin_cross_entropy)

    def forward(self, logits: Tensor, features: Tensor, labels: Tensor) -> MR2Output:
        """Return ``total``, ``logit``, ``representation`` (scalars) for logits [B, K], features [B, D], labels [B]."""
        check_rows("logits", logits, width=self.statistics.num_classes)
        check_labels(labels, *logits.shape)
        check_rows("features", features, len(logits), self.statistics.feature_dim)
        if self.training:
            self.statistics.update(features.detach(), labels)
        logit = self.logit_loss(logits, labels, self.margins)
        if self.representation_weight == 0:
            return MR2Output(logit, logit, torch.zeros_like(logit))
        pairs = representation_loss(features, labels, self.mean_deviation, self.representation)
        pairs = torch.where(self.settled, pairs, 0)
        return MR2Output(logit + self.representation_weight * pairs, logit, pairs)
