"""Make the embedded features of DATASHEET.md: ``python data/make_features.py PART``.

``train --seed K`` trains one ERM network on the 45,000 training images and keeps its state under ``_runs/``, where it
goes on after an interruption. ``compact`` packs seed 0's features with the predictions of all trained seeds.
``efficientnet-lite0`` runs the ImageNet network over the same images (about a quarter of an hour on a core), going on
after an interruption too. ``imagewoof`` does the same over Imagewoof at 64 × 64 pixels, ``imagewoof64.npz`` in the
folder that ``MR2_DATA`` names, else in ``data``; that file holds what ``load_dataset("arrays")`` wants.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mr2_core import load_dataset
from mr2_core.data import split_train_validation, subset_per_class
from mr2_core.extract import extract
from mr2_core.methods import build_method
from mr2_core.models import build_model
from mr2_core.training import BatchLoader, Settings, fit, predict, stream

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "_runs" / "compact-erm"
NORMS = (2, 3, 4, 5)
SETTINGS = Settings(epochs=20, learning_rate=0.1, weight_decay=5e-4)
KEPT_TRAIN = {"cifar100": 100, "imagewoof": 400}  # images a class
KEPT_WIDTH = 128


def train(dataset, seed: int) -> None:
    """Train the compact network by ERM on the protocol's 45,000 images."""
    chosen, validation = split_train_validation(dataset.y_train)
    torch.manual_seed(stream(seed, "initialisation").initial_seed())
    model, loss = build_model("compact", 100), build_method("erm", 100, 128)
    loader = BatchLoader(
        dataset.x_train[chosen],
        dataset.y_train[chosen],
        batch_size=SETTINGS.batch_size,
        augment=SETTINGS.augment,
        seed=seed,
    )

    def validate(model, loss):
        logits, _ = predict(model, dataset.x_train[validation], precision="bf16")
        return {"validation_accuracy": float((logits.argmax(axis=1) == dataset.y_train[validation]).mean())}

    fit(
        model,
        loss,
        loader,
        SETTINGS,
        checkpoint=RUNS / f"seed{seed}.pt",
        after_epoch=validate,
        description=f"ERM seed {seed}",
    )


def compact(dataset) -> None:
    """Pack the networks whose training is complete: seed 0's features, every seed's predictions."""
    saved = {int(path.stem.removeprefix("seed")): torch.load(path, weights_only=True) for path in RUNS.glob("seed*.pt")}
    seeds = sorted(seed for seed, run in saved.items() if run["state"]["epoch"] == SETTINGS.epochs)
    predicted = {"test": [], "validation": []}
    _, validation = split_train_validation(dataset.y_train)
    for seed in seeds:
        model = build_model("compact", 100)
        model.load_state_dict(saved[seed]["model"])
        if seed == 0:
            features = [predict(model, images)[1] for images in (dataset.x_train, dataset.x_test)]
            head = {"weight": model.head.weight.detach().numpy(), "bias": model.head.bias.detach().numpy()}
        for split, images in (("validation", dataset.x_train[validation]), ("test", dataset.x_test)):
            predicted[split].append(predict(model, images)[0].argmax(axis=1).astype(np.uint8))
    pack(
        "cifar100-compact",
        dataset,
        *features,
        seeds=np.array(seeds),
        **head,
        validation_prediction=np.stack(predicted["validation"]),
        test_prediction=np.stack(predicted["test"]),
    )


def efficientnet_lite0(dataset, of: str, source: str, root=None) -> None:
    """Features of the ImageNet-pretrained EfficientNet-Lite0: images upsampled to 128 px, inputs (x − 127)/128."""
    name = f"{of}-efficientnet-lite0"
    out = RUNS.parent / f"{name}-128px.npz"
    with np.load(extract(source, "efficientnet-lite0", root=root, size=128, out=out)) as arrays:
        pack(name, dataset, *(arrays[f"x_{part}"].astype(np.float32) for part in ("train", "test")))


def pack(name, dataset, train_features, test_features, **more) -> None:
    """Write full-width class statistics, and reduced features of some training images a class, validation and test."""
    chosen, validation = split_train_validation(dataset.y_train)
    labels = dataset.y_train
    for split, index in (("train", chosen), ("validation", validation)):
        means, deviations, norms = class_moments(train_features[index], labels[index])
        more |= {f"{split}_mean": means, f"{split}_deviation": deviations, f"{split}_norms": norms}
    kept = chosen[subset_per_class(labels[chosen], KEPT_TRAIN[name.partition("-")[0]], seed=0)]
    # Right singular vectors of the uncentred training features: centring would change a_k, which is about the origin.
    _, vectors = np.linalg.eigh(train_features[chosen].T.astype(np.float64) @ train_features[chosen])
    projection = vectors[:, ::-1][:, :KEPT_WIDTH].astype(np.float32)
    if train_features.shape[1] <= KEPT_WIDTH:
        projection = np.eye(train_features.shape[1], dtype=np.float32)  # nothing to reduce, so keep the coordinates
    for split, rows, truth in (
        ("train", train_features[kept], labels[kept]),
        ("validation", train_features[validation], labels[validation]),
        ("test", test_features, dataset.y_test),
    ):
        more |= {f"x_{split}": (rows @ projection).astype(np.float16), f"y_{split}": truth.astype(np.uint8)}
    validation_labels = labels[validation]
    for width, mapping in (("full", np.eye(train_features.shape[1], dtype=np.float32)), ("reduced", projection)):
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))
        probe.fit(train_features[kept] @ mapping, labels[kept])
        more[f"probe_accuracy_{width}"] = probe.score(train_features[validation] @ mapping, validation_labels)
        print(
            f"{name}: probe on {width} features, validation accuracy {more[f'probe_accuracy_{width}']:.4f}", flush=True
        )
    path = ROOT / "data" / "features" / f"{name}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        path,
        **more,
        index_train=kept.astype(np.int32),
        index_validation=validation.astype(np.int32),
        norms=np.array(NORMS),
        class_names=np.array(dataset.class_names),
        kept_square=((train_features[chosen] @ projection) ** 2).sum() / (train_features[chosen] ** 2).sum(),
    )
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def class_moments(features, labels):
    """Class means [K, D], mean squared deviations [K], and E‖φ‖_p² [P, K] for the norms kept."""
    classes = range(labels.max() + 1)
    rows = [features[labels == k].astype(np.float64) for k in classes]
    means = np.stack([r.mean(axis=0) for r in rows])
    deviations = np.array([((r - m) ** 2).sum(axis=1).mean() for r, m in zip(rows, means, strict=True)])
    norms = np.array([[(np.linalg.norm(r, ord=p, axis=1) ** 2).mean() for r in rows] for p in NORMS])
    return means.astype(np.float32), deviations, norms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "compact", "efficientnet-lite0", "imagewoof"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.part == "imagewoof":
        images = Path(os.environ.get("MR2_DATA") or ROOT / "data") / "imagewoof64.npz"
        return efficientnet_lite0(load_dataset("arrays", images), "imagewoof", "arrays", images)
    dataset = load_dataset("cifar100")
    if options.part == "train":
        train(dataset, options.seed)
    elif options.part == "compact":
        compact(dataset)
    else:
        efficientnet_lite0(dataset, "cifar100", "cifar100")


if __name__ == "__main__":
    main()
