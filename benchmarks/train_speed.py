"""How fast is training: this harness against a plain torchvision loop, and MR2 against ERM?

    python benchmarks/train_speed.py

Whole epochs take turns in one process, with the same model, optimiser, batch size and augmentation (crop, flip,
normalise). The plain loop is the one that torch's tutorials write: a ``DataLoader`` with two workers, transforms by
image, and the model as it was built, in float32. The harness computes in bf16, its default, which is part of its lead;
"harness/plain in bf16", which has no bar, is what is left of it where the plain loop does so too, and so does the same
work but for how it is organised. (A processor without instructions for bf16 gives the harness no such lead over
float32, and one over PyTorch's own products in bf16, see :func:`mr2_core.training.narrow_products`.) Images are
CIFAR-100's where it is found, else noise. A ratio is the median over the rounds. Ends with one line of JSON, ``name``,
``ratios``, ``bars`` and ``ok``, and with exit status 1 if a ratio misses its bar. About six minutes on two cores, two
on a GPU.
"""

import argparse
import json
import sys
import time

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from mr2_core.data import DataError, load_dataset
from mr2_core.methods import build_method
from mr2_core.models import build_model
from mr2_core.training import CIFAR100_MEAN, CIFAR100_STD, BatchLoader, Settings, fit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
IMAGES, BATCH = (50_000, 512) if ON_GPU else (2048, 256)
# By pair: its model, at least or at most, the bar
BARS = {
    "harness/plain": ("compact", ">=", 5.0 if ON_GPU else 1.5),
    "harness/plain in bf16": ("compact", ">=", 0.0),
    "MR2/ERM": ("resnet18" if ON_GPU else "compact", "<=", 1.03 if ON_GPU else 1.05),
}


class Pictures(Dataset):
    """Arrays as torchvision's CIFAR100 serves them: a PIL image, transformed when asked for."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(CIFAR100_MEAN, CIFAR100_STD),
            ]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def plain_loop(model_name, images, labels, bf16):
    """Return a function that trains for one epoch, written without this project."""
    loader = DataLoader(
        Pictures(images, labels),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        pin_memory=ON_GPU,
    )
    model = build_model(model_name, 100).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)

    def epoch():
        model.train()
        loss_sum, correct = 0.0, 0
        for batch, truth in loader:
            batch, truth = batch.to(DEVICE, non_blocking=True), truth.to(DEVICE, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16):
                logits, _ = model(batch)
                loss = F.cross_entropy(logits, truth)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(truth)
            correct += (logits.argmax(dim=1) == truth).sum().item()

    return epoch


def harness(model_name, method, images, labels):
    """Return a function that trains for one epoch with :func:`mr2_core.training.fit`."""
    settings = Settings(epochs=1, batch_size=BATCH, learning_rate=0.1, warmup_epochs=0, precision="bf16")
    loader = BatchLoader(images, labels, batch_size=BATCH, augment=settings.augment, device=DEVICE)
    model = build_model(model_name, 100)
    loss = build_method(method, 100, model.head.in_features)
    return lambda: fit(model, loss, loader, settings, progress=False)


def take_turns(work, rounds):
    """Seconds [rounds] of each function in a dict of two, in rounds in which they take turns at going first."""
    times = {name: [] for name in work}
    for turn in range(rounds + 1):  # the first warms up
        for name in list(work)[:: 1 if turn % 2 else -1]:
            begun = time.perf_counter()
            work[name]()
            if ON_GPU:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begun)
    return {name: np.array(taken[1:]) for name, taken in times.items()}


def main():
    """Measure both pairs and hold them against their bars; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=10 if ON_GPU else 20, help="epochs of each of a pair (default: %(default)s)"
    )
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    try:
        dataset = load_dataset("cifar100", download=False)
        images, labels = dataset.x_train[:IMAGES], dataset.y_train[:IMAGES]
    except DataError:
        generator = np.random.default_rng(0)
        images = generator.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
        labels = generator.integers(0, 100, IMAGES)
    print(f"torch {torch.__version__}, {DEVICE.type}, {torch.get_num_threads()} threads; {len(images)} images an epoch")
    found, ok = {}, True
    for pair, (model, sense, bar) in BARS.items():
        erm = harness(model, "erm", images, labels)
        if pair.startswith("harness"):
            plain = plain_loop(model, images, labels, bf16=pair.endswith("bf16"))
            times = take_turns({"plain": plain, "harness": erm}, rounds)
            by_round = times["plain"] / times["harness"]  # of speeds
        else:
            times = take_turns({"MR2": harness(model, "mr2", images, labels), "ERM": erm}, rounds)
            by_round = times["MR2"] / times["ERM"]  # of seconds
        found[pair] = float(np.median(by_round))
        ok &= found[pair] >= bar if sense == ">=" else found[pair] <= bar
        for name, taken in times.items():
            print(f"{model}, {name}: {len(images) // BATCH * BATCH / np.median(taken):.0f} images/s")
        print(f"{pair}: {found[pair]:.3f}, {min(by_round):.3f} … {max(by_round):.3f} over {rounds} rounds", flush=True)
    bars = {pair: f"{sense} {bar}" for pair, (_, sense, bar) in BARS.items() if bar}
    print(
        json.dumps(
            {"name": "train_speed", "ratios": {k: round(v, 3) for k, v in found.items()}, "bars": bars, "ok": ok}
        )
    )
    return not ok


if __name__ == "__main__":
    sys.exit(main())
