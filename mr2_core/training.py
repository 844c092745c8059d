"""One training loop for every method: batches made on the device, checkpoints, exact resumption."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

# Mean and standard deviation of CIFAR-100's training pixels by channel, on the scale 0 … 1; tests recompute them.
CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)

STREAMS = {"initialisation": 0, "order": 1, "augmentation": 2, "method": 3}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a network is trained; everything but the data, the model and the method.

    Attributes
    ----------
    optimizer : {"sgd", "adamw"}
        SGD with Nesterov momentum, or AdamW.
    learning_rate : float
        Peak of a linear warm-up over ``warmup_epochs`` followed by a half cosine to 0, set at every step.
    clip : float
        Largest norm of the whole gradient; 0 leaves it alone.
    precision : {"float32", "bf16", "fp16"}
        What autocast computes in; parameters and statistics stay float32.
    augment : tuple of str
        Any of ``crop`` (4 pixels of zero padding), ``flip``, ``cutout`` (a square of a quarter of the width).
    """

    epochs: int = 20
    batch_size: int = 256
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    momentum: float = 0.9
    warmup_epochs: float = 1.0
    clip: float = 0.0
    precision: str = "bf16"
    augment: tuple[str, ...] = ("crop", "flip")
    compile: bool = False

    def __post_init__(self):
        object.__setattr__(self, "augment", tuple(self.augment))
        for name, allowed in (("optimizer", ("sgd", "adamw")), ("precision", ("float32", "bf16", "fp16"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")
        for name in ("epochs", "batch_size", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number.")
        unknown = set(self.augment) - {"crop", "flip", "cutout"}
        if unknown:
            raise ValueError(f"augment holds {', '.join(sorted(unknown))}; expected any of crop, flip, cutout.")


def stream(seed: int, name: str, *position: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator for one purpose at one place of a run: arms of one seed stay paired, and nothing needs saving."""
    state = np.random.SeedSequence([seed, STREAMS[name], *position]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


class BatchLoader:
    """Shuffled, augmented, normalised batches from uint8 images kept on the device.

    Parameters
    ----------
    images : array
        uint8 [N, H, W, C].
    labels : array
        int64 [N].
    batch_size : int
        The last batch of an epoch is dropped when it is smaller, unless it is the only one.
    augment : tuple of str
        As in :class:`Settings`.
    seed : int
        Of the order and the augmentation; both are functions of (seed, epoch, step).
    mean, std : tuple of float
        By channel, on the scale 0 … 1.
    """

    def __init__(
        self, images, labels, *, batch_size, augment=(), seed=0, device="cpu", mean=CIFAR100_MEAN, std=CIFAR100_STD
    ):
        if len(images) != len(labels) or len(images) == 0:
            raise ValueError(
                f"images has {len(images)} entries and labels {len(labels)}; expected as many of each, at least one."
            )
        self.device, self.seed, self.augment = torch.device(device), seed, augment
        self.batch_size = min(batch_size, len(images))
        self.height, self.width = images.shape[1:3]
        self.pad = 4 if "crop" in augment else 0
        border = ((0, 0), (self.pad, self.pad), (self.pad, self.pad), (0, 0))
        self.images = torch.from_numpy(np.pad(np.asarray(images), border)).to(self.device)
        self.labels = torch.as_tensor(np.asarray(labels), dtype=torch.int64, device=self.device)
        self.normalise = Normalise(mean, std, self.device)

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size

    def epoch(self, epoch: int, start: int = 0):
        """Yield the batches of one epoch from batch ``start`` on: images float32 [B, C, H, W] and labels [B]."""
        order = torch.randperm(len(self.labels), generator=stream(self.seed, "order", epoch)).to(self.device)
        for step in range(start, len(self)):
            chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield (
                self.augmented(chosen, stream(self.seed, "augmentation", epoch, step, device=self.device)),
                self.labels[chosen],
            )

    def augmented(self, chosen: Tensor, generator: torch.Generator) -> Tensor:
        """Crop, flip and cut out whole batches: one gather, whatever the augmentation."""

        def draw(high: int) -> Tensor:
            return torch.randint(high, (len(chosen), 1), generator=generator, device=self.device)

        rows = torch.arange(self.height, device=self.device).expand(len(chosen), -1)
        columns = torch.arange(self.width, device=self.device).expand(len(chosen), -1)
        if "flip" in self.augment:
            columns = torch.where(draw(2) == 1, columns.flip(1), columns)
        if "crop" in self.augment:
            rows, columns = rows + draw(2 * self.pad + 1), columns + draw(2 * self.pad + 1)
        batch = self.normalise(self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]])
        if "cutout" in self.augment:
            half = self.width // 8
            hole_rows = (torch.arange(self.height, device=self.device) - draw(self.height)).abs() < half
            hole_columns = (torch.arange(self.width, device=self.device) - draw(self.width)).abs() < half
            batch = batch.masked_fill((hole_rows[:, :, None] & hole_columns[:, None, :])[:, None], 0)
        return batch


def channel_moments(images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by channel of uint8 images [N, H, W, C], on the scale 0 … 1."""
    levels = np.arange(256) / 255
    shares = [np.bincount(images[..., c].ravel(), minlength=256) / images[..., c].size for c in range(images.shape[3])]
    means = [float(share @ levels) for share in shares]
    return tuple(means), tuple(
        float(share @ (levels - mean) ** 2) ** 0.5 for share, mean in zip(shares, means, strict=True)
    )


class Normalise:
    """uint8 [B, H, W, C] to standardised float32 [B, C, H, W], channels-last in memory."""

    def __init__(self, mean, std, device):
        mean, std = (torch.tensor(values, device=device) for values in (mean, std))
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def __call__(self, images: Tensor) -> Tensor:
        return (images * self.scale + self.shift).permute(0, 3, 1, 2)


def autocast(device: torch.device, precision: str):
    """The autocast context of a precision."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, kinds[precision]) if precision in kinds else contextlib.nullcontext()


@torch.no_grad()
def predict(
    model: nn.Module,
    images,
    *,
    device="cpu",
    precision="float32",
    batch_size=1000,
    mean=CIFAR100_MEAN,
    std=CIFAR100_STD,
):
    """Logits [N, K] and features [N, D], float32 arrays, of uint8 images [N, H, W, C] in ``eval()`` mode."""
    device = torch.device(device)
    was_training = model.training
    model.eval()
    normalise, outputs = Normalise(mean, std, device), []
    for start in range(0, len(images), batch_size):
        batch = normalise(torch.from_numpy(np.ascontiguousarray(images[start : start + batch_size])).to(device))
        with autocast(device, precision):
            outputs.append([part.float().cpu() for part in model(batch)])
    model.train(was_training)
    return tuple(torch.cat(parts).numpy() for parts in zip(*outputs, strict=True))


class Interrupted(KeyboardInterrupt):
    """Training stopped on a signal after its step was finished and saved."""


def fit(
    model: nn.Module,
    loss: nn.Module,
    loader: BatchLoader,
    settings: Settings,
    *,
    checkpoint: str | os.PathLike | None = None,
    after_epoch=None,
    description: str = "",
    progress: bool = True,
) -> list[dict]:
    """Train a model in place.

    Parameters
    ----------
    model : Module
        Images [B, C, H, W] to ``(logits, features)``.
    loss : Module
        ``(logits, features, labels)`` to an object with ``total``; its buffers are checkpointed with the model.
    loader : BatchLoader
        On the device to train on; the model and the loss are moved there.
    settings : Settings
        The optimiser and its schedule.
    checkpoint : path, optional
        A file written atomically after every epoch and on SIGINT or SIGTERM. Where it exists, training goes on from it,
        on a CPU with bit-equal results.
    after_epoch : callable, optional
        ``after_epoch(model, loss)`` returns a dict that is added to the epoch's record (validation, margins).

    Returns
    -------
    list of dict
        A record an epoch: ``epoch``, ``loss``, ``train_accuracy`` (on augmented batches, as they came), ``seconds`` and
        what ``after_epoch`` returned. With a checkpoint, each is also a line of ``<checkpoint>.jsonl``.

    Raises
    ------
    FloatingPointError
        If a loss is not finite: says the step, the learning rate and where the last good checkpoint lies.
    Interrupted
        After a signal, once the step is finished and saved.
    """
    device = loader.device
    model.to(device, memory_format=torch.channels_last)
    loss.to(device)
    optimizer = make_optimizer(model, loss, settings)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    forward = torch.compile(model) if settings.compile else model
    path = Path(checkpoint) if checkpoint else None
    state = {"epoch": 0, "step": 0, "loss_sum": 0.0, "correct": 0, "seconds": 0.0, "history": []}
    if path and path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        loss.load_state_dict(saved["loss"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"].cpu())
        state = saved["state"]

    def save() -> None:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".partial")
            torch.save(
                {
                    "model": model.state_dict(),
                    "loss": loss.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                    "rng": torch.get_rng_state(),
                    "state": state,
                },
                temporary,
            )
            os.replace(temporary, path)

    def check_finite(values: Tensor, rate: float) -> None:
        if not values.isfinite().all():
            kept = f"the last good checkpoint is {path}" if state["history"] and path else "there is no checkpoint yet"
            raise FloatingPointError(
                f"Training became non-finite at epoch {state['epoch']}, step {state['step']}, learning rate {rate:.3g}"
                f"; {kept}; lower the learning rate or the representation weight."
            )

    steps = len(loader)
    model.train()
    loss.train()
    bar = tqdm(
        total=settings.epochs * steps,
        initial=state["epoch"] * steps + state["step"],
        desc=description,
        unit="step",
        disable=not progress,
        mininterval=1.0,
    )
    with bar, stop_requested() as stop:
        while state["epoch"] < settings.epochs:
            begun = time.perf_counter()
            loss_sum = torch.tensor(float(state["loss_sum"]), dtype=torch.float64, device=device)
            correct = torch.tensor(state["correct"], device=device)
            for images, labels in loader.epoch(state["epoch"], state["step"]):
                rate = learning_rate(settings, state["epoch"] * steps + state["step"], steps)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                with autocast(device, settings.precision):
                    logits, features = forward(images)
                if device.type == "cpu":
                    check_finite(logits, rate)
                total = loss(logits, features, labels).total
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(total).backward()
                if settings.clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                scaler.step(optimizer)
                scaler.update()
                loss_sum += total.detach() * len(labels)
                correct += (logits.argmax(dim=1) == labels).sum()
                state["step"] += 1
                bar.update()
                # A look a step would stall an accelerator, so there it is one a hundred steps.
                if device.type == "cpu" or state["step"] % 100 == 0 or state["step"] == steps:
                    check_finite(loss_sum, rate)
                if stop.requested:
                    break
            state["loss_sum"], state["correct"] = loss_sum.item(), int(correct)
            state["seconds"] += time.perf_counter() - begun
            if state["step"] == steps:
                seen = steps * loader.batch_size
                record = {
                    "epoch": state["epoch"] + 1,
                    "loss": state["loss_sum"] / seen,
                    "train_accuracy": state["correct"] / seen,
                    "seconds": round(state["seconds"], 2),
                }
                if after_epoch:
                    record |= after_epoch(model, loss)
                state["history"].append(record)
                state |= {"epoch": state["epoch"] + 1, "step": 0, "loss_sum": 0.0, "correct": 0, "seconds": 0.0}
                bar.set_postfix(
                    {
                        name: f"{value:.3f}"
                        for name, value in record.items()
                        if isinstance(value, float) and name != "seconds"
                    }
                )
                save()
                if path:
                    with path.with_suffix(".jsonl").open("a") as log:
                        log.write(json.dumps(record) + "\n")
            if stop.requested:
                save()
                kept = (
                    f"its state is in {path}; run the same command to go on" if path else "no checkpoint was asked for"
                )
                raise Interrupted(f"Stopped at epoch {state['epoch']}, step {state['step']}; {kept}.")
    return state["history"]


def make_optimizer(model: nn.Module, loss: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimiser of the settings over the model's parameters and those of the loss, if it has any."""
    parameters = [*model.parameters(), *loss.parameters()]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            settings.learning_rate,
            settings.momentum,
            weight_decay=settings.weight_decay,
            nesterov=settings.momentum > 0,
        )
    return torch.optim.AdamW(parameters, settings.learning_rate, weight_decay=settings.weight_decay)


def learning_rate(settings: Settings, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up, then half a cosine to 0; ``step`` counts from 0 over the whole run."""
    warm, total = settings.warmup_epochs * steps_per_epoch, settings.epochs * steps_per_epoch
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return settings.learning_rate * (1 + math.cos(math.pi * (step - warm) / max(total - warm, 1))) / 2


@contextlib.contextmanager
def stop_requested():
    """Turn SIGINT, SIGTERM and an alarm into a flag while the block runs; outside the main thread, do nothing."""

    class Flag:
        requested = False

    def note(*_):
        Flag.requested = True

    previous = {}
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            previous[number] = signal.signal(number, note)
    try:
        yield Flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
