"""Running class means and deviations of the features: the two moments that the bound sees."""

from numbers import Integral, Real

import torch
from torch import Tensor, nn


class ClassStatistics(nn.Module):
    r"""Exponentially weighted mean and mean squared deviation of each class's features.

    For every class present in a batch, with batch mean :math:`m`,

    .. math::

        \mu' = \beta\mu + (1-\beta)m, \qquad
        s' = \beta\,(s + \lVert\mu'-\mu\rVert^2) + (1-\beta)\,\mathrm{mean}\lVert\varphi-\mu'\rVert^2,

    which for p = 2 are exactly the moments of the weighted sample, so that the spread
    :math:`a_k = \lVert\hat\mu_k\rVert^2 + \lVert\hat s_k\rVert^2` is the weighted mean of
    :math:`\lVert\varphi\rVert^2`. The first batch of a class sets its state; a class that is absent does not decay.

    Parameters
    ----------
    num_classes : int
        K, at least 2.
    feature_dim : int
        D, the width of the features.
    decay : float
        β in [0, 1): the weight of the past at each batch that holds the class.
    p : float
        The norm of ``spread``, at least 1. For p ≠ 2 the same recursion defines the p-deviation, which is kept
        beside the Euclidean one.

    Attributes
    ----------
    mean : Tensor
        [K, D], float32.
    deviation : Tensor
        [K], float32: the mean squared Euclidean deviation, :math:`\lVert\hat s_k\rVert^2`.
    seen : Tensor
        [K], bool: whether the class has occurred.
    updates : Tensor
        Scalar, int64: batches taken in.

    Raises
    ------
    ValueError, TypeError
        If an argument is outside its range or not of its type.

    Notes
    -----
    The buffers stay float32 whatever ``.half()`` or autocast do. With ``torch.distributed`` initialised the batch sums
    are all-reduced, so that every rank holds the statistics of the joined batch. Rows that are not finite are left out
    on an accelerator, where checking them would stall it; in eager mode on a CPU they raise.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, decay: float = 0.9, p: float = 2.0):
        super().__init__()
        check_integer("num_classes", num_classes, 2)
        check_integer("feature_dim", feature_dim, 1)
        if not (isinstance(decay, Real) and 0 <= decay < 1):
            raise ValueError(f"decay is {decay!r}; expected a number in [0, 1).")
        if not (isinstance(p, Real) and 1 <= p < float("inf")):
            raise ValueError(f"p is {p!r}; expected a finite norm of at least 1.")
        self.num_classes, self.feature_dim, self.decay, self.p = int(num_classes), int(feature_dim), decay, p
        self.register_buffer("mean", torch.zeros(num_classes, feature_dim, dtype=torch.float32))
        self.register_buffer("deviation", torch.zeros(num_classes, dtype=torch.float32))
        self.register_buffer("_p_deviation", None if p == 2 else torch.zeros(num_classes, dtype=torch.float32))
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.bool))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @property
    def p_deviation(self) -> Tensor:
        """[K]: the mean squared deviation in the p-norm, which for p = 2 is ``deviation`` itself."""
        return self.deviation if self.p == 2 else self._p_deviation

    @property
    def spread(self) -> Tensor:
        """[K]: ‖μ̂_k‖_p² + ‖ŝ_k‖_p² (a_k for p = 2); zero for a class not seen yet."""
        return squared_norm(self.mean, self.p) + self.p_deviation

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Take one batch in.

        Parameters
        ----------
        features : Tensor
            [B, D], any floating type.
        labels : Tensor
            [B], int64 in 0 … K − 1.

        Raises
        ------
        ValueError, TypeError
            On wrong shapes or types; in eager mode on a CPU also on labels out of range and on features that are not
            finite.
        """
        check_rows("features", features, width=self.feature_dim)
        check_labels(labels, len(features), self.num_classes)
        features = features.float()
        finite = features.sum(dim=1).isfinite()
        features = torch.where(finite[:, None], features, 0)

        def class_sum(rows: Tensor) -> Tensor:
            # A sum by index is exact in float32, where a matrix product would follow autocast or TF32.
            sums = rows.new_zeros(self.num_classes, *rows.shape[1:]).index_add_(0, labels, rows)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(sums)
            return sums

        count = class_sum(finite.float())
        least_one = count.clamp(min=1)
        past = torch.where(count > 0, self.decay * self.seen.float(), 1)  # β; 0 in a first batch; 1 without examples

        mean = torch.lerp(class_sum(features) / least_one[:, None], self.mean, past[:, None])
        shift, from_mean = mean - self.mean, features - mean.index_select(0, labels)
        for p, deviation in {2: self.deviation, self.p: self.p_deviation}.items():
            squares = class_sum(finite * squared_norm(from_mean, p)) / least_one
            deviation.copy_(torch.lerp(squares, deviation + squared_norm(shift, p), past))
        self.mean.copy_(mean)
        self.seen.logical_or_(count > 0)
        self.updates += 1

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:  # .half() moves us, but statistics stay float32
                self._buffers[name] = buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, feature_dim={self.feature_dim}, decay={self.decay}, p={self.p}"


def squared_norm(vectors: Tensor, p: float = 2.0) -> Tensor:
    """‖·‖_p² of each row: [..., D] → [...]."""
    if p == 2:
        return torch.linalg.vector_norm(vectors, dim=-1).square()
    # The norm of vectors of largest entry 1, so that no p-th power over- or underflows.
    peak = vectors.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
    return (peak.squeeze(-1) * torch.linalg.vector_norm(vectors / peak, ord=p, dim=-1)).square()


def kind(value) -> str:
    """Say what a refused argument is: a tensor's dtype, else the name of its type."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def extremes(tensor: Tensor) -> tuple[float, float] | None:
    """Least and largest value (NaN if one is), for checks; None where looking would stall a GPU or break a graph."""
    if tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        return tuple(value.item() for value in tensor.aminmax())
    return None


def check_integer(name: str, value: int, least: int) -> None:
    """Refuse what is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; expected an integer of at least {least}.")
    if value < least:
        raise ValueError(f"{name} is {value}; expected an integer of at least {least}.")


def check_number(name: str, value: float, interval: str) -> float:
    """Return a number of an interval, written as in ``(0, 1]``; refuse any other."""
    low, high = map(float, interval[1:-1].split(", "))
    if not (
        isinstance(value, Real)
        and (low <= value if interval[0] == "[" else low < value)
        and (value <= high if interval[-1] == "]" else value < high)
    ):
        raise ValueError(f"{name} is {value!r}; expected a number in {interval}.")
    return value


def check_rows(name: str, rows: Tensor, batch: int | None = None, width: int | None = None) -> None:
    """Refuse features or logits that are no finite floating-point matrix, or not of the shape [batch, width]."""
    expected = f"[{batch or 'B'}, {width or ('K' if name == 'logits' else 'D')}]"
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        raise TypeError(f"{name} has type {kind(rows)}; expected a floating-point tensor {expected}.")
    if rows.ndim != 2 or len(rows) != (batch or len(rows)) or rows.shape[1] != (width or rows.shape[1]):
        raise ValueError(f"{name} has shape {list(rows.shape)}; expected {expected}.")
    if len(rows) == 0:
        raise ValueError(f"{name} has shape {list(rows.shape)}; expected at least one row.")
    if (found := extremes(rows)) and not -torch.inf < found[0] <= found[1] < torch.inf:
        raise ValueError(f"{name} holds NaN or infinite values; expected finite ones: has training diverged?")


def check_labels(labels: Tensor, batch: int, num_classes: int | None = None) -> None:
    """Refuse labels that are not one class index for each row of the batch."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        raise TypeError(f"labels has type {kind(labels)}; expected class indices, an int64 tensor [{batch}].")
    if labels.shape != (batch,):
        raise ValueError(f"labels has shape {list(labels.shape)}; expected [{batch}], one class index for each row.")
    if num_classes and (found := extremes(labels)) and not 0 <= found[0] <= found[1] < num_classes:
        raise ValueError(f"labels lie in {found[0]} … {found[1]}; expected 0 … {num_classes - 1}.")
