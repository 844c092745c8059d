"""Studies: a TOML file of arms and seeds → one JSON a run → tables with paired intervals."""

import dataclasses
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mr2_core.data import load_dataset, split_train_validation, subset_per_class
from mr2_core.methods import build_method
from mr2_core.metrics import ClassReport
from mr2_core.models import build_model
from mr2_core.statistics import squared_norm
from mr2_core.training import BatchLoader, Interrupted, Settings, channel_moments, fit, predict, stream

SCHEMA = 1
KINDS = ("tuning", "confirmatory", "descriptive")
LEVELS = ("overall", "easy", "medium", "hard")


@dataclasses.dataclass(frozen=True)
class Run:
    """One arm of a study under one seed.

    Attributes
    ----------
    configuration : dict
        Everything the result depends on; ``identity`` is its hash together with the schema's version.
    result : Path
        The JSON file, present once the run is done; predictions lie beside it as ``.npz``.
    """

    study: str
    arm: str
    seed: int
    configuration: dict
    result: Path

    @property
    def identity(self) -> str:
        """Hash of the configuration."""
        return hashlib.sha256(json.dumps([SCHEMA, self.configuration], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def record(self) -> dict | None:
        """What the run wrote, or None if this configuration has not been run to its end."""
        if not self.result.exists():
            return None
        record = json.loads(self.result.read_text())
        return record if record["identity"] == self.identity else None


def read_study(path: str | os.PathLike, results: str | os.PathLike) -> list[Run]:
    """The runs of a study file, in the order in which they should be done: seed by seed, so that arms stay paired.

    Parameters
    ----------
    path : path
        A TOML file with ``name``, ``kind`` (tuning, confirmatory or descriptive), ``dataset``, ``model``, ``seeds``,
        optionally ``per_class`` and ``head``, a table ``training`` of :class:`Settings`, and a table ``arms`` with, for
        each arm, its ``method``, the method's hyperparameters, and a table ``training`` of what differs.
    results : path
        The folder under which ``<study>/<arm>/seed<k>.json`` are kept.

    Raises
    ------
    ValueError
        If something is missing, unknown or out of range, naming it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file; expected a study such as studies/example.toml.")
    try:
        study = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}.") from error
    needed = ("name", "kind", "dataset", "model", "seeds", "arms")
    known = (*needed, "title", "per_class", "head", "training")
    if missing := [key for key in needed if key not in study]:
        raise ValueError(f"{path} lacks {', '.join(missing)}.")
    if unknown := [key for key in study if key not in known]:
        raise ValueError(f"{path} has unknown keys {', '.join(unknown)}; expected only {', '.join(known)}.")
    if study["kind"] not in KINDS:
        raise ValueError(f"{path}: kind is {study['kind']!r}; expected one of {', '.join(KINDS)}.")
    runs = []
    for seed in study["seeds"]:
        for arm, hyperparameters in study["arms"].items():
            hyperparameters = dict(hyperparameters)
            method, training = hyperparameters.pop("method"), hyperparameters.pop("training", {})
            try:
                settings = Settings(**(study.get("training", {}) | training))
                build_method(method, 2, 1, **hyperparameters)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, arm {arm}: {error}") from error
            configuration = {
                "kind": study["kind"],
                "dataset": study["dataset"],
                "per_class": study.get("per_class"),
                "model": study["model"],
                "head": study.get("head", "linear"),
                "method": method,
                "hyperparameters": hyperparameters,
                "training": dataclasses.asdict(settings),
                "seed": seed,
            }
            result = Path(results) / study["name"] / arm / f"seed{seed}.json"
            runs.append(Run(study["name"], arm, seed, json.loads(json.dumps(configuration)), result))
    return runs


def execute(run: Run, *, device: str = "cpu", progress: bool = True) -> dict:
    """Do one run, from the checkpoint beside its result where there is one, and write its JSON.

    Tuning runs evaluate validation only; the test set is read once, at the end of a run of another kind.

    Raises
    ------
    Interrupted
        After SIGINT, SIGTERM or an alarm; the same call goes on from there.
    """
    c = run.configuration
    dataset = load_dataset(c["dataset"])
    settings = Settings(**c["training"])
    smallest = int(np.bincount(dataset.y_train).min())
    chosen, validation = split_train_validation(dataset.y_train, min(50, smallest // 5))
    if c["per_class"]:
        chosen = chosen[subset_per_class(dataset.y_train[chosen], c["per_class"], seed=run.seed)]
    torch.manual_seed(stream(run.seed, "initialisation").initial_seed())
    model = build_model(c["model"], dataset.num_classes, head=c["head"])
    torch.manual_seed(stream(run.seed, "method").initial_seed())
    loss = build_method(c["method"], dataset.num_classes, model.head.in_features, **c["hyperparameters"])
    pixels = dict(zip(("mean", "std"), channel_moments(dataset.x_train), strict=True))
    loader = BatchLoader(
        dataset.x_train[chosen],
        dataset.y_train[chosen],
        batch_size=settings.batch_size,
        augment=settings.augment,
        seed=run.seed,
        device=device,
        **pixels,
    )
    y_validation = dataset.y_train[validation]

    def evaluate(images, labels):
        logits, _ = predict(model, images, device=device, precision=settings.precision, **pixels)
        return logits, ClassReport(labels, logits.argmax(axis=1), dataset.num_classes)

    def after_epoch(model, loss):
        record = {"validation_accuracy": evaluate(dataset.x_train[validation], y_validation)[1].accuracy}
        if hasattr(loss, "statistics"):
            moments = loss.statistics
            record |= {
                "margins": digits(loss.margins),
                "mean_square": digits(squared_norm(moments.mean, moments.p)),
                "deviation": digits(moments.deviation),
            }
        return record

    checkpoint = run.result.with_name(f"{run.result.stem}-{run.identity}.pt")
    history = fit(
        model,
        loss,
        loader,
        settings,
        checkpoint=checkpoint,
        after_epoch=after_epoch,
        description=f"{run.study} {run.arm} seed {run.seed}",
        progress=progress,
    )
    record = {
        "schema": SCHEMA,
        "identity": run.identity,
        "study": run.study,
        "arm": run.arm,
        "seed": run.seed,
        "configuration": c,
        "made_with": provenance(device),
        "seconds": round(sum(r["seconds"] for r in history), 1),
        "history": history,
        "validation_by_class": digits(evaluate(dataset.x_train[validation], y_validation)[1].by_class),
        "train_by_class": digits(evaluate(dataset.x_train[chosen], dataset.y_train[chosen])[1].by_class),
    }
    if c["kind"] != "tuning":
        logits, report = evaluate(dataset.x_test, dataset.y_test)
        record["test_by_class"] = digits(report.by_class)
        probability = torch.from_numpy(logits).softmax(dim=1).numpy()
        rows = np.arange(len(logits))
        write_atomically(
            run.result.with_suffix(".npz"),
            lambda path: np.savez_compressed(
                path,
                label=dataset.y_test.astype(np.uint16),
                prediction=logits.argmax(axis=1).astype(np.uint16),
                identity=np.array(run.identity),
                truth_probability=probability[rows, dataset.y_test].astype(np.float16),
                top_probability=probability.max(axis=1).astype(np.float16),
            ),
        )
    write_atomically(run.result, lambda path: path.write_text(json.dumps(record, separators=(",", ":")) + "\n"))
    for path in (checkpoint, checkpoint.with_suffix(".jsonl")):
        path.unlink(missing_ok=True)
    return record


def digits(values) -> list[float]:
    """Numbers to four significant digits, which is what a table or plot shows."""
    return [float(f"{value:.4g}") for value in np.asarray(values, dtype=float)]


def write_atomically(path: Path, write) -> None:
    """Write a file beside its place and move it there, so that no reader ever sees half of it."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def provenance(device: str) -> dict:
    """Commit, versions and hardware that a result was made with."""

    def git(*words):
        here = Path(__file__).resolve().parent
        answer = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        return answer.stdout.strip() if answer.returncode == 0 else None

    on_cuda = torch.device(device).type == "cuda"
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "mr2_core", "studies")),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "torchvision", "numpy")},
        "hardware": torch.cuda.get_device_name(device)
        if on_cuda
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


def run_study(runs: list[Run], *, jobs: int = 1, device: str = "cpu", budget: float | None = None) -> int:
    """Do what is missing, ``jobs`` runs at a time; return how many are still missing.

    With a ``budget`` in seconds, runs under way are checkpointed when it is spent and go on at the next call.
    """
    missing = [run for run in runs if run.record is None]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are done; {len(missing)} to do.", flush=True)
    deadline = time.time() + budget if budget else None
    threads = max(1, (os.cpu_count() or 1) // jobs)
    work = [(run, device, deadline, threads) for run in missing]
    if jobs == 1:
        for item in work:
            if not _one(item):
                break
    else:
        with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
            for _ in pool.imap_unordered(_one, work):
                pass
    return sum(run.record is None for run in runs)


def _one(item) -> bool:
    run, device, deadline, threads = item
    torch.set_num_threads(threads)
    if deadline:
        if time.time() >= deadline:
            return False
        signal.setitimer(signal.ITIMER_REAL, deadline - time.time())
    try:
        execute(run, device=device)
    except Interrupted as stopped:
        print(stopped, flush=True)
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def validation_ranking(records: list[dict]) -> np.ndarray:
    """Classes, easiest first, by validation accuracy averaged over runs."""
    return np.argsort(-np.mean([record["validation_by_class"] for record in records], axis=0), kind="stable")


def levels(by_class: np.ndarray, ranking: np.ndarray) -> np.ndarray:
    """Overall, easy, medium and hard accuracy: [..., K] → [..., 4]."""
    thirds = [by_class[..., part].mean(axis=-1) for part in np.array_split(ranking, 3)]
    return np.stack([by_class.mean(axis=-1), *thirds], axis=-1)


def table(
    runs: list[Run], *, reference: str, ranking: str = "all", resamples: int = 4000, seed: int = 0
) -> pd.DataFrame:
    """Accuracy of each arm by third, and its paired difference from a reference arm.

    Parameters
    ----------
    runs : list of Run
        Of one study; those not done are left out, and an arm is compared on the seeds it shares with the reference.
    reference : str
        The arm to subtract.
    ranking : str
        ``all``: by validation accuracy averaged over all arms; or an arm's name: by that arm's alone. Never by test.
    resamples, seed : int
        Of the bootstrap over seeds × test images: seeds are drawn with replacement, and for each class its test images,
        the same for both arms.

    Returns
    -------
    DataFrame
        By arm: ``seeds``, accuracies in per cent (``overall`` … ``hard``), and for each ``Δ level`` the paired
        difference in points with ``low`` and ``high`` of its 95 % interval.
    """
    done = {(run.arm, run.seed): run for run in runs if run.record}
    if not any(arm == reference for arm, _ in done):
        raise ValueError(f"no run of the reference arm {reference!r} is done; done are {sorted({a for a, _ in done})}.")
    used = [run.record for run in done.values() if ranking in ("all", run.arm)]
    if not used:
        raise ValueError(f"ranking is {ranking!r}; expected 'all' or an arm with runs that are done.")
    order = validation_ranking(used)
    tuning = next(iter(done.values())).configuration["kind"] == "tuning"
    generator = np.random.default_rng(seed)
    rows = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        seeds = sorted(s for a, s in done if a == arm)
        if not seeds:
            continue
        key = "validation_by_class" if tuning else "test_by_class"
        accuracy = levels(np.array([done[arm, s].record[key] for s in seeds]), order).mean(axis=0)
        row = {"seeds": len(seeds)} | dict(zip(LEVELS, 100 * accuracy, strict=True))
        shared = [s for s in seeds if (reference, s) in done]
        if shared and arm != reference:
            own, other = (np.array([done[a, s].record[key] for s in shared]) for a in (arm, reference))
            row |= dict(
                zip([f"Δ {level}" for level in LEVELS], 100 * levels(own - other, order).mean(axis=0), strict=True)
            )
            if not tuning and len(shared) > 1:
                draws = _bootstrap(
                    [done[arm, s] for s in shared], [done[reference, s] for s in shared], order, resamples, generator
                )
                for level, (low, high) in zip(LEVELS, 100 * np.quantile(draws, (0.025, 0.975), axis=0).T, strict=True):
                    row |= {f"low {level}": low, f"high {level}": high}
        rows[arm] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def _bootstrap(own: list[Run], other: list[Run], ranking, resamples: int, generator) -> np.ndarray:
    """Draws [resamples, 4] of the paired difference over seeds × test images within class."""
    difference = np.stack([correct(a).astype(float) - correct(b) for a, b in zip(own, other, strict=True)])
    with np.load(own[0].result.with_suffix(".npz")) as arrays:
        labels = arrays["label"]
    by_class = [difference[:, labels == k] for k in range(labels.max() + 1)]
    seeds = generator.multinomial(len(own), np.full(len(own), 1 / len(own)), resamples) / len(own)
    draws = []
    for rows in by_class:
        count = rows.shape[1]
        images = generator.multinomial(count, np.full(count, 1 / count), resamples) / count
        draws.append(((seeds @ rows) * images).sum(axis=1))
    return levels(np.stack(draws, axis=-1), ranking)


def correct(run: Run) -> np.ndarray:
    """Which test images a run classified correctly, bool [N]."""
    with np.load(run.result.with_suffix(".npz")) as arrays:
        return arrays["prediction"] == arrays["label"]
