r"""The published baselines, each in a few lines: loss modules that are called as :class:`mr2_core.MR2Loss` is.

Notation: K classes, n_k training examples of class k, N in all, π_k = n_k/N; logits z, features φ, labels y, and
ℓ = −ln softmax_y(z), the cross-entropy of one example. ``counts`` are the n_k, equal by default: on class-balanced data
several of these methods are ERM, as their docstrings say.

A method that needs more than a formula gets it from :func:`mr2_core.training.fit` by having any of these:

``begin(model, loader, first_stage)``
    Called once, before the optimiser is made and a checkpoint is loaded, to register networks and buffers, which are
    then trained, moved and checkpointed with the loss. ``first_stage(model, loss, epochs)`` trains with the settings of
    the run; it is None where the run goes on from a checkpoint, which holds what a first stage has found.
``begin_epoch(model, loader, epoch, epochs)``
    Called at the start of each epoch.
``batches(loader, epoch, start)``
    Yields the batches of an epoch in place of ``loader.epoch``: images, labels, and what else ``forward`` takes after
    logits, features and labels.
``views``
    How many versions of each of the loader's images its batches hold, if not one.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mr2_core.losses import MR2Output
from mr2_core.statistics import check_integer, check_labels, check_number, check_rows


class Baseline(nn.Module):
    """The mean over the batch of one loss an example; subclasses change ``each`` or ``combine``.

    Parameters
    ----------
    num_classes, feature_dim : int
        K and D.

    Raises
    ------
    ValueError, TypeError
        As every subclass: if an argument is outside its range or not of its type.
    """

    def __init__(self, num_classes: int, feature_dim: int):
        super().__init__()
        check_integer("num_classes", num_classes, 2)
        check_integer("feature_dim", feature_dim, 1)
        self.num_classes, self.feature_dim = num_classes, feature_dim

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses [B] of logits [B, K], float32 or wider, and labels [B]: the cross-entropy."""
        return F.cross_entropy(logits, labels, reduction="none")

    def combine(self, each: Tensor, labels: Tensor) -> Tensor:
        """Make one loss of those of the examples [B]: their mean."""
        return each.mean()

    def forward(self, logits: Tensor, features: Tensor, labels: Tensor) -> MR2Output:
        """Return the loss as ``total`` and ``logit`` for logits [B, K], features [B, D] and labels [B]."""
        check_rows("logits", logits, width=self.num_classes)
        check_labels(labels, *logits.shape)
        return single(self.combine(self.each(wide(logits), labels), labels))


# Plain training


class LabelSmoothing(Baseline):
    r"""Cross-entropy with a target that leaves ε to the uniform distribution (Szegedy et al. 2016, section 7).

    .. math:: -(1-\varepsilon)\ln p_y - \frac{\varepsilon}{K}\sum_k\ln p_k, \qquad p = \mathrm{softmax}(z)

    Class frequencies play no part: balanced data change nothing.

    Parameters
    ----------
    smoothing : float
        ε in [0, 1); 0.1 in the paper. 0 is ERM.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, smoothing: float = 0.1):
        super().__init__(num_classes, feature_dim)
        self.smoothing = check_number("smoothing", smoothing, "[0, 1)")

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Smoothed cross-entropy."""
        uniform = -logits.log_softmax(dim=1).mean(dim=1)
        return (1 - self.smoothing) * super().each(logits, labels) + self.smoothing * uniform


class Mixup(Baseline):
    r"""Train on mixtures of pairs of images and of their labels (Zhang et al. 2018).

    .. math:: \tilde x = \lambda x_i + (1-\lambda)x_j, \qquad
        \lambda\,\ell(\tilde x, y_i) + (1-\lambda)\,\ell(\tilde x, y_j), \qquad \lambda\sim\mathrm{Beta}(\alpha,\alpha)

    with one λ and one random pairing a batch. Class frequencies play no part: balanced data change nothing. Called
    without partners it is cross-entropy.

    Parameters
    ----------
    alpha : float
        α > 0; 1 for CIFAR and 0.2 for ImageNet in the paper.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, alpha: float = 1.0):
        super().__init__(num_classes, feature_dim)
        self.alpha = check_number("alpha", alpha, "(0, inf)")

    def batches(self, loader, epoch: int, start: int):
        """Yield mixed images, their labels, the labels of their partners, and λ."""
        for images, labels in loader.epoch(epoch, start):
            share = torch.distributions.Beta(self.alpha, self.alpha).sample().item()
            partner = torch.randperm(len(labels)).to(labels.device)
            yield share * images + (1 - share) * images[partner], labels, labels[partner], share

    def forward(self, logits, features, labels, partners: Tensor | None = None, share: float = 1.0) -> MR2Output:
        """Return the loss for logits of mixed images, in which the partners' labels [B] weigh 1 − ``share``."""
        out = super().forward(logits, features, labels)
        if partners is None:
            return out
        return single(share * out.total + (1 - share) * super().forward(logits, features, partners).total)


# Re-weighting, and hard examples


class Focal(Baseline):
    r"""Weigh an example by how wrong it is (Lin et al. 2017, equation 4).

    .. math:: -(1-p_y)^{\gamma}\ln p_y, \qquad p = \mathrm{softmax}(z)

    Class frequencies play no part: balanced data change nothing.

    Parameters
    ----------
    focus : float
        γ ≥ 0; 2 in the paper. 0 is ERM.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, focus: float = 2.0):
        super().__init__(num_classes, feature_dim)
        self.focus = check_number("focus", focus, "[0, inf)")

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy times a power of the probability of being wrong."""
        each = super().each(logits, labels)
        # Kept from 0, where a power below 1 is infinitely steep.
        wrong = (-torch.expm1(-each)).clamp(min=torch.finfo(each.dtype).tiny)
        return wrong**self.focus * each


class ClassBalanced(Baseline):
    r"""Weigh a class by the inverse of its effective number of examples (Cui et al. 2019).

    .. math:: w_y\,\ell(z, y), \qquad w_k \propto \frac{1-\beta}{1-\beta^{n_k}}, \qquad \sum_k w_k = K

    On balanced data all weights are 1, and it is ERM.

    Parameters
    ----------
    beta : float
        β in [0, 1): 0 is ERM, towards 1 weights become inverse frequencies. The paper chooses by data set among 0.9,
        0.99, 0.999 and 0.9999.
    counts : sequence of int, optional
        n_k.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, beta: float = 0.999, counts=None):
        super().__init__(num_classes, feature_dim)
        weights = effective_number_weights(class_counts(counts, num_classes), beta)
        self.register_buffer("weights", weights, persistent=False)

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Weighted cross-entropy."""
        return self.weights[labels] * super().each(logits, labels)


class LfF(Baseline):
    r"""Learn from the failures of a second network, which is made to prefer what is easy (Nam et al. 2020).

    The biased network, with losses :math:`\ell_B`, learns by generalised cross-entropy (Zhang & Sabuncu 2018), which
    follows examples that it already gets right; the other one, with losses ℓ, by relative difficulty:

    .. math:: \frac{1-p_{B,y}^{\,q}}{q} \qquad\text{and}\qquad \frac{\ell_B}{\ell_B+\ell}\,\ell

    The weight is a constant to the gradient. The authors' code also averages both losses over epochs, divides them by
    the largest of their class, and shrinks the biased network's gradient by q, which the paper's equations do not have
    and this does not do. Class frequencies play no part; while both networks are alike all weights are 1/2, which
    halves the learning rate. Only :func:`mr2_core.training.fit` provides the second network: without images it is
    cross-entropy.

    Parameters
    ----------
    q : float
        In (0, 1]; 0.7 in the paper.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, q: float = 0.7):
        super().__init__(num_classes, feature_dim)
        self.q = check_number("q", q, "(0, 1]")

    def begin(self, model, loader, first_stage) -> None:
        """Make the biased network: the model's architecture, weights drawn anew by each of its modules.

        Raises
        ------
        ValueError
            If the model has weights that no module of it can draw anew.
        """
        self.biased = copy.deepcopy(model)
        for module in self.biased.modules():
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if reset:
                reset()
        for (name, old), new in zip(model.named_parameters(), self.biased.parameters(), strict=True):
            if old.numel() > 1 and old.std() > 0 and torch.equal(old, new):
                raise ValueError(f"lff cannot draw {name} anew: give its module a method reset_parameters.")

    def batches(self, loader, epoch: int, start: int):
        """Yield the images a second time, for the second network."""
        for images, labels in loader.epoch(epoch, start):
            yield images, labels, images

    def forward(self, logits, features, labels, images: Tensor | None = None) -> MR2Output:
        """Return the sum of both losses as ``total``, and that of the model as ``logit``."""
        if images is None:
            return super().forward(logits, features, labels)
        narrow = logits.dtype in (torch.bfloat16, torch.float16)  # as the model's autocast made it
        with torch.autocast(images.device.type, logits.dtype if narrow else None, enabled=narrow):
            biased_logits, _ = self.biased(images)
        own, biased = self.each(wide(logits), labels), self.each(wide(biased_logits), labels)
        loss = (relative_difficulty(own, biased) * own).mean()
        return MR2Output(loss + generalised_cross_entropy(biased, self.q).mean(), loss, torch.zeros_like(loss))


def relative_difficulty(own: Tensor, biased: Tensor) -> Tensor:
    """ℓ_B/(ℓ_B + ℓ) of losses [B], a constant to the gradient; 0 where both are."""
    return (biased / (biased + own).clamp(min=torch.finfo(own.dtype).tiny)).detach()


def generalised_cross_entropy(each: Tensor, q: float) -> Tensor:
    """(1 − p_y^q)/q of cross-entropies −ln p_y, [B]: cross-entropy for q → 0, the probability of being wrong for 1."""
    return -torch.expm1(-q * each) / q


class JTT(Baseline):
    r"""Just train twice: weigh up what a first network, trained for a few epochs, gets wrong (Liu et al. 2021).

    .. math:: \frac{1}{\sum_i w_i}\sum_i w_i\,\ell(z_i, y_i), \qquad
        w_i = \lambda\ \text{if the first network errs on example } i, \text{ else } 1

    The first network starts as the model does, and both are trained from there with the settings of the run, the first
    through a whole schedule of ``first_epochs``; errors are counted on images that are not augmented. The paper repeats
    examples λ times instead of weighing them, which is equal in expectation; weights keep the number of steps, and so
    methods comparable. Class frequencies play no part. Only :func:`mr2_core.training.fit` provides the first stage:
    without weights it is cross-entropy.

    Parameters
    ----------
    first_epochs : int
        Of the first network. Chosen on validation in the paper: 60 of 300 on Waterbirds, 1 of 50 on CelebA.
    upweight : float
        λ ≥ 1. Chosen likewise: 100 and 50.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, first_epochs: int, upweight: float):
        super().__init__(num_classes, feature_dim)
        check_integer("first_epochs", first_epochs, 1)
        self.first_epochs, self.upweight = first_epochs, check_number("upweight", upweight, "[1, inf)")

    def begin(self, model, loader, first_stage) -> None:
        """Find the errors of the first network."""
        self.register_buffer("weights", torch.ones(len(loader.labels), device=loader.device))
        if first_stage:
            first = copy.deepcopy(model)
            first_stage(first, Baseline(self.num_classes, self.feature_dim), self.first_epochs)
            self.weights[misclassified(first, loader)] = self.upweight
            self.weights /= self.weights.mean()

    def batches(self, loader, epoch: int, start: int):
        """Yield images, labels and the weights of the examples."""
        for chosen, (images, labels) in zip(loader.order(epoch, start), loader.epoch(epoch, start), strict=True):
            yield images, labels, self.weights[chosen]

    def forward(self, logits, features, labels, weights: Tensor | None = None) -> MR2Output:
        """Return the loss, weighted by ``weights`` [B] of mean 1 over the training set."""
        if weights is None:
            return super().forward(logits, features, labels)
        return single((weights * self.each(wide(logits), labels)).mean())


# Margins


class LDAM(Baseline):
    r"""Label-distribution-aware margins: rare classes must win by more (Cao et al. 2019, equations 12 and 13).

    .. math:: -\ln\frac{e^{s(z_y-\Delta_y)}}{e^{s(z_y-\Delta_y)}+\sum_{k\ne y}e^{s z_k}}, \qquad
        \Delta_k\propto n_k^{-1/4}, \qquad \max_k\Delta_k = \Delta

    On balanced data every class has the margin Δ: one uniform additive margin, which is not ERM.

    Parameters
    ----------
    max_margin : float
        Δ ≥ 0, on the scale of the logits; 0.5 in the paper, whose logits are cosines.
    scale : float
        s > 0. The paper multiplies its cosines by 30; the heads of ``mr2_core.models`` have a scale of their own.
    counts : sequence of int, optional
        n_k.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, max_margin: float = 0.5, scale: float = 1.0, counts=None):
        super().__init__(num_classes, feature_dim)
        check_number("max_margin", max_margin, "[0, inf)")
        self.scale = check_number("scale", scale, "(0, inf)")
        counts = class_counts(counts, num_classes)
        margins = max_margin * (counts.min() / counts) ** 0.25
        self.register_buffer("margins", margins.float(), persistent=False)

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy with the margin taken from the logit of the true class."""
        truth = F.one_hot(labels, self.num_classes)
        return super().each(self.scale * (logits - self.margins * truth), labels)


class LDAMDRW(LDAM):
    r"""LDAM with deferred re-weighting: late in training rare classes weigh more (Cao et al. 2019, Algorithm 1).

    .. math:: \frac{\sum_i w_{y_i}\,\ell_i}{\sum_i w_{y_i}}

    over the batch, with LDAM's losses :math:`\ell_i` and the weights of :class:`ClassBalanced` as in the authors' code;
    the algorithm has :math:`1/n_k`, which the authors find to work as well. On balanced data the weights are equal, and
    it is :class:`LDAM`.

    Parameters
    ----------
    defer : float
        The share of the epochs before the weights come; 160 of 200 in the paper.
    beta : float
        Of the effective number; 0.9999 in the authors' code.
    max_margin, scale, counts
        As in :class:`LDAM`.
    """

    def __init__(
        self, num_classes: int, feature_dim: int, *, defer: float = 0.8, beta: float = 0.9999, counts=None, **changes
    ):
        super().__init__(num_classes, feature_dim, counts=counts, **changes)
        self.defer = check_number("defer", defer, "[0, 1]")
        deferred = effective_number_weights(class_counts(counts, num_classes), beta)
        self.register_buffer("deferred", deferred, persistent=False)
        self.register_buffer("weights", torch.ones(num_classes))

    def begin_epoch(self, model, loader, epoch: int, epochs: int) -> None:
        """Bring in the weights once their time has come."""
        if epoch >= self.defer * epochs:
            self.weights.copy_(self.deferred)

    def combine(self, each: Tensor, labels: Tensor) -> Tensor:
        """Weighted mean; in a process group, over the whole batch."""
        weights = self.weights[labels]
        return processes() * (weights * each).sum() / joined(weights.sum())


class LogitAdjustment(Baseline):
    r"""Cross-entropy of logits that are shifted by the log-frequencies of their classes (Menon et al. 2021).

    .. math:: \ell(z + \tau\ln\pi,\; y)

    On balanced data all logits are shifted alike, and it is ERM.

    Parameters
    ----------
    tau : float
        τ; 1 in the paper.
    counts : sequence of int, optional
        n_k.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, tau: float = 1.0, counts=None):
        super().__init__(num_classes, feature_dim)
        check_number("tau", tau, "(-inf, inf)")
        self.register_buffer("shift", (tau * frequencies(counts, num_classes).log()).float(), persistent=False)

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of shifted logits."""
        return super().each(logits + self.shift, labels)


class EQL(Baseline):
    r"""Equalization loss: examples of other classes mostly do not push a rare class down (Tan et al. 2020).

    .. math:: -\ln\frac{e^{z_y}}{\sum_k w_k e^{z_k}}, \qquad
        w_k = 1-\beta\,[\pi_k<\lambda]\,[k\ne y], \qquad \beta\sim\mathrm{Bernoulli}(\gamma)

    in its softmax form, β drawn for each example and class in ``train()`` mode, and 0 in ``eval()`` mode. On balanced
    data all frequencies are 1/K: it is ERM where λ ≤ 1/K, which excludes every class from being rare; where λ > 1/K all
    are rare, and each keeps only a random part of its negatives.

    Parameters
    ----------
    threshold : float
        λ in [0, 1], on the scale of the frequencies. Chosen by data set in the paper.
    gamma : float
        γ in [0, 1]. Chosen likewise, about 0.9.
    counts : sequence of int, optional
        n_k.
    """

    def __init__(
        self, num_classes: int, feature_dim: int, *, threshold: float = 0.003, gamma: float = 0.9, counts=None
    ):
        super().__init__(num_classes, feature_dim)
        check_number("threshold", threshold, "[0, 1]")
        self.gamma = check_number("gamma", gamma, "[0, 1]")
        self.register_buffer("rare", frequencies(counts, num_classes) < threshold, persistent=False)

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the true class and the others that were not dropped."""
        if self.training:
            # Drawn on the CPU, whose random stream is checkpointed.
            dropped = (torch.rand(logits.shape) < self.gamma).to(logits.device) & self.rare
            logits = logits.masked_fill(dropped & (F.one_hot(labels, self.num_classes) == 0), -torch.inf)
        return super().each(logits, labels)


class VS(LogitAdjustment):
    r"""Vector scaling: a factor and a shift for the logit of each class (Kini et al. 2021, equation 2).

    .. math:: \ell(\Delta\odot z + \tau\ln\pi,\; y), \qquad \Delta_k = (n_k/n_{\max})^{\gamma}

    with the factors and shifts of the authors' code, whose class weights are 1 by default. On balanced data the factors
    are 1 and the shifts equal, and it is ERM.

    Parameters
    ----------
    gamma, tau : float
        γ ≥ 0 and τ; 0.3 and 1 in the authors' code, tuned by data set in the paper. γ = 0 is logit adjustment.
    counts : sequence of int, optional
        n_k.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, gamma: float = 0.3, tau: float = 1.0, counts=None):
        super().__init__(num_classes, feature_dim, tau=tau, counts=counts)
        check_number("gamma", gamma, "[0, inf)")
        counts = class_counts(counts, num_classes)
        self.register_buffer("factors", ((counts / counts.max()) ** gamma).float(), persistent=False)

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of scaled and shifted logits."""
        return super().each(self.factors * logits, labels)


class LDT(Baseline):
    r"""Label-dependent temperature: all logits of an example times a factor of its class (Behnia et al. 2023).

    .. math:: \ell(\delta_y z,\; y), \qquad \delta_k = \frac{n_k^{\gamma}}{\frac1K\sum_j n_j^{\gamma}}

    The mean factor is 1, as in the authors' code. It is the margin cross-entropy of MR2 with γ_y = 1/δ_y. On balanced
    data all factors are 1, and it is ERM.

    Parameters
    ----------
    gamma : float
        γ ≥ 0; 0.5 by default in the authors' code, whose experiments go up to 1.5. 0 is ERM.
    counts : sequence of int, optional
        n_k.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, gamma: float = 0.5, counts=None):
        super().__init__(num_classes, feature_dim)
        check_number("gamma", gamma, "[0, inf)")
        powers = class_counts(counts, num_classes) ** gamma
        self.register_buffer("factors", (powers / powers.mean()).float(), persistent=False)

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy at the temperature of the true class."""
        return super().each(self.factors[labels][:, None] * logits, labels)


# Representation


class SupCon(Baseline):
    r"""Cross-entropy, plus pairs of a class pulled together on the sphere (Khosla et al. 2020, equation 2).

    With unit projections v, the positives :math:`P_i=\{j\ne i: y_j=y_i\}` and a temperature t,

    .. math:: \ell(z, y) + \lambda\,\frac{-1}{|P_i|}\sum_{j\in P_i}
        \ln\frac{e^{v_i\cdot v_j/t}}{\sum_{k\ne i}e^{v_i\cdot v_k/t}}

    averaged over the anchors that have a positive; with the two views of each image that a batch holds in
    :func:`mr2_core.training.fit`, all have. Class frequencies play no part: balanced data change nothing.

    Parameters
    ----------
    representation_weight : float
        λ ≥ 0. The paper trains in two stages instead: :class:`SupConTwoStage`.
    temperature : float
        t > 0; 0.1 in the paper.
    width : int
        Of the projections, from features through one hidden layer; 128 in the paper.
    """

    views = 2

    def __init__(
        self,
        num_classes: int,
        feature_dim: int,
        *,
        representation_weight: float = 1.0,
        temperature: float = 0.1,
        width: int = 128,
    ):
        super().__init__(num_classes, feature_dim)
        self.representation_weight = check_number("representation_weight", representation_weight, "[0, inf)")
        self.temperature = check_number("temperature", temperature, "(0, inf)")
        check_integer("width", width, 1)
        self.project = nn.Sequential(nn.Linear(feature_dim, feature_dim), nn.ReLU(), nn.Linear(feature_dim, width))

    def batches(self, loader, epoch: int, start: int):
        """Yield the images of a batch in two versions, one after the other."""
        versions = (loader.epoch(epoch, start, view) for view in range(self.views))
        for parts in zip(*versions, strict=True):
            images, labels = zip(*parts, strict=True)
            yield torch.cat(images), torch.cat(labels)

    def forward(self, logits: Tensor, features: Tensor, labels: Tensor) -> MR2Output:
        """Return both terms, the pairs as ``representation``."""
        check_rows("features", features, len(logits), self.feature_dim)
        loss = super().forward(logits, features, labels).logit
        pairs = supervised_contrastive(self.project(wide(features)), labels, self.temperature)
        return MR2Output(loss + self.representation_weight * pairs, loss, pairs)


def supervised_contrastive(vectors: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss of vectors [B, D], which are normalised first; 0 without a positive pair."""
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positive = (labels[:, None] == labels) & ~itself
    count = positive.sum(dim=1)
    with torch.autocast(vectors.device.type, enabled=False):
        unit = F.normalize(wide(vectors), dim=1)
        similarity = unit @ unit.T / temperature
    log_share = similarity.masked_fill(itself, -torch.inf).log_softmax(dim=1)
    anchors = torch.where(positive, log_share, 0).sum(dim=1) / count.clamp(min=1)
    return -anchors.sum() / (count > 0).sum().clamp(min=1)


class Contrastive(SupCon):
    """The pairs of :class:`SupCon` alone, its first stage."""

    def forward(self, logits: Tensor, features: Tensor, labels: Tensor) -> MR2Output:
        """Return the pairs as ``total``, so that no gradient reaches the head."""
        pairs = super().forward(logits, features, labels).representation
        return MR2Output(pairs, torch.zeros_like(pairs), pairs)


class SupConTwoStage(Baseline):
    """Train the features by pairs alone, then a head on the frozen features by cross-entropy (Khosla et al. 2020).

    Both stages run with the settings of the run; in the second the backbone stays in ``eval()`` mode. It needs a model
    with a ``backbone`` and a ``head``. Class frequencies play no part. Only :func:`mr2_core.training.fit` provides the
    first stage: the loss itself is cross-entropy.

    Parameters
    ----------
    first_epochs : int
        Of the first stage.
    temperature, width
        As in :class:`SupCon`.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, first_epochs: int, **changes):
        super().__init__(num_classes, feature_dim)
        check_integer("first_epochs", first_epochs, 1)
        self.first_epochs, self.changes = first_epochs, changes
        Contrastive(num_classes, feature_dim, **changes)  # refuses what it does not know now, not after the start

    def begin(self, model, loader, first_stage) -> None:
        """Train the backbone, and freeze it."""
        if first_stage:
            model.head.requires_grad_(False)  # no pair reaches it, which processes that average gradients must know
            first_stage(model, Contrastive(self.num_classes, self.feature_dim, **self.changes), self.first_epochs)
            model.head.requires_grad_(True)
        self.begin_epoch(model)

    def begin_epoch(self, model, *_) -> None:
        """Freeze the backbone again, which an evaluation has put into the model's mode."""
        model.backbone.eval().requires_grad_(False)


class Center(Baseline):
    r"""Cross-entropy, plus features pulled towards the centre of their class (Wen et al. 2016, equations 2 to 5).

    .. math:: \ell(z, y) + \frac{\lambda}{2}\,\lVert\varphi-c_y\rVert^2, \qquad
        c_k' = c_k - \alpha\,\frac{\sum_{i:\,y_i=k}(c_k-\varphi_i)}{1+|\{i: y_i=k\}|}

    The centres start at 0 and move after the loss was taken, in ``train()`` mode. Class frequencies only set how fast
    they move: balanced data change nothing.

    Parameters
    ----------
    representation_weight : float
        λ ≥ 0; 0.003 in the paper.
    alpha : float
        α in [0, 1]; 0.5 in the paper.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, representation_weight: float = 0.003, alpha: float = 0.5):
        super().__init__(num_classes, feature_dim)
        self.representation_weight = check_number("representation_weight", representation_weight, "[0, inf)")
        self.alpha = check_number("alpha", alpha, "[0, 1]")
        self.register_buffer("centres", torch.zeros(num_classes, feature_dim))

    def forward(self, logits: Tensor, features: Tensor, labels: Tensor) -> MR2Output:
        """Return both terms, half the squared distance as ``representation``."""
        check_rows("features", features, len(logits), self.feature_dim)
        loss = super().forward(logits, features, labels).logit
        offset = wide(features) - self.centres[labels]
        if self.training:
            sums = joined(class_sums(offset.detach(), labels, self.num_classes))
            counts = joined(class_sums(offset.new_ones(len(labels)), labels, self.num_classes))
            self.centres += (self.alpha * sums / (1 + counts)[:, None]).to(self.centres.dtype)
        distance = offset.square().sum(dim=1).mean() / 2
        return MR2Output(loss + self.representation_weight * distance, loss, distance)


# Distributionally robust optimisation


class GroupDRO(Baseline):
    r"""Minimise the worst mixture of group losses, with classes as groups (Sagawa et al. 2020, Algorithm 1).

    .. math:: \sum_k q_k\,\bar\ell_k, \qquad q_k' \propto q_k\,e^{\eta\bar\ell_k}

    with the mean loss :math:`\bar\ell_k` of a class in the batch, 0 where it is absent, and q taken after its update,
    which happens in ``train()`` mode. On balanced data it still differs from ERM: q follows the losses, whatever the
    frequencies. The paper's adjustment for the size of a group is then the same for all and cancels, so it is left out.

    Parameters
    ----------
    step : float
        η ≥ 0; 0.01 in the paper. 0 weighs all classes alike.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, step: float = 0.01):
        super().__init__(num_classes, feature_dim)
        self.step = check_number("step", step, "[0, inf)")
        self.register_buffer("shares", torch.full((num_classes,), 1 / num_classes))

    def combine(self, each: Tensor, labels: Tensor) -> Tensor:
        """Mixture of the class means, after a step of exponentiated gradient ascent."""
        means = class_means(each, labels, self.num_classes)
        if self.training:
            joint = joined(means.detach().clone()) / processes()
            self.shares.copy_((self.shares.log() + self.step * joint).softmax(dim=0))
        return (self.shares.clone() * means).sum()


class CVaR(Baseline):
    r"""Conditional value at risk: the mean of the worst share α of the batch's losses (Levy et al. 2020).

    .. math:: \sup_q \sum_i q_i\ell_i, \qquad 0\le q_i\le\frac{1}{\alpha B}, \qquad \sum_i q_i = 1

    Classes play no part: balanced data change nothing.

    Parameters
    ----------
    alpha : float
        α in (0, 1]; 1 is ERM.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, alpha: float = 0.1):
        super().__init__(num_classes, feature_dim)
        self.alpha = check_number("alpha", alpha, "(0, 1]")

    def combine(self, each: Tensor, labels: Tensor) -> Tensor:
        """Mean of the αB largest losses, the last of them in part."""
        return weighted_sum(each, lambda losses: worst_share(losses, self.alpha))


class ChiSquare(Baseline):
    r"""The worst re-weighting of the batch within a χ² ball about equal weights (Levy et al. 2020).

    .. math:: \sup_q \sum_i q_i\ell_i, \qquad \frac{1}{2B}\sum_i(Bq_i-1)^2\le\rho, \qquad q_i\ge0, \qquad
        \sum_i q_i = 1

    The solution has :math:`q_i\propto(\ell_i-\eta)_+`, with an η found by bisection. Classes play no part: balanced
    data change nothing.

    Parameters
    ----------
    radius : float
        ρ ≥ 0; 1 in the paper. 0 is ERM.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, radius: float = 1.0):
        super().__init__(num_classes, feature_dim)
        self.radius = check_number("radius", radius, "[0, inf)")

    def combine(self, each: Tensor, labels: Tensor) -> Tensor:
        """Weighted sum; the weights, which maximise it, are constants to the gradient."""
        return weighted_sum(each, lambda losses: worst_case_weights(losses, self.radius))


def worst_share(losses: Tensor, alpha: float) -> Tensor:
    """Weights [B] of the largest αB of losses [B], the last of them in part; they add up to 1."""
    rank = losses.argsort(descending=True, stable=True).argsort()
    parts = (alpha * len(losses) - rank).clamp(0, 1)
    return parts / parts.sum()


def worst_case_weights(losses: Tensor, radius: float) -> Tensor:
    """Weights [B] in the χ² ball of a radius for which the weighted sum of losses [B] is largest."""
    if radius == 0:
        return torch.full_like(losses, 1 / len(losses))
    values = losses.double()

    def weights(eta):
        excess = (values - eta).clamp(min=0)
        return excess / excess.sum()

    # No weight is 0 at the lower end, which lies in the ball or on its edge; at the upper end there is no weight left.
    high = values.max()
    low = torch.minimum(values.min(), values.mean() - values.std(correction=0) / (2 * radius) ** 0.5)
    low = low - torch.finfo(losses.dtype).eps * (1 + high.abs())
    for _ in range(40):
        middle = (low + high) / 2
        inside = len(values) * weights(middle).square().sum() <= 1 + 2 * radius
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return weights(low).to(losses.dtype)


class FairDRO(Baseline):
    r"""Weigh groups so that the gaps between their errors are penalised (Jung et al. 2023), with classes as groups.

    .. math:: \sum_k q_k\,\bar\ell_k, \qquad q \leftarrow q + \eta_t(q^*-q), \qquad
        q^*_k = \frac1K + \sqrt{\frac{2\rho}{K}}\,\frac{e_k-\bar e}{\lVert e-\bar e\rVert}

    with the mean loss of a class in the batch, 0 where it is absent. The target :math:`q^*` is the worst case in a χ²
    ball of radius ρ for the 0–1 errors :math:`e_k` on the training set, of which :math:`q^*\cdot e` is the mean plus
    :math:`\sqrt{2\rho}` standard deviations; as in the authors' code a weight may be negative. After each epoch q moves
    towards it, by a step that falls linearly from 1 to 2/E in E epochs. A negative weight asks for errors, and can
    drive the loss below all bounds; up to :math:`\rho = 1/(2K)` there is none, whatever the errors. The paper weighs
    sensitive groups within each class; where classes are the groups only the weighting is left. On balanced data it
    still differs from ERM: q follows the errors, whatever the frequencies. Only :func:`mr2_core.training.fit` updates
    q: without it classes weigh alike.

    Parameters
    ----------
    radius : float
        ρ ≥ 0; 0.5 in the authors' code, tuned in the paper. 0 weighs all classes alike.
    """

    def __init__(self, num_classes: int, feature_dim: int, *, radius: float = 0.5):
        super().__init__(num_classes, feature_dim)
        self.radius = check_number("radius", radius, "[0, inf)")
        self.register_buffer("weights", torch.full((num_classes,), 1 / num_classes))

    def begin_epoch(self, model, loader, epoch: int, epochs: int) -> None:
        """Move the weights towards the best response to the errors of the epoch that has ended."""
        if epoch > 0:
            errors = class_means(misclassified(model, loader).float(), loader.labels, self.num_classes)
            self.weights += (1 - (epoch - 1) / epochs) * (self.best_response(errors) - self.weights)

    def best_response(self, errors: Tensor) -> Tensor:
        """q* [K] for errors [K]."""
        centred = errors - errors.mean()
        direction = centred / centred.norm().clamp(min=torch.finfo(errors.dtype).tiny)
        return 1 / len(errors) + (2 * self.radius / len(errors)) ** 0.5 * direction

    def combine(self, each: Tensor, labels: Tensor) -> Tensor:
        """Weighted sum of the class means."""
        return (self.weights * class_means(each, labels, self.num_classes)).sum()


# What they share


def single(loss: Tensor) -> MR2Output:
    """One loss on the logits, without a representation term."""
    return MR2Output(loss, loss, torch.zeros_like(loss))


def wide(values: Tensor) -> Tensor:
    """Float32 or wider, whatever autocast made."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def class_sums(rows: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Sum of the rows of each class: [B, ...] → [K, ...]."""
    return rows.new_zeros(num_classes, *rows.shape[1:]).index_add(0, labels, rows)


def class_means(each: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Mean of each class, [B] → [K]; 0 for one that is absent.

    In a process group the counts are those of the whole batch, and the mean over the processes is the mean of a class.
    """
    counts = joined(class_sums(torch.ones_like(each), labels, num_classes))
    return processes() * class_sums(each, labels, num_classes) / counts.clamp(min=1)


def weighted_sum(each: Tensor, weights) -> Tensor:
    """Sum of losses [B] times the weights that a function finds for them, which are constants to the gradient.

    In a process group it is shown the losses of all, and the mean over the processes, as of gradients, is the sum.
    """
    losses = each.detach()
    if processes() == 1:
        return (weights(losses) * each).sum()
    parts = [torch.empty_like(losses) for _ in range(processes())]
    torch.distributed.all_gather(parts, losses)
    mine = weights(torch.cat(parts)).view(len(parts), -1)[torch.distributed.get_rank()]
    return len(parts) * (mine * each).sum()


def joined(sums: Tensor) -> Tensor:
    """Add up, in place, what the processes of a group hold."""
    if processes() > 1:
        torch.distributed.all_reduce(sums)
    return sums


def processes() -> int:
    """Processes of the group; 1 without one."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if group else 1


@torch.no_grad()
def misclassified(model: nn.Module, loader) -> Tensor:
    """Which training examples the model gets wrong in ``eval()`` mode, not augmented: bool [N]."""
    was_training = model.training
    model.eval()
    predictions = torch.cat([model(images)[0].argmax(dim=1) for images in loader.in_order()])
    model.train(was_training)
    return predictions != loader.labels


def class_counts(counts, num_classes: int) -> Tensor:
    """Training examples of each class, float64 [K]; one each by default."""
    if counts is None:
        return torch.ones(num_classes, dtype=torch.float64)
    counts = torch.as_tensor(counts, dtype=torch.float64)
    if counts.shape != (num_classes,) or not ((counts > 0) & counts.isfinite()).all():
        raise ValueError(f"counts is {counts.tolist()}; expected {num_classes} positive numbers, one a class.")
    return counts


def frequencies(counts, num_classes: int) -> Tensor:
    """π_k, float64 [K]."""
    counts = class_counts(counts, num_classes)
    return counts / counts.sum()


def effective_number_weights(counts: Tensor, beta: float) -> Tensor:
    """(1 − β)/(1 − β^n) of counts [K], over their mean, as float32."""
    check_number("beta", beta, "[0, 1)")
    weights = (1 - beta) / (1 - beta**counts)
    return (weights / weights.mean()).float()
