"""What does a training step of each method cost, in time and in memory, relative to a step of ERM?

    python benchmarks/method_cost.py [--model resnet18] [--classes 100] [--batch 128] [--rounds 20]

All methods take turns in one process, each with a model of its own, and a method's ratio is the median over the rounds
of its step's time over that of ERM's step in the same round. A step makes the batch, with crop and flip, and takes it
forward, backward and through the optimiser. What happens once an epoch or once a run comes on top: FairDRO evaluates
the training set each epoch, and the first stages of JTT and of two-stage SupCon have epochs of ERM and of SupCon.

Memory is what a step holds at its peak: on a GPU as the allocator counts it; elsewhere parameters, gradients, buffers
and the optimiser's state, and what the backward pass needs of the forward pass. Ends with one line of JSON: ``name``,
``ratios`` by method, ``bars``, of which there are none, ``ok``, ``erm``, what the ratios are of, ``options`` and
``made_with``. The book shows the line that

    python benchmarks/method_cost.py | tail -n 1 > data/method_cost.json

has written.
"""

import argparse
import itertools
import json
import statistics

import numpy as np
import torch
from loss_speed import DEVICE, seconds

from mr2_core.methods import METHODS, build_method
from mr2_core.models import build_model
from mr2_core.studies import provenance
from mr2_core.training import BatchLoader, Settings, autocast, make_optimizer, narrow_products, plain_batches

NEEDED = {"jtt": {"first_epochs": 1, "upweight": 5.0}, "supcon-two-stage": {"first_epochs": 1}}


class Step:
    """A step of one method, as :func:`mr2_core.training.fit` takes it."""

    def __init__(self, name: str, options, loader: BatchLoader, settings: Settings):
        self.settings = settings
        self.model = build_model(options.model, options.classes).to(DEVICE, memory_format=torch.channels_last)
        width = self.model.head.in_features
        self.loss = build_method(name, options.classes, width, **NEEDED.get(name, {})).to(DEVICE)
        if hasattr(self.loss, "begin"):
            self.loss.begin(self.model, loader, None)
        self.optimizer = make_optimizer(self.model, self.loss, settings)
        batches = getattr(self.loss, "batches", plain_batches)
        self.batches = itertools.chain.from_iterable(batches(loader, epoch, 0) for epoch in itertools.count())

    def __call__(self) -> None:
        """Take it."""
        images, labels, *more = next(self.batches)
        with narrow_products(DEVICE, self.settings.precision):
            with autocast(DEVICE, self.settings.precision):
                logits, features = self.model(images)
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(logits, features, labels, *more).total.backward()
            self.optimizer.step()

    def memory(self) -> int:
        """Bytes at the peak, of this method alone."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
        parameters = [*self.model.parameters(), *self.loss.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held = [*parameters, *gradients, *self.model.buffers(), *self.loss.buffers(), *state]
        own = sum(tensor.untyped_storage().nbytes() for tensor in held)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self()
            torch.cuda.synchronize()
            return own + torch.cuda.max_memory_allocated() - before
        known, saved = {tensor.untyped_storage().data_ptr() for tensor in held}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self()
        return own + sum(saved.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18" if DEVICE.type == "cuda" else "compact")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {DEVICE.type}, {torch.get_num_threads()} threads; {options.model}, "
        f"K = {options.classes}, B = {options.batch}, {options.rounds} rounds"
    )
    settings = Settings(batch_size=options.batch)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (8 * options.batch, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(8 * options.batch) % options.classes
    loader = BatchLoader(images, labels, batch_size=options.batch, augment=settings.augment, device=DEVICE)
    steps = {name: Step(name, options, loader, settings) for name in METHODS}
    memory = {}
    for name, step in steps.items():
        step()  # warms up, and makes the optimiser's state
        memory[name] = step.memory()
    times = {name: [] for name in METHODS}
    order = list(METHODS)
    for turn in range(options.rounds):
        for name in order if turn % 2 else reversed(order):
            times[name].append(seconds(steps[name]))
    ratios = {
        name: statistics.median(own / erm for own, erm in zip(taken, times["erm"], strict=True))
        for name, taken in times.items()
    }
    for name in METHODS:
        print(
            f"{name:18} {1e3 * statistics.median(times[name]):8.1f} ms  {ratios[name]:5.2f} ×   "
            f"{memory[name] / 2**20:7.1f} MiB  {memory[name] / memory['erm']:5.2f} ×"
        )
    pairs = {
        name: {"time": round(ratio, 3), "memory": round(memory[name] / memory["erm"], 3)}
        for name, ratio in ratios.items()
    }
    erm = {"milliseconds": 1e3 * statistics.median(times["erm"]), "mebibytes": memory["erm"] / 2**20}
    found = {
        "name": "method_cost",
        "ratios": pairs,
        "bars": {},
        "ok": True,
        "erm": {unit: round(value, 1) for unit, value in erm.items()},
        "options": vars(options),
        "made_with": provenance(DEVICE.type),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
