"""From a class statistic to class margins (Corollary 1 and its relatives)."""

from numbers import Real

import torch
from torch import Tensor

from mr2_core.statistics import extremes, kind


def class_margins(
    spread: Tensor, *, mean_margin: float = 1.0, exponent: float = 1 / 3, seen: Tensor | None = None
) -> Tensor:
    r"""Margins proportional to a power of the spread, with a fixed average.

    .. math:: \gamma_k = \bar c\, K\, \frac{a_k^{e}}{\sum_j a_j^{e}}

    With e = 1/3 this minimises the bound's :math:`\sum_k a_k/\gamma_k^2` under :math:`\sum_k\gamma_k = K\bar c`
    (Corollary 1 of arXiv 2602.00205); a budget on :math:`\sum_k\gamma_k^q` asks for e = 1/(q + 2).

    Parameters
    ----------
    spread : Tensor
        [K], non-negative: a_k or any other class statistic.
    mean_margin : float
        c̄ > 0, the average margin.
    exponent : float
        e; 0 gives uniform margins, a negative one reverses their order.
    seen : Tensor, optional
        [K], bool: the classes whose spread is known; all by default.

    Returns
    -------
    Tensor
        [K], positive. Known classes average to c̄. A class that is unknown, or whose spread is zero (one example,
        so far), gets c̄ itself.

    Raises
    ------
    ValueError, TypeError
        If ``spread`` is not a floating-point vector, ``seen`` does not match it, ``mean_margin`` is not positive or
        ``exponent`` not finite; in eager mode on a CPU also if a known spread is negative or not finite.
    """
    if not isinstance(spread, Tensor) or not spread.is_floating_point():
        raise TypeError(f"spread has type {kind(spread)}; expected a floating-point tensor [K].")
    if spread.ndim != 1 or len(spread) == 0:
        raise ValueError(f"spread has shape {list(spread.shape)}; expected [K], one number a class.")
    check_law(mean_margin, exponent)
    if seen is not None:
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            raise TypeError(f"seen has type {kind(seen)}; expected a bool tensor {list(spread.shape)}.")
        if seen.shape != spread.shape:
            raise ValueError(f"seen has shape {list(seen.shape)}; expected {list(spread.shape)}, as spread has.")
        spread = torch.where(seen, spread, 0)
    if (found := extremes(spread)) and not 0 <= found[0] <= found[1] < torch.inf:
        raise ValueError(f"spread lies in {found[0]} … {found[1]}; expected finite numbers of at least 0.")

    known = spread > 0
    # Logarithms and a softmax, so that no spread, however small or large, over- or underflows.
    log_power = torch.where(known, exponent * torch.where(known, spread, 1).log(), -torch.inf)
    share = torch.softmax(torch.where(known.any(), log_power, 0), dim=0)
    # A share below the rounding error of the average is rounded up to it: margins stay positive and logits/γ finite.
    times_average = (known.sum() * share).clamp(min=torch.finfo(spread.dtype).eps)
    return torch.where(known, mean_margin * times_average, mean_margin)


def check_law(mean_margin: float, exponent: float) -> None:
    """Refuse an average margin that is not positive, and what is not a finite number."""
    if not (isinstance(mean_margin, Real) and 0 < mean_margin < float("inf")):
        raise ValueError(f"mean_margin is {mean_margin!r}; expected a finite number greater than 0.")
    if not (isinstance(exponent, Real) and -float("inf") < exponent < float("inf")):
        raise ValueError(f"exponent is {exponent!r}; expected a finite number, 1/3 in Corollary 1.")
