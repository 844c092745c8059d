"""One training loop for every method: batches made on the device, checkpoints, exact resumption."""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from mr2_core.statistics import check_integer, check_number

# Mean and standard deviation of CIFAR-100's training pixels by channel, on the scale 0 … 1; tests recompute them.
CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)

STREAMS = {"initialisation": 0, "order": 1, "augmentation": 2, "method": 3}
AUGMENTATIONS = ("crop", "flip", "cutout", "autoaugment")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a network is trained; everything but the data, the model and the method.

    Attributes
    ----------
    epochs, batch_size : int
        Passes over the training images, and images a step (of all processes together).
    optimizer : {"sgd", "adamw"}
        SGD with Nesterov momentum, or AdamW.
    weight_decay, momentum : float
        Of the optimiser; a weight decay of 0 is off, and AdamW takes its own momentum.
    learning_rate : float
        Peak of a linear warm-up over ``warmup_epochs`` followed by a half cosine to 0, set at every step.
    warmup_epochs : float
        Length of the warm-up, also in parts of an epoch.
    layer_decay : float
        Factor in (0, 1] by which the learning rate falls from block to block, from the output to the input, for
        fine-tuning (:func:`mr2_core.training.layer_groups`); 1 is off.
    clip : float
        Largest norm of the whole gradient, with that of the loss's own parameters; 0 leaves it alone.
    precision : {"float32", "bf16", "fp16"}
        What autocast computes in; parameters and statistics stay float32. On a processor without instructions for the
        two narrow types numbers are rounded alike; convolutional networks then take as long as in float32.
    augment : tuple of str
        Any of ``crop`` (4 pixels of zero padding), ``flip``, ``cutout`` (a square of a quarter of the width) and
        ``autoaugment``, the policy that Cubuk et al. (2019) found for CIFAR: before each epoch the images are dealt
        into 400 random parts, and those of a part share their sub-policy, which saves nearly all of its cost.
    compile : bool
        Whether ``torch.compile`` prepares the model.

    Raises
    ------
    ValueError, TypeError
        If a value is unknown or out of range.
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
    layer_decay: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "augment", tuple(self.augment))
        for name, allowed in (("optimizer", ("sgd", "adamw")), ("precision", ("float32", "bf16", "fp16"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")
        for name in ("epochs", "batch_size"):
            check_integer(name, getattr(self, name), 1)
        for name in ("momentum", "warmup_epochs", "clip"):
            check_number(name, getattr(self, name), "[0, 1)" if name == "momentum" else "[0, inf)")
        check_number("learning_rate", self.learning_rate, "(0, inf)")
        check_number("layer_decay", self.layer_decay, "(0, 1]")
        self.check_weight_decay()
        unknown = set(self.augment) - set(AUGMENTATIONS)
        if unknown:
            raise ValueError(f"augment holds {', '.join(sorted(unknown))}; expected any of {', '.join(AUGMENTATIONS)}.")

    def check_weight_decay(self) -> None:
        """Refuse what is no number; a probe's settings take several."""
        check_number("weight_decay", self.weight_decay, "[0, inf)")


def stream(seed: int, name: str, *position: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator for one purpose at one place of a run: arms of one seed stay paired, and nothing needs saving."""
    state = np.random.SeedSequence([seed, STREAMS[name], *position]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


@contextlib.contextmanager
def process_group(device: str):
    """Join the processes that ``torchrun`` started and yield this one's device; without torchrun do nothing.

    Each process drives one GPU over nccl, or trains on the CPU over gloo; what the hosts agree on goes over gloo. Only
    the first process prints.
    """
    if "LOCAL_RANK" not in os.environ:
        yield device
        return
    if torch.device(device).type == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    with contextlib.redirect_stdout(None if world()[0] > 0 else sys.stdout):
        yield device
    torch.distributed.destroy_process_group()  # not after an error, when the others may be gone and it would wait


def world() -> tuple[int, int]:
    """This process's rank and the number of processes: 0 and 1 outside of a process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def summed(value: Tensor) -> Tensor:
    """Sum over all processes, in place; where a tensor lies on the CPU no accelerator waits for it."""
    if world()[1] > 1:
        torch.distributed.all_reduce(value)
    return value


def share(batch_size: int) -> slice:
    """What of each batch this process takes: every n-th image from its rank on.

    Raises
    ------
    ValueError
        If the processes do not divide the batch: their gradients, which are averaged, would not weigh the same.
    """
    rank, processes = world()
    if batch_size % processes:
        raise ValueError(f"a batch of {batch_size} cannot be dealt to {processes} processes; choose a multiple.")
    return slice(rank, None, processes)


class BatchLoader:
    """Shuffled, augmented, normalised batches from uint8 images kept on the device.

    In a process group each process yields its share of every batch, augmented as one process would.

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

    Raises
    ------
    ValueError
        If images and labels are none, or not equally many, or the processes of a group do not divide a batch.
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
        self.share = share(self.batch_size)
        self.height, self.width = images.shape[1:3]
        self.pad = 4 if "crop" in augment else 0
        border = ((0, 0), (self.pad, self.pad), (self.pad, self.pad), (0, 0))
        self.images = torch.from_numpy(np.pad(np.asarray(images), border)).to(self.device)
        self.labels = torch.as_tensor(np.asarray(labels), dtype=torch.int64, device=self.device)
        self.normalise = Normalise(mean, std, self.device)
        self.mean_colour = [round(255 * level) for level in mean]

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size

    def order(self, epoch: int, start: int = 0):
        """Yield the indices [B] of the batches of one epoch from batch ``start`` on."""
        order = torch.randperm(len(self.labels), generator=stream(self.seed, "order", epoch)).to(self.device)
        for step in range(start, len(self)):
            yield order[step * self.batch_size : (step + 1) * self.batch_size][self.share]

    def epoch(self, epoch: int, start: int = 0, view: int = 0):
        """Yield the batches of one epoch from batch ``start`` on: images float32 [B, C, H, W] and labels [B].

        Each ``view`` augments the same images in another way.
        """
        images = self.autoaugmented(epoch, view) if "autoaugment" in self.augment else self.images
        for step, chosen in enumerate(self.order(epoch, start), start):
            position = (epoch, step, view) if view else (epoch, step)
            generator = stream(self.seed, "augmentation", *position, device=self.device)
            yield self.augmented(images, chosen, generator), self.labels[chosen]

    def in_order(self):
        """Yield every image once, not augmented, in the order of ``labels``."""
        rows, columns = (slice(self.pad, self.pad + size) for size in (self.height, self.width))
        for images in self.images[:, rows, columns].split(self.batch_size):
            yield self.normalise(images)

    def autoaugmented(self, epoch: int, view: int = 0) -> Tensor:
        """Apply a random sub-policy to each of 400 random parts of the images, as in :class:`Settings`.

        Crop and flip follow, and pixels that a shift uncovers get the mean colour, as in the code of the authors.
        """
        from torchvision.transforms import v2

        policy = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10, fill=self.mean_colour)
        images = self.images.clone()
        rows, columns = (slice(self.pad, self.pad + size) for size in (self.height, self.width))
        inner = images[:, rows, columns].permute(0, 3, 1, 2)
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the global stream
            # The stream after the last batch's, since those of the batches are taken.
            position = (epoch, len(self), view) if view else (epoch, len(self))
            torch.default_generator.set_state(stream(self.seed, "augmentation", *position).get_state())
            for part in torch.randperm(len(images)).tensor_split(min(400, len(images))):
                inner[part] = policy(inner[part])
        return images

    def augmented(self, images: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
        """Crop, flip and cut out whole batches: one gather, whatever the augmentation."""

        def draw(high: int) -> Tensor:
            whole = torch.randint(high, (self.batch_size, 1), generator=generator, device=self.device)
            return whole[self.share]

        rows = torch.arange(self.height, device=self.device).expand(len(chosen), -1)
        columns = torch.arange(self.width, device=self.device).expand(len(chosen), -1)
        if "flip" in self.augment:
            columns = torch.where(draw(2) == 1, columns.flip(1), columns)
        if "crop" in self.augment:
            rows, columns = rows + draw(2 * self.pad + 1), columns + draw(2 * self.pad + 1)
        batch = self.normalise(images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]])
        if "cutout" in self.augment:
            side = self.width // 4

            def hole(size: int) -> Tensor:
                shift = torch.arange(size, device=self.device) - draw(size) + side // 2
                return (shift >= 0) & (shift < side)

            batch = batch.masked_fill((hole(self.height)[:, :, None] & hole(self.width)[:, None, :])[:, None], 0)
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


class RoundedProducts(TorchDispatchMode):
    """Convolutions and matrix products of bfloat16 and float16 as hardware makes them, on hardware that does not.

    What goes into a float32 product and what comes out of it is rounded, which is what instructions for the narrow
    types do, but for the order of summation. PyTorch's own substitute for them takes many times as long.
    """

    aten = torch.ops.aten
    functions = frozenset(
        function.default
        for function in (aten.convolution, aten.convolution_backward, aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.functions or (dtype := args[0].dtype) not in (torch.bfloat16, torch.float16):
            return func(*args, **kwargs)
        wide = func(*tree_map_only(Tensor, Tensor.float, args), **kwargs)
        return tree_map_only(Tensor, lambda out: out.to(dtype), wide)


def narrow_products(device: torch.device, precision: str):
    """The context, for forward and backward pass, of fast products in a precision: empty where oneDNN has them."""
    if device.type != "cpu" or precision == "float32" or has_narrow_products(precision):
        return contextlib.nullcontext()
    return RoundedProducts()


def has_narrow_products(precision: str) -> bool:
    """Whether oneDNN has convolutions and matrix products in ``bf16`` or ``fp16`` for this processor."""
    return torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")()


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
    """Logits [N, K] and features [N, D], float32 arrays, of uint8 images [N, H, W, C] in ``eval()`` mode.

    Parameters
    ----------
    model : Module
        Maps images to ``(logits, features)``, on the device.
    images : ndarray
        Pixels from 0 to 255.
    device, precision : str
        Where it computes, and in what, as in :class:`mr2_core.training.Settings`.
    batch_size : int
        Images at a time.
    mean, std : tuple of float
        Of each channel of the training images, as parts of 255; CIFAR-100's by default.
    """
    batches = standardised(images, device=device, batch_size=batch_size, mean=mean, std=std)
    return predict_batches(model, batches, precision)


def standardised(images, *, device, mean, std, batch_size=1000):
    """Yield uint8 images [N, H, W, C] as standardised batches [B, C, H, W] on a device."""
    normalise = Normalise(mean, std, device)
    for start in range(0, len(images), batch_size):
        part = np.ascontiguousarray(images[start : start + batch_size])
        yield normalise(torch.from_numpy(part).to(device))


@torch.no_grad()
def predict_batches(model: nn.Module, batches, precision="float32"):
    """Do the same for an iterable of standardised batches [B, C, H, W] on the model's device."""
    was_training, outputs = model.training, []
    model.eval()
    for batch in batches:
        with autocast(batch.device, precision), narrow_products(batch.device, precision):
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

    Under ``torchrun`` every process calls this with equal arguments and takes its share of each batch. Gradients are
    averaged, the sums of a record, the statistics of MR2 and the weights of a robust method joined; batch
    normalisation and pairs see a process's own share, and its running moments are the first process's from each epoch
    to the next. The first process writes the files, and a signal to any process stops all of them after the same step.

    Parameters
    ----------
    model : Module
        Images [B, C, H, W] to ``(logits, features)``.
    loss : Module
        ``(logits, features, labels)`` to an object with ``total``; its buffers are checkpointed with the model. What it
        may ask for beyond these three stands in :mod:`mr2_core.baselines`.
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
        A record an epoch: ``epoch``, ``loss``, ``train_accuracy`` (on augmented batches, as they came), ``seconds``
        (of the first epoch with what a first stage took) and what ``after_epoch`` returned. With a checkpoint, each is
        also a line of ``<checkpoint>.jsonl``.

    Raises
    ------
    FloatingPointError
        If a loss is not finite: says the step, the learning rate and where the last good checkpoint lies.
    Interrupted
        After a signal, once the step is finished and saved.

    Warns
    -----
    UserWarning
        If the run ends within the warm-up of :class:`mr2_core.MR2Loss`, whose margins then stay equal throughout.
    """
    device, updates = loader.device, settings.epochs * len(loader)
    if getattr(loss, "warmup", 0) >= updates and (loss.exponent or loss.representation_weight):
        warnings.warn(
            f"warmup is {loss.warmup} and the run has {updates} steps, so that neither class margins nor pairs come "
            "into play; expected a warmup shorter than the run.",
            stacklevel=2,
        )
    model.to(device, memory_format=torch.channels_last)
    path = Path(checkpoint) if checkpoint else None
    resumed, earlier = bool(path and path.exists()), []

    def first_stage(model, loss, epochs) -> None:
        """Train before the run proper, with its settings and a checkpoint beside its own."""
        earlier.extend(
            fit(
                model,
                loss,
                loader,
                dataclasses.replace(settings, epochs=epochs),
                checkpoint=path and path.with_suffix(".first.pt"),
                description=f"{description} (first stage)",
                progress=progress,
            )
        )

    model.train()
    loss.train()
    if hasattr(loss, "begin"):
        loss.begin(model, loader, None if resumed else first_stage)
    loss.to(device)
    optimizer = make_optimizer(model, loss, settings)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    rank, processes = world()
    forward = nn.parallel.DistributedDataParallel(model) if processes > 1 else model
    forward = torch.compile(forward) if settings.compile else forward
    state = {"epoch": 0, "step": 0, "loss_sum": 0.0, "correct": 0, "seconds": 0.0, "history": []}
    if resumed:
        saved = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        loss.load_state_dict(saved["loss"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"].cpu())
        state = saved["state"]

    def save() -> None:
        if path and rank == 0:
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
        summed(torch.tensor(0))  # nobody goes on, or away, before the file is there

    def check_finite(values: Tensor, rate: float) -> None:
        if not values.isfinite().all():
            kept = f"the last good checkpoint is {path}" if state["history"] and path else "there is no checkpoint yet"
            raise FloatingPointError(
                f"Training became non-finite at epoch {state['epoch']}, step {state['step']}, learning rate {rate:.3g}"
                f"; {kept}; lower the learning rate or the representation weight."
            )

    if earlier:
        state["seconds"] = sum(record["seconds"] for record in earlier)
        save()
    for suffix in (".first.pt", ".first.jsonl") if path and rank == 0 else ():
        path.with_suffix(suffix).unlink(missing_ok=True)  # what they held lies in the model and the loss

    steps, views, batches = len(loader), getattr(loss, "views", 1), getattr(loss, "batches", plain_batches)
    bar = tqdm(
        total=settings.epochs * steps,
        initial=state["epoch"] * steps + state["step"],
        desc=description,
        unit="step",
        disable=not progress or rank > 0,
        mininterval=1.0,
    )
    with bar, stop_requested() as stop, narrow_products(device, settings.precision):
        while state["epoch"] < settings.epochs:
            begun = time.perf_counter()
            # Sums over all processes; what was saved of them counts once.
            loss_sum = torch.tensor(float(state["loss_sum"] if rank == 0 else 0), dtype=torch.float64, device=device)
            correct = torch.tensor(state["correct"] if rank == 0 else 0, device=device)
            if hasattr(loss, "begin_epoch") and state["step"] == 0:
                with autocast(device, settings.precision):
                    loss.begin_epoch(model, loader, state["epoch"], settings.epochs)
            for images, labels, *more in batches(loader, state["epoch"], state["step"]):
                rate = learning_rate(settings, state["epoch"] * steps + state["step"], steps)
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("lr_scale", 1)
                with autocast(device, settings.precision):
                    logits, features = forward(images)
                if device.type == "cpu":
                    check_finite(logits, rate)
                total = loss(logits, features, labels, *more).total
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(total).backward()
                for parameter in loss.parameters() if processes > 1 else ():  # as is done for those of the model
                    if parameter.grad is not None:
                        parameter.grad = summed(parameter.grad) / processes
                if settings.clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_([*model.parameters(), *loss.parameters()], settings.clip)
                scaler.step(optimizer)
                scaler.update()
                loss_sum += total.detach() * len(labels)
                correct += (logits.argmax(dim=1) == labels).sum()
                state["step"] += 1
                bar.update()
                # A look a step would stall an accelerator, so there it is one a hundred steps.
                if device.type == "cpu" or state["step"] % 100 == 0 or state["step"] == steps:
                    check_finite(loss_sum, rate)
                if summed(torch.tensor(int(stop.requested))):
                    break
            state["loss_sum"], state["correct"] = summed(loss_sum).item(), int(summed(correct))
            state["seconds"] += time.perf_counter() - begun
            if state["step"] == steps:
                for buffer in (*model.buffers(), *loss.buffers()) if processes > 1 else ():
                    torch.distributed.broadcast(buffer, 0)  # so that all evaluate the same network
                seen = steps * loader.batch_size * views
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
                if path and rank == 0:
                    with path.with_suffix(".jsonl").open("a") as log:
                        log.write(json.dumps(record) + "\n")
            if summed(torch.tensor(int(stop.requested))):
                check_finite(torch.tensor(state["loss_sum"]), rate)
                save()
                kept = (
                    f"its state is in {path}; run the same command to go on" if path else "no checkpoint was asked for"
                )
                raise Interrupted(f"Stopped at epoch {state['epoch']}, step {state['step']}; {kept}.")
    return state["history"]


def plain_batches(loader, epoch: int, start: int):
    """The batches of an epoch, unless the loss makes its own."""
    return loader.epoch(epoch, start)


def make_optimizer(model: nn.Module, loss: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimiser of the settings over the model's parameters and those of the loss, if it has any."""
    parameters = [*model.parameters(), *loss.parameters()]
    if settings.layer_decay < 1:
        own = list(loss.parameters())
        parameters = layer_groups(model, settings.layer_decay) + ([{"params": own}] if own else [])
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            settings.learning_rate,
            settings.momentum,
            weight_decay=settings.weight_decay,
            nesterov=settings.momentum > 0,
        )
    return torch.optim.AdamW(parameters, settings.learning_rate, weight_decay=settings.weight_decay)


def layer_groups(network: nn.Module, decay: float) -> list[dict]:
    """Parameter groups for an optimiser whose learning rate falls with the distance from the output.

    Block ``l`` of L has ``lr_scale = decay**(L + 1 - l)``; what comes before the blocks has that of ``l = 0``, and what
    comes after them 1 (Clark et al. 2020, Bao et al. 2022). Blocks are the children with a number in their name.

    Parameters
    ----------
    network : Module
        Its parameters are declared from the input to the output.
    decay : float
        In (0, 1]; 0.65 to 0.75 is usual for vision transformers.

    Returns
    -------
    list of dict
        ``params`` and ``lr_scale``, from the input to the output; every parameter is in one group.

    Raises
    ------
    ValueError
        If the decay is out of range or the network has no numbered blocks.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay is {decay}; expected a factor in (0, 1].")
    blocks = [re.match(r"(.*?\b\d+)\.", name) for name, _ in network.named_parameters()]
    blocks = [match and match[1] for match in blocks]
    depths = {block: depth for depth, block in enumerate(dict.fromkeys(filter(None, blocks)), 1)}
    if not depths:
        raise ValueError("the network has no numbered blocks, such as blocks.0; layer-wise decay needs them.")
    last, groups, depth = max(i for i, block in enumerate(blocks) if block), {}, 0
    for index, (block, parameter) in enumerate(zip(blocks, network.parameters(), strict=True)):
        depth = len(depths) + 1 if index > last else depths.get(block, depth)
        groups.setdefault(depth, []).append(parameter)
    return [
        {"params": parameters, "lr_scale": decay ** (len(depths) + 1 - depth)}
        for depth, parameters in sorted(groups.items())
    ]


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
