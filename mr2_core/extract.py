"""``python -m mr2_core extract``: a frozen backbone's features of a whole dataset, piece by piece."""

import contextlib
import dataclasses
import glob
import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import zipfile
from pathlib import Path

import filelock
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mr2_core.backbones import TIMM, backbone, fingerprint, first_line
from mr2_core.data import DataError
from mr2_core.image_sets import load_image_set
from mr2_core.studies import provenance

BATCH, BATCHES = 64, 16  # images a batch, batches a piece


class Prepared(Dataset):
    """The images of a part, from the ``start``-th on, as a backbone wants them."""

    def __init__(self, images, preprocessing, start):
        self.images, self.preprocessing, self.start = images, preprocessing, start

    def __len__(self):
        return len(self.images) - self.start

    def __getitem__(self, index):
        """Return float32 [3, H, W]."""
        return self.preprocessing(self.images[self.start + index])


def extract(dataset, name, *, root=None, out=None, weights=None, size=None, device="cpu", workers=0):
    """Write a backbone's features of every image of a dataset.

    Computed in float32, stored in float16. Every 1,024 images are written at once and kept when the process is killed:
    the same call goes on after them. No more than that is in memory at any time.

    Parameters
    ----------
    dataset, root : str, path
        As in :func:`mr2_core.image_sets.load_image_set`.
    name, weights, size : str, path, int
        As in :func:`mr2_core.backbones.backbone`.
    out : path, optional
        The file, by default ``_runs/features/<dataset>-<name>.npz``.
    device : str
        Where to compute.
    workers : int
        Processes that read and prepare images; 0 does that in this one.

    Returns
    -------
    Path
        The file: ``x_<part>`` float16 [N, D], ``y_<part>`` int64 [N] for each part, ``class_names`` and ``provenance``,
        a JSON text.

    Raises
    ------
    DataError
        If the data cannot be read, the file exists and holds something else, another process is writing it, or features
        leave float16's range.
    ValueError
        If the backbone cannot be had.
    """
    out = Path(out or Path("_runs") / "features" / f"{dataset}-{name}.npz")
    parts = load_image_set(dataset, root)
    network, preprocessing, width = backbone(name, weights=weights, size=size)
    labels = {part: np.array(images.targets, dtype=np.int64) for part, images in parts.items()}
    packages = ("torch", "torchvision", "pillow", *(["timm"] if name in TIMM else []))
    identity = {
        "dataset": dataset,
        "data_sha256": data_fingerprint(parts),
        "backbone": name,
        "weights_sha256": fingerprint(network),
        "preprocessing": dataclasses.asdict(preprocessing),
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    pieces = out.with_name(f"{out.name}.{key[:12]}.pieces")
    with claimed(out):
        if not out.exists():
            try:
                network.to(device, memory_format=torch.channels_last)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(
                    f"device is {device!r}, which is not here ({first_line(error)}); expected cpu or cuda"
                ) from error
            pieces.mkdir(exist_ok=True)
            for part, images in parts.items():
                try:
                    write_pieces(network, images, preprocessing, pieces, part, device, workers)
                except DataError as error:  # a worker's comes wrapped in its traceback
                    raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error
            arrays = {f"y_{part}": y for part, y in labels.items()}
            arrays["class_names"] = np.array(parts["train"].classes)
            arrays["provenance"] = np.array(json.dumps({**identity, "identity": key, **provenance(device)}))
            join(pieces, out, {f"x_{part}": (part, len(images), width) for part, images in parts.items()}, arrays)
        elif identity_of(out) != key:
            raise DataError(f"{out} exists and holds something else: delete it or name another file")
        for left in out.parent.glob(f"{glob.escape(out.name)}.*.pieces"):  # also of images that were replaced since
            shutil.rmtree(left)
    return out


@contextlib.contextmanager
def claimed(out):
    """Let one process at a time write a file."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{out}.lock", blocking=False)
        lock.acquire()
    except filelock.Timeout as error:
        raise DataError(f"another process is writing {out}: wait for it, then run the same command again") from error
    except OSError as error:
        raise DataError(f"{out} cannot be made ({error}): free or unlock its folder, or name another file") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file
            os.unlink(lock.lock_file)
        lock.release()


@torch.inference_mode()
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
def write_pieces(network, images, preprocessing, pieces, part, device, workers):
    """Write the features of one part from the first piece on that is not there, each atomically."""
    piece = next(k for k in itertools.count() if not (pieces / f"{part}-{k:06}.npy").exists())
    start, features = min(piece * BATCH * BATCHES, len(images)), []
    batches = DataLoader(
        Prepared(images, preprocessing, start),
        BATCH,
        num_workers=workers,
        pin_memory=torch.device(device).type == "cuda",
    )
    with tqdm(total=len(images), initial=start, desc=part, unit="image", mininterval=1.0) as bar:
        for index, batch in enumerate(batches, 1):
            features.append(network(batch.to(device, non_blocking=True)).float().cpu())
            if len(features) == BATCHES or index == len(batches):
                rows = torch.cat(features).half()
                if not rows.isfinite().all():
                    raise DataError(f"features of {part} images leave float16's range: choose another backbone or size")
                temporary = pieces / f"{part}-{piece:06}.{os.getpid()}.partial"
                with temporary.open("wb") as file:
                    np.save(file, rows.numpy())
                os.replace(temporary, pieces / f"{part}-{piece:06}.npy")
                piece, features = piece + 1, []
            bar.update(len(batch))


def join(pieces, out, streamed, arrays):
    """Write an ``.npz`` of arrays too large for memory, piece after piece, and of small ones."""
    temporary = pieces / f"joined.{os.getpid()}.partial"
    with zipfile.ZipFile(temporary, "w") as archive:
        for name, (part, count, width) in streamed.items():
            header = {"descr": "<f2", "fortran_order": False, "shape": (count, width)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                rows = 0
                for piece in sorted(pieces.glob(f"{part}-*.npy")):
                    block = np.load(piece)
                    file.write(block.tobytes())
                    rows += len(block)
            if rows != count:
                raise DataError(f"{pieces} holds {rows} of {count} {part} images: delete it and run the command again")
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    os.replace(temporary, out)


def data_fingerprint(parts):
    """sha256 over labels with the pixels of arrays, or with the names, sizes and first 64 KiB of files anywhere."""
    digest = hashlib.sha256()
    for part, images in parts.items():
        digest.update(f"{part} {images.classes}".encode())
        for source, label in images.samples:
            if isinstance(source, np.ndarray):
                digest.update(source.tobytes())
            else:
                digest.update(f"{os.path.basename(source)} {os.path.getsize(source)} ".encode())
                with open(source, "rb") as file:
                    digest.update(file.read(2**16))
            digest.update(str(label).encode())
    return digest.hexdigest()


def identity_of(path):
    """What a features file says it holds; None if it says nothing."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return json.loads(str(file["provenance"]))["identity"]
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile):
        return None
