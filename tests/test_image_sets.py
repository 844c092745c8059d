"""Image sets in their real layout on disk, made small; and the sentence said when one is missing or incomplete."""

import hashlib
import io
import json
import pickle
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image
from scipy.io import savemat

from mr2_core import image_sets
from mr2_core.data import DataError
from mr2_core.image_sets import PLACE, SETS, load_image_set
from mr2_core.loaders import FolderLoader


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Stand in for every server; the data of this machine is not looked at."""

    def refuse(*_, **__):
        raise urllib.error.URLError("no network in the tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.delenv("MR2_DATA", raising=False)


def picture(path, red):
    """A JPEG, 40 wide and 60 high, of one red."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 60), (red, 0, 0)).save(path)


def make_pets(root):
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    lists = {
        "trainval": ["Abyssinian_1", "great_pyrenees_2", "Abyssinian_3"],
        "test": ["great_pyrenees_1", "Abyssinian_9"],
    }
    for split, names in lists.items():
        lines = [f"{name} {1 + name.startswith('great')} {1 + name.startswith('great')} 1" for name in names]
        (folder / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
        for name in names:
            picture(folder / "images" / f"{name}.jpg", 200 * name.startswith("great"))
    return {"train": [0, 1, 0], "test": [1, 0]}, {0: "Abyssinian", 1: "Great Pyrenees"}


def make_flowers(root, monkeypatch):
    folder, labels = root / "flowers-102", [1, 102, 1, 102]
    for number, label in enumerate(labels, 1):
        picture(folder / "jpg" / f"image_{number:05}.jpg", 200 * (label == 102))
    savemat(folder / "imagelabels.mat", {"labels": [labels]})
    savemat(folder / "setid.mat", {"trnid": [[2, 1]], "valid": [[3, 2]], "tstid": [[4, 3]]})
    files = {key: (name, None) for key, (name, _) in torchvision.datasets.Flowers102._file_dict.items()}
    monkeypatch.setattr(torchvision.datasets.Flowers102, "_file_dict", files)
    return {"train": [101, 0], "validation": [0, 101], "test": [101, 0]}, {0: "pink primrose", 101: "blackberry lily"}


def make_food(root):
    lists = {"train": {"apple_pie": ["apple_pie/1", "apple_pie/2"], "waffles": ["waffles/3"]}}
    lists["test"] = {"apple_pie": ["apple_pie/4"], "waffles": ["waffles/5"]}
    (root / "food-101" / "meta").mkdir(parents=True)
    for split, classes in lists.items():
        (root / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(classes))
        for name in sum(classes.values(), []):
            picture(root / "food-101" / "images" / f"{name}.jpg", 200 * name.startswith("waffles"))
    return {"train": [0, 0, 1], "test": [0, 1]}, {0: "apple_pie", 1: "waffles"}


def make_aircraft(root):
    data = root / "fgvc-aircraft-2013b" / "data"
    data.mkdir(parents=True)
    (data / "variants.txt").write_text("707-320\nTornado F\n")
    lists = {"train": ["0000001 707-320", "0000002 Tornado F"], "val": ["0000003 Tornado F"], "test": ["04 707-320"]}
    for split, lines in lists.items():
        (data / f"images_variant_{split}.txt").write_text("\n".join(lines) + "\n")
        for line in lines:
            name, variant = line.split(" ", 1)
            picture(data / "images" / f"{name}.jpg", 200 * (variant == "Tornado F"))
    return {"train": [0, 1], "validation": [1], "test": [0]}, {0: "707-320", 1: "Tornado F"}


def make_cars(root):
    folder, columns = root / "stanford_cars", [("class", "O"), ("fname", "O")]
    (folder / "devkit").mkdir(parents=True)
    names = np.empty((1, 2), dtype=object)
    names[0] = ["AM General Hummer SUV 2000", "smart fortwo Convertible 2012"]
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": names})
    lists = {"train": [1, 2, 2], "test": [2, 1]}
    paths = {"train": folder / "devkit" / "cars_train_annos.mat", "test": folder / "cars_test_annos_withlabels.mat"}
    for split, labels in lists.items():
        rows = np.array([[(label, f"{i:05}.jpg") for i, label in enumerate(labels, 1)]], dtype=columns)
        savemat(paths[split], {"annotations": rows})
        for i, label in enumerate(labels, 1):
            picture(folder / f"cars_{split}" / f"{i:05}.jpg", 200 * (label == 2))
    return {"train": [0, 1, 1], "test": [1, 0]}, {0: names[0][0], 1: names[0][1]}


def add(archive, name, content):
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def make_imagenet(root, monkeypatch):
    """The three archives as they are handed out; the meta file lists a parent, which is no class."""
    root.mkdir(exist_ok=True)
    folder, images = root / "made", {}
    for red in (0, 200):
        picture(folder / f"{red}.jpg", red)
        images[red] = (folder / f"{red}.jpg").read_bytes()
    columns = [(name, "O") for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    meta = [(1, "n02119789", "kit fox, Vulpes macrotis", "", 0), (2, "n01440764", "tench, Tinca tinca", "", 0)]
    savemat(folder / "meta.mat", {"synsets": np.array([*meta, (3, "n00001740", "entity", "", 2)], dtype=columns)})
    devkit = "ILSVRC2012_devkit_t12"
    with tarfile.open(root / f"{devkit}.tar.gz", "w:gz") as archive:
        add(archive, f"{devkit}/data/meta.mat", (folder / "meta.mat").read_bytes())
        add(archive, f"{devkit}/data/ILSVRC2012_validation_ground_truth.txt", b"1\n2\n")
    with tarfile.open(root / "ILSVRC2012_img_train.tar", "w") as archive:
        for wnid, red in (("n01440764", 0), ("n02119789", 200)):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as one:
                add(one, f"{wnid}_1.JPEG", images[red])
            add(archive, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(root / "ILSVRC2012_img_val.tar", "w") as archive:
        add(archive, "ILSVRC2012_val_00000001.JPEG", images[200])
        add(archive, "ILSVRC2012_val_00000002.JPEG", images[0])
    from torchvision.datasets import imagenet

    sums = {
        split: (name, hashlib.md5((root / name).read_bytes()).hexdigest())
        for split, (name, _) in imagenet.ARCHIVE_META.items()
    }
    monkeypatch.setattr(imagenet, "ARCHIVE_META", sums)
    return {"train": [0, 1], "test": [0, 1]}, {0: "tench, Tinca tinca", 1: "kit fox, Vulpes macrotis"}


MADE = {
    "pets": make_pets,
    "flowers": make_flowers,
    "food101": make_food,
    "aircraft": make_aircraft,
    "cars": make_cars,
    "imagenet": make_imagenet,
}


def made(name, root, monkeypatch):
    """Make a small copy, and let its sizes be the official ones."""
    patch = (monkeypatch,) if name in ("flowers", "imagenet") else ()
    labels, names = MADE[name](root, *patch)
    kind, splits, *rest = SETS[name]
    splits = {part: (split, len(labels[part])) for part, (split, _) in splits.items()}
    monkeypatch.setitem(SETS, name, (kind, splits, *rest))
    return labels, names


@pytest.mark.parametrize("name", SETS)
def test_official_parts_labels_and_names(name, tmp_path, monkeypatch):
    labels, names = made(name, tmp_path, monkeypatch)
    parts = load_image_set(name, tmp_path)
    assert list(parts) == list(labels)
    for part, images in parts.items():
        assert images.targets == labels[part]
        assert {k: images.classes[k] for k in names} == names
        assert len(images) == len(labels[part])
        for index, label in enumerate(images.targets):
            image = images[index]
            assert image.size == (40, 40 if name == "aircraft" else 60), "the banner is cut off"
            assert image.mode == "RGB"
            bright = np.asarray(image)[..., 0].mean() > 100
            assert bright == (label != min(names)), "the image is that of the label"
    again = pickle.loads(pickle.dumps(parts["train"]))
    assert again[0].size == parts["train"][0].size, "workers get a copy"


@pytest.mark.parametrize("name", SETS)
def test_a_missing_set_is_told_where_to_lie(name, tmp_path):
    with pytest.raises(DataError) as caught:
        load_image_set(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"dataset '{name}' could not be read in {tmp_path} (")
    assert "\n" not in message
    assert SETS[name][2] in message
    reason = {"cars": "its host is gone", "imagenet": "cannot be downloaded without an account"}
    assert reason.get(name, "connect to the network") in message
    if name not in reason:
        assert "no network in the tests" in message
        with pytest.raises(DataError, match="not found"):
            load_image_set(name, tmp_path, download=False)


def test_an_incomplete_set_is_not_taken_for_the_whole(tmp_path, monkeypatch):
    labels, _ = made("pets", tmp_path, monkeypatch)
    lost = tmp_path / "oxford-iiit-pet" / "images" / "Abyssinian_3.jpg"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(
        DataError, match=r"3 images in its part 'train', of which 1 are missing, such as .*_3\.jpg: del"
    ):
        load_image_set("pets", tmp_path)
    lost.write_bytes(content[:300])
    with pytest.raises(DataError, match=r"_3\.jpg is not a readable image"):
        load_image_set("pets", tmp_path)["train"][2]
    monkeypatch.setitem(SETS, "pets", (SETS["pets"][0], {"train": ("trainval", 3_680)}, *SETS["pets"][2:]))
    with pytest.raises(DataError, match="lists 3 images in its part 'train', expected 3,680: delete"):
        load_image_set("pets", tmp_path)


def test_without_a_root_it_is_beside_the_raw_files(tmp_path, monkeypatch):
    made("food101", tmp_path / "raw", monkeypatch)
    monkeypatch.setenv("MR2_DATA", str(tmp_path))
    assert len(load_image_set("food101")["train"]) == 3


def test_folders_and_arrays_have_the_same_form(tmp_path):
    for part, red in (("train", 0), ("train", 200), ("val", 200)):
        picture(tmp_path / part / ("b" if red else "a") / f"{red}.png", red)
    with pytest.raises(DataError, match="has a in one of train and val only"):
        load_image_set("folder", tmp_path)
    picture(tmp_path / "val" / "a" / "0.png", 0)
    parts = load_image_set("folder", tmp_path)
    assert {part: images.targets for part, images in parts.items()} == {"train": [0, 1], "test": [0, 1]}
    assert parts["test"].classes == ["a", "b"]
    digits = load_image_set("digits")
    assert len(digits["test"]) == 360
    assert (digits["test"][0].size, digits["test"][0].mode) == ((8, 8), "RGB")
    source, label = digits["train"].samples[5]
    np.testing.assert_array_equal(np.asarray(digits["train"][5]), source.repeat(3, axis=2))
    assert label == digits["train"].targets[5]


def test_wrong_names_and_places_are_named(tmp_path):
    with pytest.raises(DataError, match="unknown dataset 'birds': expected one of cifar100, .*pets.*imagenet"):
        load_image_set("birds")
    with pytest.raises(DataError, match="needs to know where your data is"):
        load_image_set("folder")
    with pytest.raises(DataError, match="cannot be read .*: arrange the images as train/ and test/"):
        load_image_set("folder", tmp_path)


def test_servers_are_not_waited_for_for_ever(tmp_path, monkeypatch):
    patience = []

    def served(*_, **__):
        patience.append(image_sets.socket.getdefaulttimeout())
        raise urllib.error.URLError("slow")

    monkeypatch.setattr(urllib.request, "urlopen", served)
    with pytest.raises(DataError, match="slow"):
        load_image_set("food101", tmp_path)
    assert set(patience) == {60}
    assert image_sets.socket.getdefaulttimeout() is None


def test_the_folder_loader_can_read_a_part(tmp_path, monkeypatch):
    made("food101", tmp_path, monkeypatch)
    part = load_image_set("food101", tmp_path)["train"]
    monkeypatch.setattr(torchvision.datasets, "ImageFolder", lambda images: images)
    loader = FolderLoader(part, batch_size=3, size=32, workers=0, mean=(0, 0, 0), std=(1, 1, 1))
    ((images, labels),) = loader.epoch(0)
    assert images.shape == (3, 3, 32, 32)
    torch.testing.assert_close((images[:, 0].mean(dim=(1, 2)) > 0.4).long(), labels)


def test_the_page_on_data_says_what_must_lie_where():
    page = (Path(__file__).resolve().parent.parent / "book" / "data.md").read_text(encoding="utf-8")
    for name, (*_, layout, advice) in SETS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        _, _, itself, cell, _ = row.split("|")
        assert cell.replace("`", "").strip() == layout
        assert (itself.strip() == "yes") == (advice == PLACE)
