"""Image sets whose images differ in size and are read one at a time, in their official splits."""

import contextlib
import os
import socket
from pathlib import Path

import numpy as np
from PIL import Image

from mr2_core.data import DataError, data_folder, load_dataset

PLACE = "connect to the network to have it downloaded, or put {layout} there"
CARS = "its host is gone, so get it from a mirror, such as one of those on Kaggle, and put {layout} there"
IMAGENET = "it cannot be downloaded without an account, so get {layout} from image-net.org and put them there"

# The class of torchvision, each part's split there and its number of images, what must lie in the folder, what to do.
SETS = {
    "pets": (
        "OxfordIIITPet",
        {"train": ("trainval", 3_680), "test": ("test", 3_669)},
        "oxford-iiit-pet/images and oxford-iiit-pet/annotations",
        PLACE,
    ),
    "flowers": (
        "Flowers102",
        {"train": ("train", 1_020), "validation": ("val", 1_020), "test": ("test", 6_149)},
        "flowers-102/jpg, flowers-102/imagelabels.mat and flowers-102/setid.mat",
        PLACE,
    ),
    "food101": (
        "Food101",
        {"train": ("train", 75_750), "test": ("test", 25_250)},
        "food-101/images and food-101/meta",
        PLACE,
    ),
    "aircraft": (
        "FGVCAircraft",
        {"train": ("train", 3_334), "validation": ("val", 3_333), "test": ("test", 3_333)},
        "fgvc-aircraft-2013b/data",
        PLACE,
    ),
    "cars": (
        "StanfordCars",
        {"train": ("train", 8_144), "test": ("test", 8_041)},
        "stanford_cars/cars_train, stanford_cars/cars_test, stanford_cars/devkit and "
        "stanford_cars/cars_test_annos_withlabels.mat",
        CARS,
    ),
    "imagenet": (
        "ImageNet",
        {"train": ("train", 1_281_167), "test": ("val", 50_000)},
        "ILSVRC2012_devkit_t12.tar.gz, ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar",
        IMAGENET,
    ),
}


class Images:
    """One part of an image set: what can be listed is in memory, what must be decoded is read on demand.

    It has what :class:`mr2_core.loaders.FolderLoader` uses of torchvision's ``ImageFolder``.

    Attributes
    ----------
    samples : list of (source, int)
        A path, or an array uint8 [H, W, 3 or 1], and the label of each image.
    classes : list of str
        The K class names.
    targets : list of int
        The labels alone.
    """

    def __init__(self, samples, classes, *, banner=0):
        self.samples, self.classes, self.banner = samples, classes, banner

    @property
    def targets(self):
        """Labels of all images, in their order."""
        return [label for _, label in self.samples]

    def __len__(self):
        return len(self.samples)

    def loader(self, source):
        """Read an image as RGB, without its banner: so many rows at the bottom, which name the photographer."""
        if isinstance(source, np.ndarray):
            return Image.fromarray(source.squeeze(-1) if source.shape[-1] == 1 else source).convert("RGB")
        with Image.open(source) as image:
            width, height = image.size
            return image.convert("RGB").crop((0, 0, width, height - self.banner))

    def __getitem__(self, index):
        """Return the image, RGB."""
        source, _ = self.samples[index]
        try:
            return self.loader(source)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{source} is not a readable image ({error}): replace or remove it") from error


def load_image_set(name, root=None, *, download=True):
    """List the images of a dataset by its official parts.

    Parameters
    ----------
    name : str
        "pets", "flowers", "food101", "aircraft" (by variant), "cars", "imagenet" (its validation images are the part
        "test"); "folder": folders `train` and `test` (or `val`), each with one folder of images per class, of any size;
        or a dataset of :func:`mr2_core.load_dataset`.
    root : path, optional
        The folder that holds the dataset's own folder (for "imagenet" the one with its archives, which are unpacked
        there). Without it, `raw` in the folder MR2_DATA names, else in the repository's `data`.
    download : bool, default True
        Whether what is missing and has a host may be downloaded.

    Returns
    -------
    dict of str to Images
        "train", "test" and, where the dataset has one, "validation".

    Raises
    ------
    DataError
        If the dataset is missing or incomplete; the message says where to put what.
    """
    if name in SETS:
        return _torchvision(name, Path(root).expanduser().absolute() if root else _raw(), download)
    if name == "folder" and root:
        return _folders(Path(root).expanduser().absolute())
    if name not in (arrays := ("cifar100", "digits", "arrays", "folder")):
        raise DataError(f"unknown dataset {name!r}: expected one of {', '.join((*arrays, *SETS))}")
    dataset = load_dataset(name, root, download=download)
    parts = {"train": (dataset.x_train, dataset.y_train), "test": (dataset.x_test, dataset.y_test)}
    return {part: Images(list(zip(x, y.tolist(), strict=True)), dataset.class_names) for part, (x, y) in parts.items()}


def _raw():
    return (Path(named).expanduser().absolute() if (named := os.environ.get("MR2_DATA")) else data_folder()) / "raw"


def _torchvision(name, folder, download):
    import torchvision.datasets

    kind, splits, layout, advice = SETS[name]
    fetch = {"download": True} if download and advice == PLACE else {}
    parts = {}
    for part, (split, count) in splits.items():
        try:
            with _patience(60):
                listed = getattr(torchvision.datasets, kind)(folder, split=split, **fetch)
        except Exception as error:  # missing, torn or misplaced files fail in a dozen ways, and so does a download
            what = str(error).split("\n")[0].rstrip(".") or type(error).__name__
            raise DataError(
                f"dataset {name!r} could not be read in {folder} ({what}): {advice.format(layout=layout)}"
            ) from error
        samples = [(str(path), int(label)) for path, label in _samples(listed)]
        missing = [path for path, _ in samples if not os.path.isfile(path)]
        if missing or len(samples) != count:
            what = f"of which {len(missing)} are missing, such as {missing[0]}" if missing else f"expected {count:,}"
            raise DataError(
                f"dataset {name!r} in {folder} lists {len(samples):,} images in its part {part!r}, {what}: "
                f"delete what is there and load again, or put {layout} there whole"
            )
        classes = [", ".join(c) if isinstance(c, tuple) else c for c in listed.classes]
        parts[part] = Images(samples, classes, banner=20 if name == "aircraft" else 0)
    return parts


def _samples(listed):
    """Paths and labels of a dataset of torchvision, which names them in three ways."""
    for name in ("samples", "_samples"):
        if hasattr(listed, name):
            return getattr(listed, name)
    paths = listed._images if hasattr(listed, "_images") else listed._image_files
    return zip(paths, listed._labels, strict=True)


def _folders(root):
    from torchvision.datasets import ImageFolder

    held_out = "val" if (root / "val").is_dir() and not (root / "test").is_dir() else "test"
    try:
        train, test = ImageFolder(root / "train"), ImageFolder(root / held_out)
    except OSError as error:
        layout = "train/ and test/ (or val/) with one folder of images per class"
        raise DataError(f"{root} cannot be read ({error}): arrange the images as {layout}") from error
    if odd := sorted({*train.classes} ^ {*test.classes}):
        raise DataError(f"{root} has {', '.join(odd)} in one of train and {held_out} only: use equal classes")
    return {"train": Images(train.samples, train.classes), "test": Images(test.samples, test.classes)}


@contextlib.contextmanager
def _patience(seconds):
    """Wait so long for a server and no longer; a dead one must not hang a build."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
