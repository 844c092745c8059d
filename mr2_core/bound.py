r"""Every term of Proposition 1: from the error of a linear head down to the spreads of its features.

The head is :math:`z = W\varphi(x)` with rows :math:`\lVert w_k\rVert_2 \le \Lambda`. Features, margins γ and Λ are
fixed before the sample is drawn, of which :math:`n_k` examples belong to class k. The risk is :math:`\sum_k\pi_kR_k`,
with priors π_k = 1/K (the mean of the class errors) unless others are given, so that an example of class k weighs
:math:`\omega_k = \pi_k/n_k`, which is 1/N for balanced classes. A chapter of the book proves each step.

On arguments of wrong shapes or out of range every function raises ValueError, and TypeError on wrong types.
"""

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mr2_core.statistics import check_integer, check_labels, check_rows, extremes, kind, squared_norm

# complexity = constant · K^power · S6
CONSTANTS = {
    "clipped": (2 / math.log(2), 0),
    "unclipped": (4 / math.log(2), 0),
    "class by class": (4 / math.log(2), 0.5),
    "printed": (4 * math.sqrt(2), 0.5),
}
CHUNK = 2**24  # signs drawn at once: what bounds the memory


class Estimate(NamedTuple):
    """A Monte Carlo mean and its standard error."""

    value: float
    error: float


def margin_losses(logits: Tensor, labels: Tensor, margins: Tensor, clipped: bool = True) -> Tensor:
    r"""Step 1. What stands in for the error: :math:`\ell_\gamma/\ln 2`, clipped: :math:`\min(\ell_\gamma/\ln 2, 1)`.

    Logits [N, K], labels [N] and margins [K] → [N], with error ≤ clipped ≤ unclipped: a wrong argmax leaves
    :math:`\mathrm{softmax}_y(z/\gamma_y) \le 1/2`.
    """
    _check_sample(logits, labels, margins, "logits")
    losses = F.cross_entropy(logits / margins[labels][:, None], labels, reduction="none") / math.log(2)
    return losses.clamp(max=1) if clipped else losses


def lipschitz(margins: Tensor, clipped: bool = True) -> Tensor:
    r"""Step 2. Lipschitz constants in z of :func:`margin_losses`, by the example's class: [K] → [K].

    The gradient of :math:`\ell_\gamma` is no longer than :math:`\sqrt2(1-p_y)/\gamma_y`: at most
    :math:`\sqrt2/\gamma_y`, and half of that where the clipped loss still moves, since :math:`p_y \ge 1/2` there.
    """
    _check_fixed(margins)
    return math.sqrt(2) * (0.5 if clipped else 1) / (math.log(2) * margins)


def confidence(counts: Tensor, delta: float, priors: Tensor | None = None) -> float:
    r"""Step 3. The price of probability 1 − δ: :math:`3\sqrt{\tfrac12\ln\tfrac2\delta\,\sum_kn_k\omega_k^2}`.

    Counts [K], δ in (0, 1), priors [K]; for balanced classes :math:`3\sqrt{\ln(2/\delta)/2N}`.
    """
    if not (isinstance(delta, Real) and 0 < delta < 1):
        raise ValueError(f"delta is {delta!r}; expected a probability strictly between 0 and 1.")
    return 3 * math.sqrt(math.log(2 / delta) / 2 * (counts * _weights(counts, priors) ** 2).sum().item())


def supremum(
    features: Tensor,
    labels: Tensor,
    margins: Tensor,
    weight_norm: float,
    generator: torch.Generator,
    *,
    draws: int = 1000,
    priors: Tensor | None = None,
) -> Estimate:
    r"""Step 5, S5. What contraction leaves: a supremum in closed form, its expectation by Monte Carlo.

    .. math::

        S_5 = \mathbb E\sup_W\sum_{i,k}\varepsilon_{ik}\,\omega_{y_i}\frac{w_k^\top\varphi_i}{\gamma_{y_i}}
        = \Lambda\sum_k\mathbb E\Bigl\lVert\sum_i\varepsilon_{ik}\,\omega_{y_i}\frac{\varphi_i}{\gamma_{y_i}}\Bigr\rVert

    All K terms have the same expectation, so that every draw of N signs serves them all.

    Parameters
    ----------
    features, labels, margins : Tensor
        [N, D], [N] and [K].
    weight_norm : float
        Λ.
    generator : torch.Generator
        On the device of the features.
    draws : int
        Vectors of N signs, at least 2.
    priors : Tensor, optional
        [K]: π_k.

    Returns
    -------
    Estimate
        The Rademacher complexity of the clipped losses is at most S5/ln 2, of the unclipped ones 2 S5/ln 2.
    """
    _check_sample(features, labels, margins, "features", weight_norm)
    check_integer("draws", draws, 2)
    weights = _weights(labels.bincount(minlength=len(margins)), priors)
    scaled = features * (weights / margins).to(features.dtype)[labels][:, None]
    chunk = max(1, CHUNK // len(features))
    sizes = [min(chunk, draws - done) for done in range(0, draws, chunk)]
    norms = torch.cat([torch.linalg.vector_norm(_signs(size, scaled, generator) @ scaled, dim=1) for size in sizes])
    return _estimate(weight_norm * len(margins) * norms)


def class_spread(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    r"""Step 6. Class means of ‖φ‖², which are :math:`a_k = \lVert\hat\mu_k\rVert^2+\lVert\hat s_k\rVert^2`, and n_k.

    Features [N, D] and labels [N] → [K] and [K]; a class without examples has 0 in both.
    """
    check_rows("features", features)
    check_labels(labels, len(features), num_classes)
    counts = labels.bincount(minlength=num_classes)
    sums = features.new_zeros(num_classes).index_add_(0, labels, squared_norm(features))
    return sums / counts.clamp(min=1), counts


def joint(spread: Tensor, counts: Tensor, margins: Tensor, weight_norm: float, priors: Tensor | None = None) -> float:
    r"""Step 6, S6. Jensen's inequality on S5, all classes together: :math:`S_6/\sqrt2 \le S_5 \le S_6`.

    .. math::

        S_6 = \Lambda K\sqrt{\sum_k n_k\omega_k^2\frac{a_k}{\gamma_k^2}}
        \qquad\Bigl(\text{balanced: }\Lambda\sqrt{\tfrac KN}\sqrt{\sum_k\tfrac{a_k}{\gamma_k^2}}\Bigr)

    Spread a_k ≥ 0, counts n_k ≥ 1, margins γ_k > 0 and priors π_k are [K] each, ``weight_norm`` is Λ.
    """
    terms = _terms(spread, counts, margins, weight_norm, priors)
    return weight_norm * len(terms) * torch.linalg.vector_norm(terms).item()


def class_by_class(
    spread: Tensor, counts: Tensor, margins: Tensor, weight_norm: float, priors: Tensor | None = None
) -> float:
    r"""The second chain: the supremum of each class by itself, then Jensen; parameters as in :func:`joint`.

    .. math:: S_6 \;\le\; \Lambda K\sum_k\omega_k\frac{\sqrt{n_ka_k}}{\gamma_k} \;\le\; \sqrt K\,S_6
    """
    terms = _terms(spread, counts, margins, weight_norm, priors)
    return weight_norm * len(terms) * terms.sum().item()


def complexity(
    spread: Tensor,
    counts: Tensor,
    margins: Tensor,
    weight_norm: float,
    form: str = "clipped",
    priors: Tensor | None = None,
) -> float:
    r"""Step 7. The complexity term of the bound, a constant times S6; other parameters as in :func:`joint`.

    Parameters
    ----------
    form : {"clipped", "unclipped", "class by class", "printed"}
        :math:`\tfrac2{\ln2}S_6`; :math:`\tfrac4{\ln2}S_6`; :math:`\tfrac4{\ln2}\sqrt K\,S_6`, the second chain after
        Cauchy–Schwarz; :math:`4\sqrt2\sqrt K\,S_6`, for balanced classes the
        :math:`4\sqrt2\,\Lambda\tfrac K{\sqrt N}\sqrt{\sum_ka_k/\gamma_k^2}` of arXiv 2602.00205.
    """
    if form not in CONSTANTS:
        raise ValueError(f"form is {form!r}; expected one of {', '.join(CONSTANTS)}.")
    constant, power = CONSTANTS[form]
    return constant * len(margins) ** power * joint(spread, counts, margins, weight_norm, priors)


def ascent(
    features: Tensor,
    labels: Tensor,
    margins: Tensor,
    weight_norm: float,
    generator: torch.Generator,
    *,
    clipped: bool = True,
    draws: int = 8,
    steps: int = 200,
    batch: int = 1024,
    priors: Tensor | None = None,
) -> Estimate:
    r"""From below: the Rademacher complexity of :func:`margin_losses`, as far as gradient ascent reaches.

    .. math:: \mathrm{Rad} = \mathbb E\sup_W\sum_i\varepsilon_i\,\omega_{y_i}\,\ell_i(W)

    Whatever W the ascent ends at, its value is at most the supremum: this estimates a lower bound of Rad, no more.

    Parameters
    ----------
    features, labels, margins, weight_norm, generator, priors
        As in :func:`supremum`.
    clipped : bool
        Which losses.
    draws : int
        Vectors of N signs, at least 2, ascended side by side.
    steps, batch : int
        Steps of the ascent, and examples drawn afresh for each; the value is taken over the whole sample.
    """
    _check_sample(features, labels, margins, "features", weight_norm)
    for name, value, least in (("draws", draws, 2), ("steps", steps, 1), ("batch", batch, 1)):
        check_integer(name, value, least)
    weights = _weights(labels.bincount(minlength=len(margins)), priors).to(features.dtype)
    signed = _signs(draws, features, generator) * weights[labels]

    def losses(rows):  # unclipped, [draws, examples]
        logits = (features[rows] @ head.mT).flatten(0, 1)
        return margin_losses(logits, labels[rows].repeat(draws), margins, clipped=False).view(draws, -1)

    head = features.new_zeros(draws, len(margins), features.shape[1], requires_grad=True)
    optimiser = torch.optim.Adam([head], lr=0.1 * weight_norm / features.shape[1] ** 0.5, maximize=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 1 / steps, steps)
    for step in range(steps):
        rows = slice(None)
        if batch < len(features):
            rows = torch.randperm(len(features), generator=generator, device=features.device)[:batch]
        each = losses(rows)
        if clipped:
            # What is clipped has no gradient: at first, losses that should be small are followed down from any height.
            each = torch.where((signed[:, rows] < 0) & (2 * step < steps), each, each.clamp(max=1))
        optimiser.zero_grad()
        (signed[:, rows] * each).sum().backward()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            head.copy_(F.normalize(head, dim=2) * head.norm(dim=2, keepdim=True).clamp(max=weight_norm))
    with torch.no_grad():
        # At W = 0 every loss is log₂ K, clipped 1. Signs average to 0, so taking that off leaves the expectation and
        # removes noise; an ascent that ends below 0 has done worse than W = 0.
        each = losses(slice(None))
        each = each.clamp(max=1) - 1 if clipped else each - math.log2(len(margins))
        return _estimate((signed * each).sum(dim=1).clamp(min=0))


def _signs(rows: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Rademacher variables [rows, N] of the type and on the device of ``like``, [N, D]."""
    bits = torch.randint(2, (rows, len(like)), generator=generator, dtype=like.dtype, device=like.device)
    return 2 * bits - 1


def _estimate(values: Tensor) -> Estimate:
    return Estimate(values.mean().item(), (values.std() / len(values) ** 0.5).item())


def _weights(counts: Tensor, priors: Tensor | None) -> Tensor:
    """ω_k = π_k/n_k: [K], float64."""
    _check_tensors(counts=counts, priors=counts if priors is None else priors)
    if counts.ndim != 1 or len(counts) == 0 or counts.min() < 1:
        raise ValueError(f"counts is {counts.tolist()}; expected [K], at least 1 example of each class.")
    if priors is None:
        return 1 / (len(counts) * counts.double())
    if priors.shape != counts.shape or not priors.min() >= 0 or not math.isclose(priors.sum(), 1, rel_tol=1e-4):
        raise ValueError(f"priors is {priors.tolist()}; expected {len(counts)} probabilities that sum to 1.")
    return priors.double() / counts


def _terms(spread: Tensor, counts: Tensor, margins: Tensor, weight_norm: float, priors: Tensor | None) -> Tensor:
    """ω_k √(n_k a_k)/γ_k: [K], whose squares the first chain adds up and the second the terms themselves."""
    _check_fixed(margins, weight_norm)
    _check_tensors(spread=spread, counts=counts)
    if not spread.shape == counts.shape == margins.shape:
        shapes = ", ".join(str(list(vector.shape)) for vector in (spread, counts, margins))
        raise ValueError(f"spread, counts and margins have shapes {shapes}; expected one number a class in each.")
    if not 0 <= spread.min() <= spread.max() < math.inf:
        raise ValueError(f"spread lies in {spread.min()} … {spread.max()}; expected finite numbers of at least 0.")
    return _weights(counts, priors) * (counts * spread.double()).sqrt() / margins


def _check_tensors(**vectors: Tensor) -> None:
    for name, vector in vectors.items():
        if not isinstance(vector, Tensor):
            raise TypeError(f"{name} has type {kind(vector)}; expected a tensor [K].")


def _check_sample(rows: Tensor, labels: Tensor, margins: Tensor, name: str, weight_norm: float = 0) -> None:
    _check_fixed(margins, weight_norm)
    check_rows(name, rows, width=len(margins) if name == "logits" else None)
    check_labels(labels, len(rows), len(margins))


def _check_fixed(margins: Tensor, weight_norm: float = 0) -> None:
    if not isinstance(margins, Tensor) or not margins.is_floating_point() or margins.ndim != 1 or len(margins) < 2:
        shape = f" and shape {list(margins.shape)}" if isinstance(margins, Tensor) else ""
        raise TypeError(f"margins has type {kind(margins)}{shape}; expected a floating-point tensor [K], K at least 2.")
    if (found := extremes(margins)) and not 0 < found[0] <= found[1] < math.inf:
        raise ValueError(f"margins lie in {found[0]} … {found[1]}; expected positive, finite numbers.")
    if not (isinstance(weight_norm, Real) and 0 <= weight_norm < math.inf):
        raise ValueError(f"weight_norm is {weight_norm!r}; expected Λ, a finite number of at least 0.")
