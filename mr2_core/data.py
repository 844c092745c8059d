"""Named datasets as numpy arrays, the embedded features, and the protocol's fixed splits.

torch, torchvision and scikit-learn are imported only by the datasets that need them.
"""

import hashlib
import os
import pickle
import socket
import tarfile
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

CIFAR100_PER_CLASS = {"train": 500, "test": 100}
ARCHIVE = "cifar-100-python.tar.gz"


class DataError(ValueError):
    """Data that is missing or unsound; the message says where, what was expected and what to do."""


class Dataset(NamedTuple):
    """Images uint8 [N, H, W, 3 or 1], labels int64 [N] in 0..K-1, and the K class names."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: list[str]

    @property
    def num_classes(self):
        """Number of classes K."""
        return len(self.class_names)


def load_dataset(name, root=None, *, download=True):
    """Load a dataset by name.

    Parameters
    ----------
    name : {"cifar100", "digits", "arrays", "folder"}
        "cifar100": `cifar100.npz`, else the official Python files (downloaded when absent), which are
        then cached as `cifar100.npz`. "digits": scikit-learn's 8 x 8 digits, 36 test images a class.
        "arrays": your own `.npz` with `x_train`, `y_train`, `x_test`, `y_test` and, if you like, `class_names`.
        "folder": folders `train` and `test` (or `val`), each with one folder of images per class.
    root : path, optional
        For "cifar100" the folder to look in; without it the folder MR2_DATA names, then the repository's
        `data`. For "arrays" the `.npz` file, for "folder" the folder. Not used by "digits".
    download : bool, default True
        Whether "cifar100" may be downloaded.

    Returns
    -------
    Dataset

    Raises
    ------
    DataError
        If the data is missing, damaged or not what its name says.
    """
    if name not in (known := ("cifar100", "digits", "arrays", "folder")):
        raise DataError(f"unknown dataset {name!r}: expected one of {', '.join(known)}")
    if root is None and name in ("arrays", "folder"):
        raise DataError(f"dataset {name!r} needs to know where your data is: pass its path as root=...")
    root = None if root is None else Path(root).expanduser().absolute()
    if name == "cifar100":
        return _cifar100(root, download)
    return _digits() if name == "digits" else _arrays(root) if name == "arrays" else _image_folder(root)


def data_folder():
    """Find the repository's `data` folder, the one with a `DATASHEET.md`.

    Returns
    -------
    Path
        The first found going up from the working directory, else the one beside the package.

    Raises
    ------
    DataError
        If there is none.
    """
    here, package = Path.cwd(), Path(__file__).resolve().parent
    for base in (here, *here.parents, package.parent):
        if (base / "data" / "DATASHEET.md").is_file():
            return base / "data"
    raise DataError(
        f"expected a folder data/ with a DATASHEET.md in {here}, above it or beside {package}, found none: "
        "change to a clone of the book's repository"
    )


def load_features(name):
    """Load every array of the embedded file `data/features/<name>.npz`.

    Parameters
    ----------
    name : str

    Returns
    -------
    dict of str to ndarray
        float16 comes back as float32.

    Raises
    ------
    DataError
        If there is no such file (the message lists those there are) or it is damaged.
    """
    folder = data_folder() / "features"
    known = sorted(path.stem for path in folder.glob("*.npz"))
    if name not in known:
        raise DataError(f"no features {name!r} in {folder}: expected one of {', '.join(known) or '(none there)'}")
    arrays = _read_npz(folder / f"{name}.npz", "restore it from the repository")
    return {key: a.astype(np.float32) if a.dtype == np.float16 else a for key, a in arrays.items()}


def subset_per_class(labels, per_class, seed=0):
    """Draw the same number of examples of every class.

    Parameters
    ----------
    labels : array of int, shape [N]
    per_class : int
        For one seed, a smaller draw is contained in a larger one.
    seed : int, default 0

    Returns
    -------
    ndarray of int64
        Indices into `labels`, ascending.

    Raises
    ------
    DataError
        If a class has fewer than `per_class` examples.
    """
    return _draw(labels, per_class, np.random.default_rng([1, seed]))


def split_train_validation(labels, per_class_validation=50, seed=0):
    """Split training examples into a training and a validation part with equal counts a class in the latter.

    Parameters
    ----------
    labels : array of int, shape [N]
    per_class_validation : int, default 50
        For CIFAR-100 the default gives 45,000 and 5,000 examples.
    seed : int, default 0
        Keep it for all runs of a study.

    Returns
    -------
    train_index, validation_index : ndarray of int64
        Disjoint, ascending, together all of `labels`.

    Raises
    ------
    DataError
        If a class would keep no training example.
    """
    # A random stream of its own, so that no subset drawn with the same seed is the validation part itself.
    validation = _draw(labels, per_class_validation, np.random.default_rng([2, seed]), keep=1)
    return np.setdiff1d(np.arange(len(labels)), validation), validation


def _draw(labels, count, rng, keep=0):
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or count < 1:
        raise DataError(f"got {count} a class of labels {list(labels.shape)}: pass at least 1 and labels [N], N > 0")
    classes, sizes = np.unique(labels, return_counts=True)
    if (least := sizes.min()) < (need := count + keep):
        raise DataError(f"class {classes[sizes.argmin()]} has {least} examples, expected {need} or more: draw fewer")
    return np.sort(np.concatenate([rng.permutation(np.flatnonzero(labels == k))[:count] for k in classes]))


def _read_npz(path, fix):
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except MemoryError:
        raise
    except Exception as error:  # a damaged zip fails in a dozen ways
        raise DataError(
            f"{path} is truncated, damaged or no .npz of plain arrays (numbers and strings, no objects): {fix}"
        ) from error


def _checked(arrays, path, fix, fault_of):
    if fault := fault_of(arrays):
        raise DataError(f"{path} {fault}: {fix}")
    y_train, y_test = (arrays[name].astype(np.int64, copy=False) for name in ("y_train", "y_test"))
    return Dataset(arrays["x_train"], y_train, arrays["x_test"], y_test, _names(arrays).tolist())


def _names(arrays):
    return arrays.get("class_names", np.arange(np.unique(arrays["y_train"]).size).astype(str))


def _type(array):
    return f"{array.dtype} {list(array.shape)}"


def _fault(arrays):
    """Say what disqualifies `arrays` as a dataset, as the end of a sentence; None if nothing does."""
    if missing := [name for name in ("x_train", "y_train", "x_test", "y_test") if name not in arrays]:
        return f"holds {', '.join(arrays) or 'nothing'}, expected also {', '.join(missing)}"
    if (names := _names(arrays)).ndim != 1 or names.dtype.kind != "U":
        return f"has class_names {_type(names)}, expected one string a class"
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] not in (1, 3):
            return f"has x_{split} {_type(x)}, expected uint8 [N, H, W, 3 or 1]"
        if y.dtype.kind not in "iu" or y.ndim != 1:
            return f"has y_{split} {_type(y)}, expected int64 [N]"
        if len(x) != len(y) or len(x) == 0:
            return f"has {len(x)} images in x_{split} but {len(y)} labels in y_{split}, expected equally many, not 0"
        if y.min() < 0 or y.max() >= len(names):
            return f"has labels {y.min()} to {y.max()} in y_{split}, expected 0 to {len(names) - 1}, one a class"
    if (train := arrays["x_train"]).shape[1:] != (test := arrays["x_test"]).shape[1:]:
        return f"has x_train {_type(train)} but x_test {_type(test)}, expected images of one size"
    return None


def _cifar100_fault(arrays):
    if fault := _fault(arrays):
        return fault
    classes, names = np.unique(arrays["y_train"]).size, _names(arrays).size
    if classes != 100 or names != 100:
        guess = " (is this CIFAR-10?)" if classes == 10 else ""
        return f"has {classes} classes and {names} class names{guess}, expected CIFAR-100's 100"
    if "class_names" not in arrays:
        return "lacks class_names, expected the 100 names"
    if arrays["x_train"].shape[1:] != (32, 32, 3):
        return f"has x_train {_type(arrays['x_train'])}, expected 32 x 32 RGB images"
    for split, each in CIFAR100_PER_CLASS.items():
        counts = np.bincount(arrays[f"y_{split}"], minlength=100)
        if np.any(wrong := counts != each):
            k = wrong.argmax()
            found = f"{counts.sum():,} {split} images, {counts[k]} of class {k}"
            return f"has {found}, expected {100 * each:,}, {each} a class"
    return None


def _digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]  # grey levels are 0..16
    labels = digits.target.astype(np.int64)
    train, test = split_train_validation(labels, 36)
    return Dataset(images[train], labels[train], images[test], labels[test], [str(k) for k in range(10)])


def _arrays(path):
    if not path.is_file():
        raise DataError(f"{path} is not a file: expected your .npz file, pass its path as root=...")
    fix = "write it again with numpy.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)"
    return _checked(_read_npz(path, fix), path, fix, _fault)


def _image_folder(root):
    from torchvision.datasets import ImageFolder

    layout = "expected train/ and test/ (or val/) with one folder of images per class"
    held_out = "val" if (root / "val").is_dir() and not (root / "test").is_dir() else "test"
    try:
        parts = {"train": ImageFolder(root / "train"), "test": ImageFolder(root / held_out)}
    except OSError as error:
        raise DataError(f"{root} cannot be read ({error}), {layout}: arrange the images so") from error
    if odd := sorted({*parts["train"].classes} ^ {*parts["test"].classes}):
        raise DataError(f"{root} has {', '.join(odd)} in one of train and {held_out} only, {layout}: use equal classes")
    arrays, size, first = {"class_names": np.array(parts["train"].classes)}, None, None
    for split, part in parts.items():
        images = []
        for path, _ in part.samples:
            try:
                images.append(np.asarray(part.loader(path)))  # RGB, whatever the file holds
            except (OSError, ValueError, SyntaxError) as error:
                raise DataError(f"{path} is not a readable image ({error}): replace or remove it") from error
            height, width, _ = images[-1].shape
            size, first = size or (width, height), first or path
            if size != (width, height):
                raise DataError(f"{path} is {width} x {height}, expected {size[0]} x {size[1]} as {first}: resize it")
        arrays |= {f"x_{split}": np.stack(images), f"y_{split}": np.array(part.targets)}
    return _checked(arrays, root, layout, _fault)


def _cifar100(root, download):
    folders = _cifar100_folders(root)
    if cached := next((f / "cifar100.npz" for f in folders if (f / "cifar100.npz").exists()), None):
        fix = "delete it and load again to rebuild it from the official files, or put a sound cifar100.npz there"
        return _checked(_read_npz(cached, fix), cached, fix, _cifar100_fault)
    batches = _cifar100_files(folders[0], download)
    arrays = _cifar100_arrays(batches)
    dataset = _checked(arrays, batches, f"delete it and load again, or unpack {ARCHIVE} there", _cifar100_fault)
    unfinished = folders[0] / f"cifar100.{os.getpid()}.partial.npz"
    try:
        np.savez(unfinished, **arrays)
        os.replace(unfinished, folders[0] / "cifar100.npz")
    except OSError as error:
        warnings.warn(f"cifar100.npz could not be cached in {folders[0]} ({error}): free or unlock it", stacklevel=3)
    finally:
        unfinished.unlink(missing_ok=True)
    return dataset


def _cifar100_folders(root):
    """Folders to look for CIFAR-100 in, best first; the first is where it is cached."""
    source, named = ("MR2_DATA", os.environ.get("MR2_DATA")) if root is None else ("root", root)
    if named and not (named := Path(named).expanduser().absolute()).is_dir():
        what = "is a file" if named.exists() else "does not exist"
        raise DataError(f"{source} is {named}, which {what}: expected a folder, make it or correct {source}")
    if root is not None:
        return [root]
    try:
        own = data_folder()
    except DataError:
        own = Path.cwd() / "data"
    return [named, own] if named else [own]


def _cifar100_files(folder, download):
    """Folder with the official Python files, checked, and unpacked or downloaded first where needed."""
    from torchvision.datasets import CIFAR100
    from torchvision.datasets.utils import extract_archive

    def placed(name):
        return next((p / name for p in (folder, folder / "raw") if (p / name).exists()), None)

    if not (batches := placed(CIFAR100.base_folder)):
        if not (archive := placed(ARCHIVE)):
            archive = folder / "raw" / ARCHIVE
            _download_cifar100(archive, download)
        if fault := _archive_fault(archive):
            raise DataError(f"{archive} {fault}: delete it to have it downloaded, or replace it")
        batches = folder / "raw" / CIFAR100.base_folder
        try:
            extract_archive(archive, batches.parent)
        except OSError as error:
            raise DataError(
                f"{batches.parent} cannot take the files of {archive} ({error}): free or unlock it"
            ) from error
    for name, md5 in (*CIFAR100.train_list, *CIFAR100.test_list, (CIFAR100.meta["filename"], CIFAR100.meta["md5"])):
        if (found := _md5(batches / name)) != md5:
            state = f"has md5 {found}" if found else "is missing"
            guess = " (data_batch_1 beside it is CIFAR-10's)" if (batches / "data_batch_1").exists() else ""
            raise DataError(
                f"{batches / name} {state}{guess}, expected CIFAR-100's with md5 {md5}: "
                f"delete {batches} and load again, or unpack {ARCHIVE} there"
            )
    return batches


def _cifar100_arrays(batches):
    train, test, meta = (pickle.loads((batches / n).read_bytes(), encoding="latin1") for n in ("train", "test", "meta"))
    arrays = {"class_names": np.array(meta["fine_label_names"]), "coarse_names": np.array(meta["coarse_label_names"])}
    arrays["fine_to_coarse"] = np.zeros(len(meta["fine_label_names"]), dtype=np.int64)
    arrays["fine_to_coarse"][train["fine_labels"]] = train["coarse_labels"]
    for split, part in (("train", train), ("test", test)):
        images = part["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # stored as channel, row, column
        arrays |= {f"x_{split}": np.ascontiguousarray(images), f"y_{split}": np.array(part["fine_labels"])}
    return arrays


def _download_cifar100(archive, download):
    from torchvision.datasets import CIFAR10, CIFAR100
    from torchvision.datasets.utils import download_url

    failure, timeout = "a download was not allowed", socket.getdefaulttimeout()
    if download:
        socket.setdefaulttimeout(60)  # a dead server must not hang a build
        try:
            return download_url(CIFAR100.url, archive.parent, archive.name, CIFAR100.tgz_md5)
        except BaseException as error:
            damage = _archive_fault(archive) if archive.exists() else None
            archive.unlink(missing_ok=True)  # half a download must not be taken for the archive next time
            if not isinstance(error, Exception):
                raise
            failure = f"what {CIFAR100.url} sent {damage}" if damage else f"the download failed ({error})"
        finally:
            socket.setdefaulttimeout(timeout)
    folder = archive.parent.parent
    beside = [p for p in (folder, archive.parent) if (p / CIFAR10.base_folder).exists()]
    guess = f" (the {CIFAR10.base_folder} there is CIFAR-10)" if beside else ""
    raise DataError(
        f"{folder} has no cifar100.npz, {CIFAR100.base_folder} or {ARCHIVE}{guess}, and {failure}: "
        f"put {ARCHIVE} (md5 {CIFAR100.tgz_md5}) at {archive}, or set MR2_DATA to a folder that holds cifar100.npz"
    )


def _archive_fault(archive):
    """Say what is wrong with the archive, as the end of a sentence; None if its checksum is right."""
    from torchvision.datasets import CIFAR100

    if (found := _md5(archive)) == CIFAR100.tgz_md5:
        return None
    try:
        with tarfile.open(archive, "r:gz") as tar:
            state = "is CIFAR-10" if any("cifar-10-" in name for name in tar.getnames()) else "is another file"
    except EOFError:
        state = "is truncated"
    except (OSError, tarfile.TarError, zlib.error):
        state = "is no sound tar.gz"
    return f"{state} (md5 {found}), expected CIFAR-100's archive with md5 {CIFAR100.tgz_md5}"


def _md5(path):
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
