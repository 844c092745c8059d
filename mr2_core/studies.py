"""Studies: a TOML file of arms and seeds → one JSON a run → tables with paired intervals."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
import pandas as pd
import torch
from scipy import stats

from mr2_core.data import data_folder, load_dataset, split_train_validation, subset_per_class
from mr2_core.image_sets import load_image_set
from mr2_core.loaders import FolderLoader
from mr2_core.methods import build_method
from mr2_core.metrics import ClassReport
from mr2_core.models import build_model
from mr2_core.probe import PROBES, run_probe
from mr2_core.statistics import squared_norm
from mr2_core.training import (
    BatchLoader,
    Interrupted,
    Settings,
    channel_moments,
    fit,
    predict_batches,
    standardised,
    stream,
    summed,
    world,
)

SCHEMA = 1
KINDS = ("tuning", "confirmatory", "descriptive")
# A setting that is younger than recorded runs stays out of the configuration at its default, so that they stay valid.
YOUNGER = {"layer_decay": 1.0}
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
        optionally ``root`` (where ``arrays`` or a ``folder`` lie; a relative path starts at the folder MR2_DATA names,
        else at the repository's ``data``), ``size`` (a side in pixels: the images are those of an image set such as
        ``imagenet`` or ``folder``, see ``mr2_core.image_sets.load_image_set``, read from disk as they are needed
        and brought to this size), ``per_class``, ``head``, a table ``training`` of
        :class:`mr2_core.training.Settings`, a table ``endpoints`` (see :func:`read_endpoints`), a table ``arms``
        with, for each arm, its ``method``, the method's hyperparameters, and a table ``training`` of what differs, and
        a table ``reused``: the file of another ``study`` beside this one and those of its ``arms`` that are arms of
        this one too. Their runs are the other study's own, under its name and with its training settings.
    results : path
        The folder under which ``<study>/<arm>/seed<k>.json`` are kept.

    Raises
    ------
    ValueError
        If something is missing, unknown or out of range, naming it.
    """
    study = _toml(path)
    needed = ("name", "kind", "dataset", "model", "seeds", "arms")
    known = (*needed, "title", "root", "size", "per_class", "head", "training", "endpoints", "reused")
    if missing := [key for key in needed if key not in study]:
        raise ValueError(f"{path} lacks {', '.join(missing)}.")
    if unknown := [key for key in study if key not in known]:
        raise ValueError(f"{path} has unknown keys {', '.join(unknown)}; expected only {', '.join(known)}.")
    if study["kind"] not in KINDS:
        raise ValueError(f"{path}: kind is {study['kind']!r}; expected one of {', '.join(KINDS)}.")
    if not isinstance(study["seeds"], list) or not all(type(seed) is int and seed >= 0 for seed in study["seeds"]):
        raise ValueError(f"{path}: seeds is {study['seeds']!r}; expected a list of whole numbers, such as [0, 1, 2].")
    head = study.get("head", "linear")
    try:
        with torch.device("meta"):  # names alone, no weights
            build_model("compact" if study["model"] in PROBES else study["model"], 2, head=head)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    runs = _reused(study, Path(path), results) if "reused" in study else []
    for seed in study["seeds"]:
        for arm, hyperparameters in study["arms"].items():
            try:
                hyperparameters = dict(hyperparameters)
                method, training = hyperparameters.pop("method", None), hyperparameters.pop("training", {})
                kind = PROBES.get(study["model"], Settings)
                settings = kind(**(study.get("training", {}) | training))
                counts = hyperparameters.get("counts")
                build_method(method, len(counts) if isinstance(counts, list) else 2, 1, **hyperparameters)
                if "size" in study and set(settings.augment) != {"crop", "flip"}:
                    raise ValueError(f"augment is {settings.augment}; expected crop and flip with a size.")
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, arm {arm}: {error}") from error
            configuration = {
                "kind": study["kind"],
                "dataset": study["dataset"],
                **{key: study[key] for key in ("root", "size") if key in study},
                "per_class": study.get("per_class"),
                "model": study["model"],
                "head": head,
                "method": method,
                "hyperparameters": hyperparameters,
                "training": {k: v for k, v in dataclasses.asdict(settings).items() if YOUNGER.get(k) != v},
                "seed": seed,
            }
            result = Path(results) / study["name"] / arm / f"seed{seed}.json"
            runs.append(Run(study["name"], arm, seed, json.loads(json.dumps(configuration)), result))
    return runs


def _reused(study: dict, path: Path, results) -> list[Run]:
    """Runs of another study, which must be of the same images, model and head as this study's own.

    Training settings may differ, as they may between the arms of one study: they are part of what an arm compares.
    """
    other, arms = path.with_name(study["reused"]["study"]), study["reused"]["arms"]
    theirs = _toml(other)
    if unknown := [arm for arm in arms if arm not in theirs["arms"] or arm in study["arms"]]:
        raise ValueError(f"{path} reuses {', '.join(unknown)}; expected arms of {other} with names of their own.")
    for key in ("kind", "dataset", "root", "size", "per_class", "model", "head"):
        if study.get(key) != theirs.get(key):
            raise ValueError(f"{path}: {key} is {study.get(key)!r}, but {theirs.get(key)!r} in {other} that it reuses.")
    if unknown := set(study["seeds"]) - set(theirs["seeds"]):
        raise ValueError(f"{path} has seeds {sorted(unknown)}, which {other} that it reuses has not.")
    return [run for run in read_study(other, results) if run.arm in arms and run.seed in study["seeds"]]


def read_endpoints(path: str | os.PathLike) -> dict:
    """What a study committed itself to before it ran.

    Parameters
    ----------
    path : path
        A study file. Its table ``endpoints`` may hold ``references``, the arms that others must beat (by default the
        first arm), and ``easy_margin``, how many points of the easy third a gain may cost (1 by default).

    Raises
    ------
    ValueError
        If a reference is no arm, the margin no positive number, or another key is there.
    """
    study = _toml(path)
    arms = [*study.get("reused", {"arms": []})["arms"], *study["arms"]]
    endpoints = {"references": arms[:1], "easy_margin": 1.0} | study.get("endpoints", {})
    if unknown := set(endpoints) - {"references", "easy_margin"}:
        raise ValueError(f"{path}: endpoints has unknown keys {', '.join(sorted(unknown))}.")
    if unknown := set(endpoints["references"]) - set(arms):
        raise ValueError(f"{path}: endpoints names {', '.join(sorted(unknown))}; the arms are {', '.join(arms)}.")
    if not isinstance(endpoints["easy_margin"], int | float) or not endpoints["easy_margin"] > 0:
        raise ValueError(f"{path}: easy_margin is {endpoints['easy_margin']!r}; expected a positive number of points.")
    return endpoints


def _toml(path: str | os.PathLike) -> dict:
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file; expected a study such as studies/cifar100-compact.toml.")
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}.") from error


class Source(NamedTuple):
    """What a run trains on, and for each part its labels and a function that yields its images, not augmented."""

    num_classes: int
    loader: BatchLoader | FolderLoader
    parts: dict[str, tuple[np.ndarray, Callable]]


def images_in_memory(c: dict, settings: Settings, root: Path | None, device: str) -> Source:
    """Images of one size, as :func:`mr2_core.data.load_dataset` has them."""
    dataset = load_dataset(c["dataset"], root)
    chosen, validation = split(c, dataset.y_train)
    pixels = dict(zip(("mean", "std"), channel_moments(dataset.x_train), strict=True))
    loader = BatchLoader(
        dataset.x_train[chosen],
        dataset.y_train[chosen],
        batch_size=settings.batch_size,
        augment=settings.augment,
        seed=c["seed"],
        device=device,
        **pixels,
    )

    def part(images, labels, indices=slice(None)):
        return labels[indices], lambda: standardised(images[indices], device=device, **pixels)

    train = dataset.x_train, dataset.y_train
    parts = {
        "train": part(*train, chosen),
        "validation": part(*train, validation),
        "test": part(dataset.x_test, dataset.y_test),
    }
    return Source(dataset.num_classes, loader, parts)


def images_on_disk(c: dict, settings: Settings, root: Path | None, device: str, workers: int) -> Source:
    """Images of any size, as :func:`mr2_core.image_sets.load_image_set` lists them."""
    sets = load_image_set(c["dataset"], root)
    chosen, validation = split(c, np.array(sets["train"].targets), official="validation" in sets)

    def loader(part, indices=None):
        return FolderLoader(
            sets[part],
            batch_size=settings.batch_size,
            chosen=indices,
            size=c["size"],
            seed=c["seed"],
            workers=workers,
            device=device,
        )

    loaders = {
        "train": loader("train", chosen),
        "validation": loader("validation") if validation is None else loader("train", validation),
        "test": loader("test"),
    }
    parts = {name: (one.labels.cpu().numpy(), one.in_order) for name, one in loaders.items()}
    return Source(len(sets["train"].classes), loaders["train"], parts)


def split(c: dict, labels: np.ndarray, *, official: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
    """Indices of a run's training images and of the validation images, at most 50 a class, which all runs share.

    Where a dataset has ``official`` validation images, all training images are for training.
    """
    chosen, validation = np.arange(len(labels)), None
    if not official:
        chosen, validation = split_train_validation(labels, min(50, int(np.bincount(labels).min()) // 5))
    if c["per_class"]:
        chosen = chosen[subset_per_class(labels[chosen], c["per_class"], seed=c["seed"])]
    return chosen, validation


def execute(run: Run, *, device: str = "cpu", workers: int = 4, progress: bool = True) -> dict | None:
    """Do one run, from the checkpoint beside its result where there is one, and write its JSON.

    Tuning runs evaluate validation only; the test set is read once, at the end of a run of another kind. In a process
    group all processes train together; the first one evaluates, writes, and alone returns the record.

    Raises
    ------
    Interrupted
        After SIGINT, SIGTERM or an alarm; the same call goes on from there.
    """
    c, started, first = run.configuration, time.time(), world()[0] == 0
    if c["model"] in PROBES:
        if not first:
            return None
        parts, arrays = run_probe(c, device)
        return write_result(run, {"seconds": round(time.time() - started, 1)} | parts, arrays, device)
    root = Path(os.environ.get("MR2_DATA") or data_folder()) / c["root"] if "root" in c else None
    settings = Settings(**c["training"])
    if "size" in c:
        num_classes, loader, images = images_on_disk(c, settings, root, device, workers)
    else:
        num_classes, loader, images = images_in_memory(c, settings, root, device)
    torch.manual_seed(stream(run.seed, "initialisation").initial_seed())
    model = build_model(c["model"], num_classes, head=c["head"])
    torch.manual_seed(stream(run.seed, "method").initial_seed())
    loss = build_method(
        c["method"], num_classes, model.head.in_features, labels=loader.labels.cpu(), **c["hyperparameters"]
    )

    def evaluate(part):
        labels, batches = images[part]
        logits, _ = predict_batches(model, batches(), settings.precision)
        return logits, ClassReport(labels, logits.argmax(axis=1), num_classes)

    def after_epoch(model, loss):
        record = {"validation_accuracy": evaluate("validation")[1].accuracy}
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
    if not first:
        return None
    parts = {
        "seconds": round(sum(r["seconds"] for r in history), 1),
        "history": history,
        "validation_by_class": digits(evaluate("validation")[1].by_class),
        "train_by_class": digits(evaluate("train")[1].by_class),
    }
    arrays = None
    if c["kind"] != "tuning":
        labels, (logits, report) = images["test"][0], evaluate("test")
        parts["test_by_class"] = digits(report.by_class)
        probability = torch.from_numpy(logits).softmax(dim=1).numpy()
        arrays = {
            "label": labels.astype(np.uint16),
            "prediction": logits.argmax(axis=1).astype(np.uint16),
            "truth_probability": probability[np.arange(len(logits)), labels].astype(np.float16),
            "top_probability": probability.max(axis=1).astype(np.float16),
        }
    record = write_result(run, parts, arrays, device)
    for path in (checkpoint, checkpoint.with_suffix(".jsonl")):
        path.unlink(missing_ok=True)
    return record


def write_result(run: Run, parts: dict, arrays: dict | None, device: str) -> dict:
    """Write a run's predictions, and then its JSON, whose presence says that the run is done; return the record."""
    record = {
        "schema": SCHEMA,
        "identity": run.identity,
        "study": run.study,
        "arm": run.arm,
        "seed": run.seed,
        "configuration": run.configuration,
        "made_with": provenance(device),
    } | parts
    run.result.parent.mkdir(parents=True, exist_ok=True)
    if arrays:
        write_atomically(
            run.result.with_suffix(".npz"),
            lambda path: np.savez_compressed(path, identity=np.array(run.identity), **arrays),
        )
    write_atomically(run.result, lambda path: path.write_text(json.dumps(record, separators=(",", ":")) + "\n"))
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
    """Commit and whether anything was changed since (None where git cannot say), versions and hardware of a result."""

    def git(*words):
        here = Path(__file__).resolve().parent
        try:
            return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):  # no git, or no repository
            return None

    on_cuda = torch.device(device).type == "cuda"
    processes = f"{world()[1]} × " if world()[1] > 1 else ""
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ":/mr2_core", ":/studies")
    return {
        "commit": commit and commit.strip(),
        "dirty": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "torchvision", "numpy")},
        "hardware": processes
        + (
            torch.cuda.get_device_name(device)
            if on_cuda
            else f"{platform.machine()}, {torch.get_num_threads()} threads"
        ),
    }


def run_study(
    runs: list[Run], *, jobs: int = 1, device: str = "cpu", budget: float | None = None, workers: int = 4
) -> int:
    """Do what is missing, ``jobs`` runs at a time; return how many are still missing.

    With a ``budget`` in seconds, runs under way are checkpointed when it is spent and go on at the next call. A run
    that another process is doing is left to it, and one that diverges or finds no optimum is named and left out; it
    keeps no other from its turn. In a process group all processes share each run. One run at a time uses
    as many threads as torch is set to; of several, each uses one. Images that do not fit memory are read by ``workers``
    processes, where several runs share the machine by each of them itself.

    Raises
    ------
    ValueError
        If a process group is asked for several jobs.
    """
    if jobs > 1 and world()[1] > 1:
        raise ValueError(f"jobs is {jobs}; expected 1 under torchrun, whose processes share each run.")
    missing = [run for run in runs if run.record is None]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are done; {len(missing)} to do.", flush=True)
    deadline = time.time() + budget if budget else None
    work = [(run, device, deadline, workers if jobs == 1 else 0) for run in missing]
    if jobs == 1:
        for item in work:
            if not _one(item):
                break
    else:
        with multiprocessing.get_context("spawn").Pool(jobs, _begin_worker, maxtasksperchild=1) as pool:
            for _ in pool.imap_unordered(_one, work):
                pass
    return sum(run.record is None for run in runs)


def _begin_worker() -> None:
    """Give a worker one thread, and let it save and stop when its command is gone, however that was ended."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def watch():
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _budget_spent(*_):
    raise Interrupted("The budget is spent; the same command goes on.")


def _not_yet(*_):
    """Do nothing; a signal that is ignored outright would end its timer."""


@contextlib.contextmanager
def _claimed(run: Run):
    """Hold the lock of a run; in a process group the first process holds it for all."""
    lock = filelock.FileLock(run.result.with_suffix(".lock"), blocking=False)
    busy = False
    if world()[0] == 0:
        try:
            lock.acquire()
        except filelock.Timeout:
            busy = True
    if summed(torch.tensor(int(busy))):
        raise filelock.Timeout(lock.lock_file)
    try:
        yield
        with contextlib.suppress(OSError):  # Windows removes no open file; in a process group the first one does it
            run.result.with_suffix(".lock").unlink()
    finally:
        lock.release()


def _one(item) -> bool:
    run, device, deadline, workers = item
    run.result.parent.mkdir(parents=True, exist_ok=True)
    if deadline:
        if summed(torch.tensor(int(time.time() >= deadline))):
            return False
        # Before and after the loop, which saves, one process stops at once; several, which must stop together, stop in
        # the loop alone, at a later alarm.
        alone = world()[1] == 1
        signal.signal(signal.SIGALRM, _budget_spent if alone else _not_yet)
        signal.setitimer(signal.ITIMER_REAL, max(deadline - time.time(), 0.001), 0 if alone else 1)
    try:
        with _claimed(run):
            if run.record is None:
                execute(run, device=device, workers=workers)
            summed(torch.tensor(0))  # nobody goes on before the first process has written
    except filelock.Timeout:
        print(f"{run.study} {run.arm} seed {run.seed} is being done by another process.", flush=True)
    except FloatingPointError as error:
        if world()[1] > 1:
            raise  # the other processes of the group would wait for this one
        print(f"{run.study} {run.arm} seed {run.seed} has failed: {error}", flush=True)
    except Interrupted as stopped:
        print(stopped, flush=True)
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():
            os._exit(1)  # a worker whose command is gone has nobody to report to
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def validation_ranking(records: list[list[dict]]) -> np.ndarray:
    """Classes, easiest first, by validation accuracy: the mean over arms of the mean over each arm's runs."""
    by_arm = [np.mean([record["validation_by_class"] for record in runs], axis=0) for runs in records]
    return np.argsort(-np.mean(by_arm, axis=0), kind="stable")


def levels(by_class: np.ndarray, ranking: np.ndarray) -> np.ndarray:
    """Overall, easy, medium and hard accuracy: [..., K] → [..., 4]."""
    thirds = [by_class[..., part].mean(axis=-1) for part in np.array_split(ranking, 3)]
    return np.stack([by_class.mean(axis=-1), *thirds], axis=-1)


def table(runs: list[Run], *, reference: str, ranking: str = "all", easy_margin: float = 1.0) -> pd.DataFrame:
    """Accuracy of each arm by third, and its paired difference from a reference arm.

    Parameters
    ----------
    runs : list of Run
        Of one study; those not done are left out, and an arm is compared on the seeds it shares with the reference.
    reference : str
        The arm to subtract.
    ranking : str
        ``all``: by validation accuracy averaged over all arms; or the names of some, joined by ``+``: by theirs alone.
        Never by test.
    easy_margin : float
        How many points of the easy third count as kept.

    Returns
    -------
    DataFrame
        By arm: ``seeds``, accuracies in per cent (``overall`` … ``hard``), and for each level ``Δ level``, the paired
        difference in points, with ``low`` and ``high`` of its 95 % interval (:func:`interval`) and ``p``, adjusted by
        Holm over the arms of the study, each level and each reference by itself (the intervals are not adjusted). Once
        all runs of a confirmatory study are done, ``hard gains`` and ``easy kept`` say whether the gain of the hard
        third has p < 0.05, and whether the interval of the easy third stays above ``-easy_margin``; looking earlier
        would be looking often, and a descriptive study claims nothing. With several references an arm succeeds where
        it has both against each of them. Tuning runs have differences only.

    Raises
    ------
    ValueError
        If no run of the reference is done, or the ranking names an arm without recorded runs.
    """
    done, order = _done_and_ranking(runs, ranking)
    if not any(arm == reference for arm, _ in done):
        raise ValueError(f"no run of the reference arm {reference!r} is done; done are {sorted({a for a, _ in done})}.")
    kind = next(iter(done.values())).configuration["kind"]
    tuning = kind == "tuning"
    key = "validation_by_class" if tuning else "test_by_class"
    rows = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        seeds = sorted(s for a, s in done if a == arm)
        if not seeds:
            continue
        accuracy = levels(np.array([done[arm, s].record[key] for s in seeds]), order).mean(axis=0)
        row = {"seeds": len(seeds)} | dict(zip(LEVELS, 100 * accuracy, strict=True))
        shared = [s for s in seeds if (reference, s) in done]
        if shared and arm != reference:
            own, other = ([done[a, s] for s in shared] for a in (arm, reference))
            change = np.mean([a.record[key] for a in own], axis=0) - np.mean([b.record[key] for b in other], axis=0)
            row |= {f"Δ {level}": 100 * value for level, value in zip(LEVELS, levels(change, order), strict=True)}
            if not tuning and len(shared) > 1:
                right = np.stack([correct(a).astype(float) - correct(b) for a, b in zip(own, other, strict=True)])
                low, high, p = interval(right, labels_of(own[0]), order)
                for i, level in enumerate(LEVELS):
                    row |= {f"low {level}": 100 * low[i], f"high {level}": 100 * high[i], f"p {level}": p[i]}
        rows[arm] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    if "p hard" in frame:
        for level in LEVELS:
            frame[f"p {level}"] = holm(frame[f"p {level}"], count=len({run.arm for run in runs}) - 1)
        if kind == "confirmatory" and len(done) == len(runs):
            compared = frame["Δ hard"].notna()
            frame["hard gains"] = ((frame["p hard"] < 0.05) & (frame["Δ hard"] > 0)).where(compared)
            frame["easy kept"] = (frame["low easy"] > -easy_margin).where(compared)
    return frame


def _done_and_ranking(runs: list[Run], ranking: str) -> tuple[dict, np.ndarray]:
    done = {(run.arm, run.seed): run for run in runs if run.record}
    known = list(dict.fromkeys(arm for arm, _ in done))
    arms = known if ranking == "all" else ranking.split("+")
    if not known or set(arms) - set(known):
        raise ValueError(f"ranking is {ranking!r}; expected 'all' or arms with runs that are done, such as 'erm+mr2'.")
    return done, validation_ranking([[run.record for (a, _), run in done.items() if a == arm] for arm in arms])


def joint(
    runs: list[Run], *, references: list[str], ranking: str = "all", easy_margin: float = 1.0, share: float = 0.0
) -> pd.DataFrame:
    """What an arm must show for a success, as one hypothesis: every endpoint against every reference.

    Success is that the hard third gains over each reference and that against each of them the easy third does not lose
    ``easy_margin`` points. It is shown where all of these are, so the p-value of the whole is the largest of theirs
    (an intersection-union test, Berger 1982), and Holm's correction of it over the arms holds the probability of any
    false success. The verdicts of :func:`table` do not: they do not correct the easy third, which may wrongly pass as
    kept in each of the arms. (That gains are corrected for each reference by itself does no harm: an arm that does not
    beat both does not beat the better one, and there the correction holds.)

    Parameters
    ----------
    runs : list of Run
        Of one study, all of them done.
    references : list of str
        The arms to subtract.
    ranking, easy_margin
        As for :func:`table`.
    share
        As for :func:`interval`.

    Returns
    -------
    DataFrame
        By arm, the references left out: ``p hard`` and ``p easy``, the largest over the references, each two-sided as
        in :func:`table`, 1 where the difference has the wrong sign, and missing where it never varies; ``p``, the
        larger of both after Holm; and ``succeeds``, whether it is below 0.05.

    Raises
    ------
    ValueError
        If a run is missing, or a reference or the ranking names an unknown arm.
    """
    done, order = _done_and_ranking(runs, ranking)
    if missing := len(runs) - len(done):
        raise ValueError(f"{missing} of {len(runs)} runs are not done; a success is judged once all of them are.")
    if unknown := set(references) - {arm for arm, _ in done}:
        raise ValueError(f"references holds {', '.join(sorted(unknown))}; expected arms of the study.")
    seeds = sorted({run.seed for run in runs})
    right = {arm: np.stack([correct(done[arm, seed]).astype(float) for seed in seeds]) for arm, _ in done}
    rows = {}
    for arm in (arm for arm in right if arm not in references):
        p = {"hard": 0.0, "easy": 0.0}
        for reference, (level, shift) in itertools.product(references, (("hard", 0), ("easy", easy_margin / 100))):
            at = LEVELS.index(level)
            difference = right[arm] - right[reference] + shift
            low, high, two_sided = interval(difference, labels_of(runs[0]), order, share=share)
            p[level] = np.maximum(p[level], two_sided[at] if low[at] + high[at] > 0 else 1.0)
        rows[arm] = {f"p {level}": value for level, value in p.items()}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame["p"] = holm(frame.max(axis=1, skipna=False), count=len(frame))
    frame["succeeds"] = frame["p"] < 0.05
    return frame


def interval(
    difference: np.ndarray, labels: np.ndarray, ranking: np.ndarray, level: float = 0.95, *, share: float = 0.0
):
    r"""Interval for a mean difference over seeds × test images, both of which are samples.

    Seeds and images are crossed, so the variance of the mean is estimated by
    :math:`\hat V_{seeds} + \hat V_{images} - \hat V_{residual}` (each of the first two holds the residual once), images
    being drawn within their class. The quantile is Student's t with one degree of freedom less than there are seeds:
    with five seeds the percentiles of a bootstrap would be a third too narrow. Where most of the variance is of images
    the interval is wider than it need be.

    The ranking is taken as given. What seeds share, they do not vary: if each draws the share f of one pool of training
    images, the interval is about draws from this pool. About other pools, the variance that comes from the draw must be
    multiplied by :math:`1 + S f / (1 - f)`; ``share`` does so for all variance over seeds, which is too much where some
    of it comes from first weights and order.

    Parameters
    ----------
    difference : ndarray
        [S, N]: a difference of scores by seed and image.
    labels : ndarray
        [N]: class of each image.
    ranking : ndarray
        [K]: classes, easiest first.
    level : float
        Of the interval.
    share : float
        f in [0, 1), for an interval about other pools; 0 for one about this pool.

    Returns
    -------
    low, high, p : ndarray
        [4] each, for the levels overall, easy, medium and hard; p is two-sided.

    Raises
    ------
    ValueError
        With fewer than two seeds, or fewer than two images of a class, or a share outside [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"share is {share!r}; expected the part of a pool that a seed draws, at least 0 and below 1.")
    if len(difference) < 2 or np.bincount(labels, minlength=len(ranking)).min() < 2:
        raise ValueError(f"difference has {len(difference)} seeds; expected at least 2, and 2 images of each class.")
    seeds, classes = len(difference), len(ranking)
    by_class = [difference[:, labels == k] for k in range(classes)]
    mean = np.stack([rows.mean(axis=1) for rows in by_class], axis=1)
    image = np.array([rows.mean(axis=0).var(ddof=1) / rows.shape[1] for rows in by_class])
    residual = []
    for rows in by_class:
        rest = rows - rows.mean(axis=0) - rows.mean(axis=1, keepdims=True) + rows.mean()
        residual.append((rest**2).sum() / ((seeds - 1) * (rows.shape[1] - 1)) / rows.size)
    parts = [np.arange(classes), *np.array_split(ranking, 3)]
    images = np.array([max((image - residual)[part].sum(), 0) / len(part) ** 2 for part in parts])
    by_seed = levels(mean, ranking)
    pools = 1 + seeds * share / (1 - share)
    centre, error = by_seed.mean(axis=0), np.sqrt(pools * by_seed.var(axis=0, ddof=1) / seeds + images)
    half = stats.t.ppf((1 + level) / 2, seeds - 1) * error
    # Differences that never vary are no certainty: without a difference p is 1, else there is none.
    p = np.where(centre == 0, 1.0, np.nan)
    np.divide(np.abs(centre), error, out=p, where=error > 0)
    p = np.where(error > 0, 2 * stats.t.sf(p, seeds - 1), p)
    return centre - half, centre + half, p


def holm(p: pd.Series, count: int) -> pd.Series:
    """Adjust p-values for the number of them that was planned (Holm 1979); missing ones stay missing."""
    known = p.dropna().sort_values()
    factors = count - np.arange(len(known))
    return (known * factors).cummax().clip(upper=1).reindex(p.index)


def in_words(p: float) -> str:
    """A p-value as people read it; nothing where there is none."""
    return "" if np.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def readable(frame: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: accuracies, then each difference with its interval in one cell.

    The p-value and what it decides appear together, once the study may claim something.
    """
    cells = {"seeds": frame["seeds"].astype(str)} | {level: frame[level].map("{:.1f}".format) for level in LEVELS}
    for level in LEVELS if "Δ hard" in frame else ():
        cells[f"Δ {level}"] = [
            ""
            if np.isnan(row[f"Δ {level}"])
            else f"{row[f'Δ {level}']:+.1f}"
            if np.isnan(row.get(f"low {level}", np.nan))
            else f"{row[f'Δ {level}']:+.1f} [{row[f'low {level}']:+.1f},\u00a0{row[f'high {level}']:+.1f}]"
            for _, row in frame.iterrows()
        ]
    if "hard gains" in frame:
        cells["p hard (Holm)"] = frame["p hard"].map(in_words)
    for name in ("hard gains", "easy kept"):
        if name in frame:
            cells[name] = frame[name].map({True: "yes", False: "no"}).fillna("")
    return pd.DataFrame(cells, index=frame.index)


def labels_of(run: Run) -> np.ndarray:
    """Classes of the test images, [N]."""
    with np.load(run.result.with_suffix(".npz")) as arrays:
        return arrays["label"]


def correct(run: Run) -> np.ndarray:
    """Which test images a run classified correctly, bool [N]."""
    with np.load(run.result.with_suffix(".npz")) as arrays:
        return arrays["prediction"] == arrays["label"]
