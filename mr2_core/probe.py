"""The probe lab: heads on frozen features, solved to their optimum, several at once, or trained with any method."""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mr2_core.data import DataError, load_features, subset_per_class
from mr2_core.methods import build_method
from mr2_core.metrics import ClassReport
from mr2_core.models import Classifier
from mr2_core.statistics import extremes, kind
from mr2_core.training import BatchLoader, Settings, fit, share, stream

HEADS = ("linear", "cosine")
METHODS = ("erm", "uniform", "mr2", "mr2-weighted", "mr2-placebo")
VOID = ("representation_weight", "representation", "warmup", "decay")
LOGITS_IN_CACHE = 2_000_000
OF_FEATURES = ("supcon", "supcon-two-stage", "center")


@dataclasses.dataclass(frozen=True)
class ProbeSettings:
    """How a head is trained in a study; ``training`` of a study whose model is ``probe``.

    Attributes
    ----------
    weight_decay : float or tuple of float
        α of :func:`mr2_core.probe.fit_probe`. Several are the trials of a tuning study, judged on validation images.
    tolerance : float
        As in :func:`mr2_core.probe.fit_probe`.

    Raises
    ------
    ValueError
        If a weight decay or the tolerance is no positive, finite number.
    """

    weight_decay: float | tuple[float, ...]
    tolerance: float = 1e-4

    def __post_init__(self):
        _check_trials(self.weight_decay, self.tolerance)


@dataclasses.dataclass(frozen=True)
class TrainedProbeSettings(Settings):
    """How a head is trained in a study whose model is ``probe-sgd``: as a network is, features being its images.

    Attributes
    ----------
    weight_decay : float or tuple of float
        Several are the trials of a tuning study, as in :class:`ProbeSettings`.

    Raises
    ------
    ValueError, TypeError
        If a value is unknown or out of range, or images would be augmented.
    """

    weight_decay: float | tuple[float, ...] = 5e-3
    precision: str = "float32"
    augment: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.augment:
            raise ValueError(f"augment holds {', '.join(self.augment)}; expected nothing: features are no images.")

    def check_weight_decay(self) -> None:
        """Refuse what is no positive number, or holds another."""
        _check_trials(self.weight_decay)


PROBES = {"probe": ProbeSettings, "probe-sgd": TrainedProbeSettings}


def _check_trials(weight_decay, *others) -> None:
    trials = weight_decay if isinstance(weight_decay, list | tuple) else [weight_decay]
    for value in (*trials, *others):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"weight_decay or tolerance holds {value!r}; expected positive, finite numbers.")


class Probe(NamedTuple):
    """Solved heads; without the leading R where everything given was of one run.

    Attributes
    ----------
    weight, bias : Tensor
        [R, K, D] and [R, K]; a cosine head has rows of one norm, its scale, and no bias.
    iterations : int
        Steps until the last run was solved.
    """

    weight: Tensor
    bias: Tensor
    iterations: int

    def logits(self, features: Tensor) -> Tensor:
        """Map features [M, D] or [R, M, D] to logits [R, M, K]; test-time logits know no margins."""
        return features @ self.weight.mT + self.bias[..., None, :]

    def predict(self, features: Tensor) -> Tensor:
        """Map features to classes [R, M]."""
        return self.logits(features).argmax(dim=-1)


def exact_margins(
    method: str, features: Tensor, labels: Tensor, num_classes: int, *, seed: int = 0, **hyperparameters
) -> tuple[Tensor, Tensor]:
    """Margins of a method from the exact statistics of the training features.

    Parameters
    ----------
    method : str
        One of ``METHODS``, as in :func:`mr2_core.methods.build_method`.
    features, labels : Tensor
        [M, D] and [M]: what the head will be trained on.
    num_classes : int
        The number of classes, K.
    seed : int
        Of the placebo's permutation.
    **hyperparameters
        Of the method, such as ``statistic``, ``exponent`` and ``p``.

    Returns
    -------
    margins, class_weights : Tensor
        [K] each: γ, and what an example of each class counts, γ/c̄ for the weighted method and 1 for the others.

    Raises
    ------
    ValueError, TypeError
        If the method is none of these, on hyperparameters that it does not have or that frozen features make void, and
        on wrong shapes, types or values.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; the probe knows {', '.join(METHODS)}.")
    if void := set(VOID) & set(hyperparameters):
        raise ValueError(f"a probe has no {', '.join(sorted(void))}: its features are frozen and its statistics exact.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, "method").initial_seed())
        loss = build_method(method, num_classes, features.shape[-1], **hyperparameters).to(features.device)
    ones = features.new_ones(num_classes)
    if method == "erm":
        return ones, ones
    loss.warmup = 0
    loss.statistics.update(features, labels)  # a first batch sets the state, so the whole sample as one batch is exact
    margins = loss.margins.to(features)
    return margins, margins / loss.mean_margin if method == "mr2-weighted" else ones


def fit_probe(
    features: Tensor,
    labels: Tensor,
    margins: Tensor,
    weight_decay: float | Tensor,
    *,
    class_weights: Tensor | None = None,
    head: str = "linear",
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
) -> Probe:
    r"""Train heads on frozen features until the gradient vanishes.

    .. math::

        \min_{W, b}\; \frac1M \sum_i \omega_{y_i}\, \ell_\gamma(W\varphi_i + b,\, y_i)
        + \frac\alpha2 \lVert W\rVert_F^2, \qquad \ell_\gamma(z, y) = -\ln\,\mathrm{softmax}_y(z/\gamma_y)

    For a linear head this is convex, and without margins and weights it is scikit-learn's ``LogisticRegression`` with
    ``C = 1 / (weight_decay * M)``. A cosine head has no bias, and rows of one norm, which is its scale: the same
    penalty, on another set of matrices, which is not convex. It starts from the class means.

    Any argument may have a leading R, the number of runs that are solved together; what has none is shared by all.

    Parameters
    ----------
    features : Tensor
        [M, D] or [R, M, D], float32 or float64; unit rows for a cosine head.
    labels : Tensor
        [M] or [R, M], int64; every class occurs.
    margins : Tensor
        [K] or [R, K]: γ, positive.
    weight_decay : float or Tensor
        Scalar or [R]: α > 0; with 0 separable classes would have no optimum.
    class_weights : Tensor, optional
        [K] or [R, K]: ω, what an example of each class counts; 1 by default.
    head : {"linear", "cosine"}
    tolerance : float
        A run is solved once the norm of its gradient has fallen to this share of what it was at the start.
    max_iterations : int
        Steps after which to give up.

    Returns
    -------
    Probe

    Raises
    ------
    ValueError, TypeError
        On wrong shapes, types or values.
    FloatingPointError
        If a run is not solved after ``max_iterations``.
    """
    *problems, single = _checked(features, labels, margins, weight_decay, class_weights, head)
    runs, size = problems[1].shape
    # A processor needs about half the time while the logits of the runs that are solved together stay in its cache.
    group = runs if problems[0].is_cuda else max(1, LOGITS_IN_CACHE // (size * problems[2].shape[1]))
    groups = zip(*(part.split(group) for part in problems), strict=True)
    weights, biases, iterations = zip(*(_solve(*one, head, tolerance, max_iterations) for one in groups), strict=True)
    weight, bias = torch.cat(weights), torch.cat(biases)
    return Probe(weight[0], bias[0], iterations[0]) if single else Probe(weight, bias, max(iterations))


def _solve(features, labels, margins, decay, class_weights, head, tolerance, max_iterations) -> Probe:
    """Solve runs side by side: :func:`fit_probe` on what :func:`_checked` returned, or some of its runs."""
    runs, size, width = features.shape
    num_classes = margins.shape[1]
    # z/γ_y is linear in (W, b), so the margins can go into the features, and the bias is the weight of a constant 1.
    inputs = torch.cat([features, features.new_ones(runs, size, 1)], dim=2) if head == "linear" else features
    inputs = inputs / margins.gather(1, labels)[..., None]
    importance = class_weights.gather(1, labels)
    penalised = torch.ones_like(inputs[0, 0])
    penalised[width:] = 0

    def on_the_head(flat):
        rows = flat.view(runs, num_classes, -1)
        if head == "linear":
            return rows
        scale = rows.square().sum(dim=2).mean(dim=1).sqrt()
        return scale[:, None, None] * F.normalize(rows, dim=2)

    def objective(flat):
        weight = on_the_head(flat)
        logits = inputs @ weight.mT
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(runs, size)
        return (importance * each).mean(dim=1) + decay / 2 * (penalised * weight.square()).sum(dim=(1, 2))

    # At W = 0 every class has probability 1/K, and up to what the classes share the Hessian is this for each of them.
    curvature = (inputs.mT * importance[:, None]) @ inputs / (size * num_classes)
    # With fewer images than features it is singular, and rounding moves its eigenvalues by a share of their sum.
    smallest = 10 * torch.finfo(features.dtype).eps * curvature.diagonal(dim1=1, dim2=2).sum(dim=1)
    factor = torch.linalg.cholesky(curvature + torch.diag_embed(decay[:, None] * penalised + smallest[:, None]))

    def precondition(flat):
        return torch.cholesky_solve(flat.view(runs, num_classes, -1).mT, factor).mT.reshape(runs, -1)

    start = features.new_zeros(runs, num_classes, inputs.shape[2])
    if head == "cosine":
        start.scatter_reduce_(1, labels[..., None].expand_as(features), features, "mean", include_self=False)
        start = F.normalize(start - start.mean(dim=1, keepdim=True), dim=2)
    solution, iterations = minimise(objective, start.flatten(1), precondition, tolerance, max_iterations)
    weight = on_the_head(solution)
    bias = weight[..., width] if head == "linear" else torch.zeros_like(weight[..., 0])
    return Probe(weight[..., :width], bias, iterations)


def minimise(
    objective, start: Tensor, precondition, tolerance: float, max_iterations: int, memory: int = 20
) -> tuple[Tensor, int]:
    """Minimise several functions at once by L-BFGS (Nocedal 1980), each with steps and a history of its own.

    Parameters
    ----------
    objective : callable
        Points [R, P] → values [R], differentiable.
    start : Tensor
        [R, P].
    precondition : callable
        Gradients [R, P] → steps [R, P]: a first guess of the inverse Hessian.
    tolerance, max_iterations
        As in :func:`fit_probe`.
    memory : int
        Pairs of steps and changes of the gradient that are remembered.

    Returns
    -------
    Tensor
        [R, P].
    int
        Number of steps.
    """

    def dot(a, b):
        return (a * b).sum(dim=1, keepdim=True)

    def look(x):
        x = x.detach().requires_grad_()
        values = objective(x)
        (gradient,) = torch.autograd.grad(values.sum(), x)
        return values.detach()[:, None], gradient

    rounding = 10 * torch.finfo(start.dtype).eps
    x, pairs, scale = start, [], 1.0
    value, gradient = look(x)
    goal = tolerance * gradient.norm(dim=1, keepdim=True)
    for iteration in range(max_iterations):
        solved = gradient.norm(dim=1, keepdim=True) <= goal
        if solved.all():
            return x, iteration
        step, shares = -gradient, []
        for s, y, inverse in reversed(pairs):
            shares.append(dot(s, step) * inverse)
            step = step - shares[-1] * y
        step = scale * precondition(step)
        for s, y, inverse in pairs:
            step = step + (shares.pop() - dot(y, step) * inverse) * s
        step = torch.where(solved, 0, step)  # a run that is solved stays where it is
        slope = dot(gradient, step)
        for _ in range(30):
            new_value, new_gradient = look(x + step)
            # Armijo's rule; where the values' rounding hides the decrease, the slopes decide (Hager & Zhang 2005).
            decrease = new_value - value <= 1e-4 * slope
            level = new_value - value <= rounding * value.abs()
            good = decrease | (level & (dot(new_gradient, step) <= -0.8 * slope))
            if good.all():
                break
            step, slope = (torch.where(good, part, part / 2) for part in (step, slope))
        else:
            new_value, new_gradient = look(x + step)  # at the step that is taken
        change = new_gradient - gradient
        bend = dot(step, change)
        curved = bend > rounding * step.norm(dim=1, keepdim=True) * change.norm(dim=1, keepdim=True)
        pairs = [*pairs, (step, change, torch.where(curved, 1 / bend, 0))][-memory:]
        scale = torch.where(curved, bend / dot(change, precondition(change)), scale)
        x, value, gradient = x + step, new_value, new_gradient
    left = (gradient.norm(dim=1, keepdim=True) / goal * tolerance).max().item()
    raise FloatingPointError(
        f"after {max_iterations} steps a gradient is still {left:.1e} of what it was at the start, expected at most "
        f"{tolerance:.1e}: take float64 features, a larger tolerance or more weight decay, or allow more steps."
    )


class FeatureLoader(BatchLoader):
    """Shuffled batches of feature rows [N, D] in place of images; nothing is augmented.

    Parameters
    ----------
    features, labels : Tensor
        [N, D] and int64 [N], on the device to train on.
    batch_size, seed : int
        As in :class:`mr2_core.training.BatchLoader`.
    """

    def __init__(self, features: Tensor, labels: Tensor, *, batch_size: int, seed: int = 0):
        self.features, self.labels, self.device, self.seed = features, labels, features.device, seed
        self.batch_size = min(batch_size, len(labels))
        self.share = share(self.batch_size)

    def epoch(self, epoch: int, start: int = 0, view: int = 0):
        """Yield the batches of one epoch from batch ``start`` on; all views are alike."""
        for chosen in self.order(epoch, start):
            yield self.features[chosen], self.labels[chosen]

    def in_order(self):
        """Yield every row once, in the order of ``labels``."""
        return iter(self.features.split(self.batch_size))


def train_probe(
    features: Tensor, labels: Tensor, num_classes: int, method: str, settings: Settings, *, seed: int = 0, **options
) -> Probe:
    """Train a linear head on frozen features by the loop that trains networks, with any method that acts on the head.

    :func:`fit_probe` finds an optimum, which methods do not have that draw at random, look at a batch at a time, or
    change their weights as they go.

    Parameters
    ----------
    features, labels : Tensor
        [M, D] and int64 [M].
    num_classes : int
        The number of classes, K.
    method : str
        As in ``mr2_core.methods``.
    settings : Settings
        Of :func:`mr2_core.training.fit`.
    seed : int
        Of the initial head, the order of the rows, and what the method draws.
    **options
        Hyperparameters of the method.

    Raises
    ------
    ValueError
        If the method does nothing but move features.
    """
    if method in OF_FEATURES:
        raise ValueError(f"method {method!r} differs from erm in what it does to features, which are frozen here.")
    torch.manual_seed(stream(seed, "initialisation").initial_seed())
    model = Classifier(nn.Identity(), nn.Linear(features.shape[1], num_classes))
    torch.manual_seed(stream(seed, "method").initial_seed())
    loss = build_method(method, num_classes, features.shape[1], labels=labels.cpu(), **options)
    loader = FeatureLoader(features, labels, batch_size=settings.batch_size, seed=seed)
    history = fit(model, loss, loader, settings, progress=False)
    return Probe(model.head.weight.detach(), model.head.bias.detach(), len(history) * len(loader))


def run_probe(configuration: dict, device: str = "cpu") -> tuple[dict, dict | None]:
    """Do one run of a study whose ``model`` is a probe and whose ``dataset`` is ``features:<name>``.

    Training images are ``per_class`` a class, drawn anew for each seed: a convex problem has no other seed. With the
    model ``probe``, :func:`fit_probe` takes margins from their exact statistics, and under a cosine head all features
    are unit vectors; with ``probe-sgd``, :func:`train_probe` trains a linear head with any method.

    Parameters
    ----------
    configuration : dict
        Of a :class:`mr2_core.studies.Run`.
    device : str

    Returns
    -------
    record : dict
        ``margins`` of ``probe``, ``trials`` (weight decay and validation accuracy of each), ``validation_by_class`` of
        the best, ``train_accuracy``, and unless the study is one of tuning, ``test_by_class``.
    arrays : dict or None
        ``label`` and ``prediction`` of the test images, sorted by class, which compresses them to a quarter; None when
        tuning, which never reads them.

    Raises
    ------
    DataError
        If the features are missing, or have no validation rows.
    ValueError
        If the head is not linear under ``probe-sgd``, or there are several weight decays outside a tuning study.
    """
    c, settings = configuration, PROBES[configuration["model"]](**configuration["training"])
    if c["model"] == "probe-sgd" and c["head"] != "linear":
        raise ValueError(f"head is {c['head']!r}; the model probe-sgd has a linear one.")
    data = load_features(c["dataset"].removeprefix("features:"))
    if "x_validation" not in data:
        raise DataError(
            f"{c['dataset']} has no validation rows; expected x_validation and y_validation beside those of train and "
            "test: take some of the training rows out and write them to the file under these names."
        )
    num_classes = len(data["class_names"])
    if not isinstance(settings.weight_decay, list | tuple):
        decays = [settings.weight_decay]
    elif c["kind"] == "tuning":
        decays = settings.weight_decay
    else:
        raise ValueError(f"weight_decay is {settings.weight_decay}; only a tuning study may have several.")

    def part(split, chosen=slice(None)):
        features = torch.from_numpy(data[f"x_{split}"][chosen]).to(device)
        labels = torch.from_numpy(data[f"y_{split}"][chosen].astype(np.int64)).to(device)
        return F.normalize(features, dim=1) if c["head"] == "cosine" else features, labels

    def report(probe, features, labels):
        return ClassReport(labels, probe.predict(features), num_classes)

    count = c["per_class"]
    chosen = subset_per_class(data["y_train"], count, seed=c["seed"]) if count else slice(None)
    train, validation = part("train", chosen), part("validation")
    method, options = c["method"], {"seed": c["seed"]} | c["hyperparameters"]
    record = {}
    if c["model"] == "probe":
        margins, weights = exact_margins(method, *train, num_classes, **options)
        record = {"margins": margins.double().round(decimals=4).tolist()}
        probes = [
            fit_probe(*train, margins, decay, class_weights=weights, head=c["head"], tolerance=settings.tolerance)
            for decay in decays
        ]
    else:
        each = [dataclasses.replace(settings, weight_decay=decay) for decay in decays]
        probes = [train_probe(*train, num_classes, method, one, **options) for one in each]
    reports = [report(probe, *validation) for probe in probes]
    best = max(range(len(decays)), key=lambda i: reports[i].accuracy)
    record |= {
        "trials": [
            {"weight_decay": decay, "validation_accuracy": r.accuracy} for decay, r in zip(decays, reports, strict=True)
        ],
        "validation_by_class": reports[best].by_class.tolist(),
        "train_accuracy": report(probes[best], *train).accuracy,
    }
    if c["kind"] == "tuning":
        return record, None
    features, labels = part("test", np.argsort(data["y_test"], kind="stable"))
    prediction = probes[best].predict(features)
    record["test_by_class"] = ClassReport(labels, prediction, num_classes).by_class.tolist()
    small = np.min_scalar_type(num_classes - 1)
    return record, {name: v.cpu().numpy().astype(small) for name, v in (("label", labels), ("prediction", prediction))}


def _checked(features, labels, margins, weight_decay, class_weights, head):
    """All arguments with their leading R, in the features' type, and whether it was added."""
    if head not in HEADS:
        raise ValueError(f"head is {head!r}; expected one of {', '.join(HEADS)}.")
    if not isinstance(features, Tensor) or features.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"features has type {kind(features)}; expected float32 or float64, [M, D] or [R, M, D].")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        raise TypeError(f"labels has type {kind(labels)}; expected class indices, an int64 tensor [M] or [R, M].")
    if not isinstance(margins, Tensor) or not margins.is_floating_point():
        raise TypeError(f"margins has type {kind(margins)}; expected a floating-point tensor [K] or [R, K].")
    decay = torch.as_tensor(weight_decay).to(features)
    class_weights = torch.ones_like(margins) if class_weights is None else class_weights
    given = {
        "features": (features, 2, "[M, D] or [R, M, D]"),
        "labels": (labels, 1, "[M] or [R, M]"),
        "margins": (margins.to(features), 1, "[K] or [R, K]"),
        "weight_decay": (decay, 0, "a number or [R]"),
        "class_weights": (class_weights.to(features), 1, "[K] or [R, K]"),
    }
    runs = {len(value) for value, axes, _ in given.values() if value.ndim == axes + 1} or {1}
    for name, (value, axes, expected) in given.items():
        if value.ndim not in (axes, axes + 1) or len(runs) > 1:
            shapes = ", ".join(f"{other} {list(tensor.shape)}" for other, (tensor, *_) in given.items())
            raise ValueError(f"{name} has shape {list(value.shape)}; expected {expected} with one R among {shapes}.")
    single = all(value.ndim == axes for value, axes, _ in given.values())
    (runs,) = runs
    full = [value.expand(runs, *value.shape[value.ndim - axes :]) for value, axes, _ in given.values()]
    features, labels, margins, decay, class_weights = full
    if labels.shape[1] != features.shape[1] or class_weights.shape != margins.shape:
        raise ValueError(
            f"labels has shape {list(labels.shape)} and class_weights {list(class_weights.shape)}; expected as many "
            f"labels as the {features.shape[1]} rows of features and as many weights as the {margins.shape[1]} margins."
        )
    for name, value in (("margins", margins), ("weight_decay", decay), ("class_weights", class_weights)):
        if (found := extremes(value)) and not 0 < found[0] <= found[1] < torch.inf:
            raise ValueError(f"{name} lies in {found[0]} … {found[1]}; expected positive, finite numbers.")
    if (found := extremes(features)) and not -torch.inf < found[0] <= found[1] < torch.inf:
        raise ValueError("features holds NaN or infinite values; expected finite ones.")
    if labels.min() < 0 or labels.max() >= margins.shape[1]:
        raise ValueError(
            f"labels lie in {labels.min()} … {labels.max()}; expected 0 … {margins.shape[1] - 1}, as there are "
            f"{margins.shape[1]} margins."
        )
    for run, row in enumerate(labels):
        count = row.bincount(minlength=margins.shape[1])
        if count.min() == 0:
            raise ValueError(f"class {count.argmin()} has no example in run {run}; expected some of each class.")
    lengths = torch.linalg.vector_norm(features, dim=-1)
    if head == "cosine" and (lengths - 1).abs().max() > 1e-3:
        raise ValueError(
            f"features have lengths {lengths.min():.3g} … {lengths.max():.3g}; a cosine head expects unit vectors: "
            "pass torch.nn.functional.normalize(features, dim=-1)."
        )
    return features, labels, margins, decay, class_weights, single
