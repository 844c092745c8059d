"""Make data/features/cifar100-neural-collapse.npz of DATASHEET.md: ``python data/make_neural_collapse.py``.

Trains the compact network by ERM on 50 images a class, without augmentation so that it fits them all, and measures
along the way how far each class has collapsed (Papyan, Han and Donoho 2020). Less than ten minutes on a core. Its state
is kept under ``_runs/``, where it goes on after an interruption.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch

from mr2_core import load_dataset
from mr2_core.data import split_train_validation, subset_per_class
from mr2_core.methods import build_method
from mr2_core.models import build_model
from mr2_core.training import BatchLoader, Settings, fit, predict, stream

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = Settings(epochs=24, batch_size=64, learning_rate=0.1, weight_decay=5e-4, augment=())
PER_CLASS, SEED = 50, 0
MEASURED = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24)


def collapse(features, labels, weight, predictions):
    """Measure the collapse by class.

    Parameters
    ----------
    features, labels : arrays [N, D], [N]
        Of training images.
    weight : array [K, D]
        The head's.
    predictions : array [N]
        The network's own.

    Returns
    -------
    dict of str to array [K]
        ``square_of_mean`` ‖μ_k‖², ``distance`` ‖μ_k − μ_G‖², ``deviation`` ‖s_k‖², ``nc1`` the class mean of
        (φ − μ_k)ᵀ Σ_B⁺ (φ − μ_k)/K with Σ_B the covariance of the class means, ``nc2`` the mean of |cos + 1/(K − 1)|
        over the other centred class means, ``nc3`` the cosine between centred weights and centred class mean, ``nc4``
        the share of images whose nearest class mean is the network's prediction, ``accuracy``.
    """
    classes = np.arange(len(weight))
    features = features.astype(np.float64)
    means = np.stack([features[labels == k].mean(axis=0) for k in classes])
    centred = means - means.mean(axis=0)
    within = features - means[labels]
    inverse = np.linalg.pinv(centred.T @ centred / len(means), hermitian=True)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    angles = np.abs(unit @ unit.T + 1 / (len(means) - 1))
    np.fill_diagonal(angles, 0)
    rows = weight - weight.mean(axis=0)
    nearest = ((means**2).sum(axis=1) - 2 * features @ means.T).argmin(axis=1)

    def by_class(values):
        return np.array([values[labels == k].mean() for k in classes])

    return {
        "square_of_mean": (means**2).sum(axis=1),
        "distance": (centred**2).sum(axis=1),
        "deviation": by_class((within**2).sum(axis=1)),
        "nc1": by_class(((within @ inverse) * within).sum(axis=1)) / len(means),
        "nc2": angles.sum(axis=1) / (len(means) - 1),
        "nc3": (rows * unit).sum(axis=1) / np.linalg.norm(rows, axis=1),
        "nc4": by_class(nearest == predictions),
        "accuracy": by_class(predictions == labels),
    }


def main() -> None:
    dataset = load_dataset("cifar100")
    train, validation = split_train_validation(dataset.y_train)
    train = train[subset_per_class(dataset.y_train[train], PER_CLASS, seed=SEED)]
    torch.manual_seed(stream(SEED, "initialisation").initial_seed())
    model, loss = build_model("compact", 100), build_method("erm", 100, 128)
    loader = BatchLoader(dataset.x_train[train], dataset.y_train[train], batch_size=SETTINGS.batch_size, seed=SEED)

    def measure(model):
        logits, features = predict(model, dataset.x_train[train])
        weight = model.head.weight.detach().numpy()
        found = collapse(features, dataset.y_train[train], weight, logits.argmax(axis=1))
        logits, features = predict(model, dataset.x_train[validation])
        new = collapse(features, dataset.y_train[validation], weight, logits.argmax(axis=1))
        found |= {f"validation_{name}": new[name] for name in ("deviation", "distance", "accuracy")}
        return {name: values.tolist() for name, values in found.items()}

    epoch = iter(range(1, SETTINGS.epochs + 1))
    before = measure(model)
    checkpoint = ROOT / "_runs" / "neural-collapse.pt"
    if checkpoint.exists():
        epoch = iter(range(torch.load(checkpoint, weights_only=True)["state"]["epoch"] + 1, SETTINGS.epochs + 1))
    records = fit(
        model,
        loss,
        loader,
        SETTINGS,
        checkpoint=checkpoint,
        after_epoch=lambda model, _: measure(model) if next(epoch) in MEASURED else {},
        description="neural collapse",
    )
    kept = [before, *(record for record in records if record["epoch"] in MEASURED)]
    path = ROOT / "data" / "features" / "cifar100-neural-collapse.npz"
    arrays = {name: np.array([record[name] for record in kept], np.float32) for name in before}
    np.savez_compressed(
        path,
        epoch=np.array([0, *MEASURED]),
        per_class=PER_CLASS,
        seed=SEED,
        settings=json.dumps(dataclasses.asdict(SETTINGS)),
        torch_version=torch.__version__,
        **arrays,
    )
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
