"""Datasets, embedded features and splits: what is loaded, and the sentence said when it cannot be."""

import gzip
import hashlib
import io
import os
import pickle
import socket
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR100

from mr2_core import data
from mr2_core.data import DataError, load_dataset, load_features, split_train_validation, subset_per_class

SHA256 = {
    "x_train": "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
    "y_train": "8bf4935e7c77a3096270043c6f3b221b6ecb9c63d1a08608e9af66cff17e977a",
    "x_test": "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
    "y_test": "80031c23f8300724c6fbc588e4bccbe41c6392041782148727bb497b0132c4ad",
}
REAL = Path(os.environ.get("MR2_DATA") or "nowhere").absolute() / "cifar100.npz"
ARCHIVE = "cifar-100-python.tar.gz"
MD5 = CIFAR100.tgz_md5


class Server:
    """Stands in for every server: refuses, or sends `content`; counts the requests."""

    def __init__(self):
        self.requests, self.content = 0, None

    def __call__(self, request, *_, **__):
        self.requests += 1
        if self.content is None:
            raise urllib.error.URLError("no network in the tests")
        response = io.BytesIO(self.content)
        response.url, response.length = request.full_url, len(self.content)
        return response


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """No test reaches the network, and none reads this machine's CIFAR-100 unless it says so."""
    monkeypatch.delenv("MR2_DATA", raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", server := Server())
    return server


@pytest.fixture
def small(monkeypatch):
    """CIFAR-100 with two training images and one test image a class."""
    monkeypatch.setattr(data, "CIFAR100_PER_CLASS", {"train": 2, "test": 1})


def cifar_arrays(classes=100, train=2, test=1):
    rng = np.random.default_rng(0)
    arrays = {"class_names": np.array([f"name {k}" for k in range(classes)])}
    for split, each in (("train", train), ("test", test)):
        arrays[f"y_{split}"] = rng.permutation(np.repeat(np.arange(classes), each))
        arrays[f"x_{split}"] = rng.integers(0, 256, (classes * each, 32, 32, 3), dtype=np.uint8)
    return arrays


def official_folder(folder, arrays):
    """Write `arrays` in the format of the official Python files; class k belongs to coarse class k // 5."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        fine = arrays[f"y_{split}"].tolist()
        rows = arrays[f"x_{split}"].transpose(0, 3, 1, 2).reshape(len(fine), -1)
        batch = {"data": rows, "fine_labels": fine, "coarse_labels": [k // 5 for k in fine]}
        (folder / split).write_bytes(pickle.dumps(batch, protocol=2))
    names = {"fine_label_names": arrays["class_names"].tolist(), "coarse_label_names": [f"c{k}" for k in range(20)]}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def official(tmp_path, monkeypatch, small):
    """A small CIFAR-100 in the official format, folder and archive, whose checksums count as the right ones."""
    folder, arrays = tmp_path / "official" / "cifar-100-python", cifar_arrays()
    official_folder(folder, arrays)
    with tarfile.open(archive := folder.parent / ARCHIVE, "w:gz") as tar:
        tar.add(folder, folder.name)
    monkeypatch.setattr(CIFAR100, "tgz_md5", md5(archive))
    for name in ("train", "test"):
        monkeypatch.setattr(CIFAR100, f"{name}_list", [[name, md5(folder / name)]])
    monkeypatch.setattr(CIFAR100, "meta", CIFAR100.meta | {"md5": md5(folder / "meta")})
    return folder, archive, arrays


@pytest.fixture
def root(tmp_path):
    (folder := tmp_path / "my data").mkdir()
    return folder


def says(*parts, of=load_dataset, args=(), **kwargs):
    """Assert that the call is refused in one sentence that holds all parts."""
    with pytest.raises(DataError) as caught:
        of(*args, **kwargs)
    sentence = str(caught.value)
    for part in parts:
        assert str(part) in sentence
    assert "\n" not in sentence
    return sentence


def assert_same(dataset, arrays):
    for name in ("x_train", "y_train", "x_test", "y_test"):
        found = getattr(dataset, name)
        assert found.dtype == (np.uint8 if name[0] == "x" else np.int64)
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, arrays[name])
    assert dataset.class_names == arrays["class_names"].tolist()
    assert dataset.num_classes == len(arrays["class_names"])


# Names and imports


def test_import_needs_neither_torchvision_nor_sklearn():
    code = "import sys, mr2_core.data; print(*{'torchvision', 'sklearn', 'PIL'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_unknown_name_lists_the_known():
    says("'cifar10'", "cifar100, digits, arrays, folder", args=["cifar10"])


@pytest.mark.parametrize("name", ["arrays", "folder"])
def test_own_data_needs_a_path(name):
    says(repr(name), "root=", args=[name])


# Digits


def test_digits():
    from sklearn.datasets import load_digits

    first, second = load_dataset("digits"), load_dataset("digits", root="anything")
    assert first.x_train.shape == (1437, 8, 8, 1)
    assert first.x_test.shape == (360, 8, 8, 1)
    assert first.class_names == list("0123456789")
    assert np.bincount(first.y_test).tolist() == [36] * 10
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    images = np.concatenate([first.x_train, first.x_test])
    assert images.dtype == np.uint8
    assert images.max() == 255
    # Every original image once, with its label, on the scale 0..255.
    original = np.rint(load_digits().images * 255 / 16).reshape(1797, -1)
    found = np.column_stack([images.reshape(1797, -1), np.concatenate([first.y_train, first.y_test])])
    expected = np.column_stack([original, load_digits().target])
    np.testing.assert_array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])


# The user's own arrays


def own_arrays(**changes):
    arrays = cifar_arrays(classes=3, train=4, test=2) | changes
    return {name: array for name, array in arrays.items() if array is not None}


def saved(path, arrays):
    np.savez(path, **arrays)
    return path


def test_arrays(tmp_path):
    path = saved(tmp_path / "own.npz", own_arrays())
    assert_same(load_dataset("arrays", path), own_arrays())


def test_arrays_without_names_in_another_integer_type(tmp_path, monkeypatch):
    labels = {name: own_arrays()[name].astype(np.uint8) for name in ("y_train", "y_test")}
    saved(tmp_path / "own.npz", own_arrays(class_names=None, **labels))
    monkeypatch.chdir(tmp_path)
    assert_same(load_dataset("arrays", "own.npz"), own_arrays(class_names=np.array(["0", "1", "2"])))


Y = own_arrays()["y_train"]
X = own_arrays()["x_train"]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"x_test": None, "y_test": None}, ["holds class_names, y_train, x_train", "expected also x_test, y_test"]),
        ({"x_train": X / np.float32(255)}, ["x_train float32 [12, 32, 32, 3]", "expected uint8 [N, H, W, 3 or 1]"]),
        ({"x_train": X[..., 0]}, ["x_train uint8 [12, 32, 32]", "expected uint8 [N, H, W, 3 or 1]"]),
        ({"x_train": X.transpose(0, 3, 1, 2)}, ["x_train uint8 [12, 3, 32, 32]", "expected uint8 [N, H, W, 3 or 1]"]),
        ({"y_train": Y.astype(np.float64)}, ["y_train float64 [12]", "expected int64 [N]"]),
        ({"y_train": np.eye(3, dtype=np.int64)[Y]}, ["y_train int64 [12, 3]", "expected int64 [N]"]),
        ({"y_train": Y[:-1]}, ["12 images in x_train but 11 labels in y_train", "expected equally many"]),
        ({"x_train": X[:0], "y_train": Y[:0]}, ["0 images in x_train", "not 0"]),
        ({"y_train": Y + 1}, ["labels 1 to 3 in y_train", "expected 0 to 2"]),
        ({"y_train": Y - 1}, ["labels -1 to 1 in y_train", "expected 0 to 2"]),
        ({"y_train": Y + 1, "class_names": None}, ["labels 1 to 3 in y_train", "expected 0 to 2"]),
        ({"y_test": own_arrays()["y_test"] + 1}, ["labels 1 to 3 in y_test", "expected 0 to 2"]),
        ({"x_test": own_arrays()["x_test"][:, :16]}, ["x_test uint8 [6, 16, 32, 3]", "expected images of one size"]),
        ({"class_names": np.arange(3)}, ["class_names int64 [3]", "expected one string a class"]),
        ({"class_names": np.array(["a", "b", "c"], dtype=object)}, ["plain arrays"]),
    ],
)
def test_unsound_arrays(tmp_path, changes, parts):
    path = saved(tmp_path / "own.npz", own_arrays(**changes))
    says(path, *parts, "write it again with numpy.savez", args=["arrays", path])


def test_arrays_need_a_file(tmp_path):
    says(tmp_path / "none.npz", "is not a file", "root=", args=["arrays", tmp_path / "none.npz"])
    says(tmp_path, "is not a file", args=["arrays", tmp_path])


def test_path_from_home_and_relative_path(tmp_path, monkeypatch):
    saved(tmp_path / "own.npz", own_arrays())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_same(load_dataset("arrays", "~/own.npz"), own_arrays())
    monkeypatch.chdir(tmp_path)
    says(tmp_path / "none.npz", args=["arrays", "none.npz"])


def test_damage_anywhere_in_an_npz_is_one_sentence(tmp_path):
    """Cut or change the file at many places: it is refused, or the change touched no array."""
    sound = saved(tmp_path / "own.npz", own_arrays(x_train=X[:, :2, :2], x_test=X[:6, :2, :2])).read_bytes()
    path, rng = tmp_path / "damaged.npz", np.random.default_rng(0)
    for length in rng.integers(0, len(sound), 60):
        path.write_bytes(sound[:length])
        says(path, "truncated, damaged or no .npz", "write it again", args=["arrays", path])
    refused = 0
    for place in rng.integers(0, len(sound), 200):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 0xFF]) + sound[place + 1 :])
        try:
            dataset = load_dataset("arrays", path)
        except DataError:
            refused += 1
        else:
            np.testing.assert_array_equal(dataset.y_train, Y)
    assert refused > 100


@pytest.mark.parametrize("content", [b"", b"not an archive", pickle.dumps([1])])
def test_file_of_another_kind(tmp_path, content):
    (path := tmp_path / "own.npz").write_bytes(content)
    says(path, "no .npz of plain arrays", args=["arrays", path])


def test_npy_under_an_npz_name(tmp_path):
    with (path := tmp_path / "own.npz").open("wb") as file:
        np.save(file, X)
    says(path, "no .npz of plain arrays", args=["arrays", path])


# Folders of images


def image_folder(root, held_out="test", classes=("ant", "bee")):
    from PIL import Image

    rng = np.random.default_rng(0)
    arrays = {"class_names": np.array(sorted(classes))}
    for split, folder, each in (("train", "train", 3), ("test", held_out, 2)):
        pixels = rng.integers(0, 256, (len(classes) * each, 6, 5, 3), dtype=np.uint8)
        for k, image in enumerate(pixels):
            path = root / folder / classes[k // each] / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
        arrays |= {f"x_{split}": pixels, f"y_{split}": np.repeat(np.arange(len(classes)), each)}
    return arrays


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_folder(root, held_out):
    arrays = image_folder(root, held_out)
    assert_same(load_dataset("folder", root), arrays)


def test_folder_takes_test_before_val(root):
    image_folder(root, "val")
    arrays = image_folder(root, "test")
    (root / "val" / "ant" / "0.png").unlink()
    assert_same(load_dataset("folder", root), arrays)


def test_folder_grey_image_becomes_rgb(root):
    from PIL import Image

    image_folder(root)
    Image.new("L", (5, 6), 7).save(root / "train" / "ant" / "0.png")
    dataset = load_dataset("folder", root)
    assert dataset.x_train.shape == (6, 6, 5, 3)
    assert np.all(dataset.x_train[0] == 7)


def test_folder_layout(root, tmp_path):
    layout = "expected train/ and test/ (or val/) with one folder of images per class"
    says(tmp_path / "none", layout, args=["folder", tmp_path / "none"])
    says(root, layout, args=["folder", root])
    (root / "train").mkdir()
    says(root, root / "train", layout, args=["folder", root])
    image_folder(root)
    (root / "train" / "cat").mkdir()
    says(root, "cat", layout, args=["folder", root])


def test_folder_with_a_class_in_one_part_only(root):
    image_folder(root)
    (root / "test" / "bee").rename(root / "test" / "wasp")
    says(root, "bee, wasp in one of train and test only", "use equal classes", args=["folder", root])


def test_folder_with_two_sizes(root):
    from PIL import Image

    image_folder(root)
    Image.new("RGB", (9, 6)).save(odd := root / "test" / "bee" / "2.png")
    says(f"{odd} is 9 x 6, expected 5 x 6", root / "train" / "ant" / "0.png", "resize", args=["folder", root])


@pytest.mark.parametrize("keep", [0, 20, 60])
def test_folder_with_a_damaged_image(root, keep):
    image_folder(root)
    path = root / "train" / "bee" / "4.png"
    path.write_bytes(path.read_bytes()[:keep])
    says(path, "is not a readable image", "replace or remove it", args=["folder", root])


# CIFAR-100 as an array file


@pytest.mark.skipif(not REAL.is_file(), reason="needs CIFAR-100's images: MR2_DATA names no folder with cifar100.npz")
def test_real_cifar100():
    dataset = load_dataset("cifar100", REAL.parent)
    for name, expected in SHA256.items():
        assert hashlib.sha256(np.ascontiguousarray(getattr(dataset, name)).tobytes()).hexdigest() == expected
    assert dataset.class_names[:2] == ["apple", "aquarium_fish"]
    train, validation = split_train_validation(dataset.y_train)
    assert (len(train), len(validation)) == (45_000, 5_000)


def test_full_size_is_500_and_100_a_class():
    """Blank images of the full size pass; the same with one label changed do not."""
    arrays = {"class_names": np.arange(100).astype(str)}
    for split, each in (("train", 500), ("test", 100)):
        arrays[f"x_{split}"] = np.zeros((100 * each, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.repeat(np.arange(100), each)
    assert data._cifar100_fault(arrays) is None
    for split in ("train", "test"):
        labels = arrays[f"y_{split}"].copy()
        labels[0] = 99
        assert f"{len(labels):,} {split} images" in data._cifar100_fault(arrays | {f"y_{split}": labels})


@pytest.mark.parametrize("as_root", [True, False])
def test_array_file_is_read(root, small, monkeypatch, server, as_root):
    saved(root / "cifar100.npz", cifar_arrays())
    if not as_root:
        monkeypatch.setenv("MR2_DATA", str(root))
    assert_same(load_dataset("cifar100", root if as_root else None), cifar_arrays())
    assert server.requests == 0


def test_order_is_root_then_mr2_data_then_the_repository(tmp_path, small, monkeypatch):
    marks = {}
    for mark, name in enumerate(("root", "named", "clone/data")):
        (folder := tmp_path / name).mkdir(parents=True)
        arrays = cifar_arrays()
        arrays["x_train"][0] = mark
        marks[name] = saved(folder / "cifar100.npz", arrays)
    (tmp_path / "clone/data/DATASHEET.md").touch()
    (tmp_path / "clone/notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "clone/notebooks")

    def mark(**kwargs):
        return int(load_dataset("cifar100", **kwargs).x_train[0, 0, 0, 0])

    assert mark() == 2
    monkeypatch.setenv("MR2_DATA", "")
    assert mark() == 2
    monkeypatch.setenv("MR2_DATA", str(tmp_path / "named"))
    assert mark() == 1
    assert mark(root=tmp_path / "root") == 0
    marks["named"].unlink()
    assert mark() == 2
    # A root that was asked for is not quietly replaced by another folder.
    marks["root"].unlink()
    says(f"{tmp_path / 'root'} has no cifar100.npz", args=["cifar100", tmp_path / "root"])


def test_folder_that_is_none(tmp_path, monkeypatch):
    (file := tmp_path / "cifar100.npz").touch()
    says(f"root is {tmp_path / 'no'}", "does not exist", "make it", args=["cifar100", tmp_path / "no"])
    says(f"root is {file}", "is a file", "expected a folder", args=["cifar100", file])
    monkeypatch.setenv("MR2_DATA", str(tmp_path / "no"))
    says(f"MR2_DATA is {tmp_path / 'no'}", "does not exist", "correct MR2_DATA", args=["cifar100"])
    monkeypatch.setenv("MR2_DATA", str(file))
    says(f"MR2_DATA is {file}", "is a file", "expected a folder", args=["cifar100"])


def without(name):
    return {key: array for key, array in cifar_arrays().items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        (cifar_arrays(classes=10, train=20, test=10), ["10 classes and 10 class names", "CIFAR-10?", "100"]),
        (cifar_arrays(classes=20), ["20 classes and 20 class names, expected CIFAR-100's 100"]),
        (cifar_arrays(classes=10) | {"class_names": cifar_arrays()["class_names"]}, ["10 classes and 100 class names"]),
        (cifar_arrays(train=3), ["300 train images, 3 of class 0", "expected 200, 2 a class"]),
        (cifar_arrays(test=2), ["200 test images, 2 of class 0", "expected 100, 1 a class"]),
        (without("class_names"), ["lacks class_names"]),
        (without("x_test"), ["expected also x_test"]),
        (cifar_arrays() | {"x_train": np.zeros((200, 28, 28, 3), np.uint8)}, ["expected images of one size"]),
        (
            cifar_arrays() | {f"x_{s}": np.zeros((n, 32, 32, 1), np.uint8) for s, n in (("train", 200), ("test", 100))},
            ["x_train uint8 [200, 32, 32, 1]", "expected 32 x 32 RGB"],
        ),
        (cifar_arrays() | {"y_test": np.full(100, 100)}, ["labels 100 to 100 in y_test", "expected 0 to 99"]),
    ],
)
def test_array_file_that_is_not_cifar100(root, small, arrays, parts):
    path = saved(root / "cifar100.npz", arrays)
    says(path, *parts, "delete it and load again", args=["cifar100", root])


def test_truncated_array_file(root, small, server):
    path = saved(root / "cifar100.npz", cifar_arrays())
    path.write_bytes(path.read_bytes()[:1000])
    says(path, "truncated", "delete it and load again", "sound cifar100.npz", args=["cifar100", root])
    assert server.requests == 0


# CIFAR-100 from the official files


def place(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    return target


def place_folder(source, target):
    for file in source.iterdir():
        place(file, target / file.name)
    return target


@pytest.mark.parametrize("where", [".", "raw"])
@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_official_files_placed_by_hand(root, official, server, where, kind):
    folder, archive, arrays = official
    if kind == "folder":
        placed = place_folder(folder, root / where / folder.name)
    else:
        placed = place(archive, root / where / ARCHIVE)
    assert_same(load_dataset("cifar100", root, download=False), arrays)
    assert server.requests == 0
    assert placed.exists()
    # The second time the array file alone is read.
    with np.load(root / "cifar100.npz", allow_pickle=False) as cache:
        assert cache["fine_to_coarse"].tolist() == [k // 5 for k in range(100)]
        assert cache["coarse_names"][19] == "c19"
    for stray in (*root.rglob("train"), *root.rglob(ARCHIVE)):
        stray.unlink()
    assert_same(load_dataset("cifar100", root), arrays)
    assert [path.name for path in root.glob("*.npz")] == ["cifar100.npz"]


def test_download_is_cached(root, official, server):
    _, archive, arrays = official
    server.content = archive.read_bytes()
    assert_same(load_dataset("cifar100", root), arrays)
    assert server.requests > 0
    assert md5(root / "raw" / ARCHIVE) == md5(archive)
    server.content = None
    assert_same(load_dataset("cifar100", root), arrays)


def test_download_into_a_data_folder_that_is_not_there_yet(tmp_path, official, server, monkeypatch):
    _, archive, arrays = official
    monkeypatch.setattr(data, "data_folder", lambda: tmp_path / "clone" / "data")
    server.content = archive.read_bytes()
    assert_same(load_dataset("cifar100"), arrays)
    assert (tmp_path / "clone" / "data" / "cifar100.npz").is_file()


def test_no_network(root):
    parts = (root, "no network in the tests", f"put {ARCHIVE} (md5 {MD5}) at {root / 'raw' / ARCHIVE}", "set MR2_DATA")
    says(*parts, args=["cifar100", root])
    says(*parts, args=["cifar100", root])
    assert not list(root.rglob("*.gz"))


def test_no_download_unless_allowed(root, server):
    says(root, "not allowed", MD5, root / "raw" / ARCHIVE, args=["cifar100", root], download=False)
    assert server.requests == 0
    assert not list(root.iterdir())


@pytest.mark.parametrize("where", [".", "raw"])
def test_cifar10_folder_does_not_serve(root, where):
    (root / where / "cifar-10-batches-py").mkdir(parents=True)
    says(f"{root} has no cifar100.npz", "cifar-10-batches-py there is CIFAR-10", "put", args=["cifar100", root])


@pytest.mark.parametrize("keep", [0.3, 0.999])
def test_truncated_download_is_removed(root, official, server, keep):
    content = official[1].read_bytes()
    server.content = content[: int(keep * len(content))]
    says(root, CIFAR100.url, "is truncated", f"md5 {CIFAR100.tgz_md5}", "put", args=["cifar100", root])
    assert not list(root.rglob("*.gz"))
    server.content = content
    assert load_dataset("cifar100", root).num_classes == 100


def test_web_page_in_place_of_the_archive(root, server):
    server.content = b"<html>Moved</html>"
    says(root, CIFAR100.url, "is no sound tar.gz", MD5, args=["cifar100", root])


def test_interrupted_download_is_removed(root, server, monkeypatch):
    def interrupted(url, filename, **_):
        Path(filename).write_bytes(b"half")
        raise KeyboardInterrupt

    server.content = b""  # answers the question for redirects
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_dataset("cifar100", root)
    assert not list(root.rglob("*.gz"))


def test_dead_server_times_out_and_the_default_comes_back(root, monkeypatch):
    seen = []

    def slow(*_, **__):
        seen.append(socket.getdefaulttimeout())
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", slow)
    says("timed out", args=["cifar100", root])
    assert seen[0] is not None
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("where", [".", "raw"])
def test_truncated_archive(root, official, server, where):
    path = root / where / ARCHIVE
    place(official[1], path)
    path.write_bytes(path.read_bytes()[:-100])
    says(path, "is truncated", md5(path), f"expected CIFAR-100's archive with md5 {CIFAR100.tgz_md5}", "delete it",
         args=["cifar100", root])  # fmt: skip
    assert path.exists()
    assert server.requests == 0


def test_archive_with_a_wrong_hash(root, official):
    folder, _, _ = official
    with tarfile.open(path := root / ARCHIVE, "w:gz") as tar:
        tar.add(folder / "meta", "cifar-100-python/meta")
    says(path, "is another file", md5(path), CIFAR100.tgz_md5, "delete it", args=["cifar100", root])


def test_archive_that_is_no_archive(root):
    (path := root / ARCHIVE).write_bytes(b"<html>")
    says(path, "is no sound tar.gz", md5(path), MD5, "delete it", "replace it", args=["cifar100", root])


@pytest.mark.parametrize("rest", [b"junk", gzip.compress(b"")[:10] + b"\xff" * 50], ids=["member", "block"])
def test_archive_damaged_in_the_middle(root, official, rest):
    """The sound beginning of an archive, then what is no gzip member, or a member with an invalid block."""
    with gzip.open(official[1]) as file:
        (path := root / ARCHIVE).write_bytes(gzip.compress(file.read(100_000)) + rest)
    says(path, "is no sound tar.gz", md5(path), CIFAR100.tgz_md5, "replace it", args=["cifar100", root])


def test_cifar10_archive_under_cifar100s_name(root, tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"x")
    with tarfile.open(path := root / ARCHIVE, "w:gz") as tar:
        tar.add(tmp_path / "data_batch_1", "cifar-10-batches-py/data_batch_1")
    says(path, "is CIFAR-10 ", md5(path), MD5, "replace it", args=["cifar100", root])


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_folder_placed_by_hand_lacks_a_file(root, official, name):
    folder = place_folder(official[0], root / "cifar-100-python")
    (folder / name).unlink()
    says(folder / name, "is missing", md5(official[0] / name), f"delete {folder}", ARCHIVE, args=["cifar100", root])
    (folder / name).write_bytes(b"damaged")
    wrong = md5(folder / name)
    says(f"{folder / name} has md5 {wrong}", md5(official[0] / name), "delete", args=["cifar100", root])
    assert not (root / "cifar100.npz").exists()


def test_cifar10_folder_under_cifar100s_name(root):
    (folder := root / "cifar-100-python").mkdir()
    (folder / "data_batch_1").touch()
    says(folder / "train", "is missing", "CIFAR-10's", CIFAR100.train_list[0][1], args=["cifar100", root])


def test_damaged_folder_is_not_unpickled(root):
    """Only files with the right checksum reach pickle, which would run what they say."""
    (root / "cifar-100-python").mkdir()

    class Loud:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    (root / "cifar-100-python" / "train").write_bytes(pickle.dumps(Loud()))
    says("has md5", args=["cifar100", root])


def test_official_files_of_a_wrong_size(root, official, monkeypatch):
    monkeypatch.setattr(data, "CIFAR100_PER_CLASS", {"train": 500, "test": 100})
    folder = place_folder(official[0], root / "cifar-100-python")
    says(folder, "200 train images", "expected 50,000, 500 a class", args=["cifar100", root])
    assert not (root / "cifar100.npz").exists()


def test_folder_that_takes_no_cache_still_serves(root, official, monkeypatch):
    place_folder(official[0], root / "cifar-100-python")

    def full(path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="could not be cached in .*my data.*No space"):
        dataset = load_dataset("cifar100", root)
    assert_same(dataset, official[2])
    assert not list(root.glob("*.npz"))


def test_archive_that_cannot_be_unpacked(root, official, monkeypatch):
    path = place(official[1], root / ARCHIVE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchvision.datasets.utils.extract_archive", full)
    says(path, root / "raw", "No space left", "free or unlock it", args=["cifar100", root])


# Embedded features


@pytest.fixture
def clone(tmp_path, monkeypatch):
    folder = tmp_path / "clone" / "data" / "features"
    folder.mkdir(parents=True)
    (folder.parent / "DATASHEET.md").touch()
    (tmp_path / "clone" / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "clone" / "notebooks" / "deep")
    return folder


def test_data_folder_is_found_upward(clone):
    assert data.data_folder() == clone.parent


def test_data_folder_without_a_datasheet_is_another_projects(clone, monkeypatch, tmp_path):
    (clone.parent / "DATASHEET.md").unlink()
    (tmp_path / "site-packages" / "mr2_core").mkdir(parents=True)
    monkeypatch.setattr(data, "__file__", str(tmp_path / "site-packages" / "mr2_core" / "data.py"))
    says(Path.cwd(), "DATASHEET.md", tmp_path / "site-packages", "clone of the book", of=data.data_folder)
    (beside := tmp_path / "site-packages" / "data").mkdir()
    (beside / "DATASHEET.md").touch()
    assert data.data_folder() == beside


def test_features(clone):
    arrays = {
        "features": np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3),
        "statistic": np.array([1.0, 1e-9]),
        "labels": np.array([3, 4]),
    }
    saved(clone / "erm.npz", arrays)
    loaded = load_features("erm")
    assert list(loaded) == list(arrays)
    assert [loaded[name].dtype for name in arrays] == [np.float32, np.float64, np.int64]
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_unknown_features_list_those_there(clone):
    says("'erm'", clone, "(none there)", of=load_features, args=["erm"])
    for name in ("b", "a"):
        saved(clone / f"{name}.npz", {"x": X})
    says("'erm'", clone, "expected one of a, b", of=load_features, args=["erm"])


def test_damaged_features(clone):
    (clone / "erm.npz").write_bytes(b"half")
    says(clone / "erm.npz", "damaged", "restore it from the repository", of=load_features, args=["erm"])
    np.savez(clone / "erm.npz", x=np.array([{}], dtype=object))
    says(clone / "erm.npz", "plain arrays", of=load_features, args=["erm"])


# Splits


LABELS = np.arange(50_000) * 7919 % 50_000 % 100  # 500 of each class, well mixed


def digest(index):
    return hashlib.sha256(np.ascontiguousarray(index, dtype="<i8").tobytes()).hexdigest()[:16]


def test_split_is_stratified_and_complete():
    train, validation = split_train_validation(LABELS)
    assert np.bincount(LABELS[validation]).tolist() == [50] * 100
    assert np.bincount(LABELS[train]).tolist() == [450] * 100
    np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(50_000))
    for index in (train, validation):
        assert index.dtype == np.int64
        assert np.all(np.diff(index) > 0)


def test_split_is_the_protocols():
    """Recorded runs depend on these very examples: a change of the random stream must not pass unseen."""
    assert digest(split_train_validation(LABELS)[1]) == "d11ea21274269b00"
    assert digest(subset_per_class(LABELS, 50, seed=3)) == "26fa62b3ebab64f8"
    assert digest(split_train_validation(LABELS, seed=1)[1]) != digest(split_train_validation(LABELS)[1])


def test_subset_per_class():
    labels = np.array([7] * 10 + [2] * 4)
    subset = subset_per_class(labels, 3, seed=0)
    assert sorted(labels[subset].tolist()) == [2, 2, 2, 7, 7, 7]
    assert np.all(np.diff(subset) > 0)
    assert subset_per_class(labels, 4, seed=0)[-4:].tolist() == [10, 11, 12, 13]
    draws = {tuple(subset_per_class(labels, 3, seed=seed)) for seed in range(20)}
    assert len(draws) > 10
    # What is drawn is not the head of a class: over many seeds every example comes up.
    assert set(np.concatenate([subset_per_class(labels, 1, seed=s) for s in range(200)])) == set(range(14))


def test_smaller_subsets_are_nested():
    assert set(subset_per_class(LABELS, 10, seed=4)) < set(subset_per_class(LABELS, 50, seed=4))


def test_subset_with_the_splits_seed_is_not_the_validation_part():
    validation = split_train_validation(LABELS, 50, seed=0)[1]
    assert np.isin(subset_per_class(LABELS, 50, seed=0), validation).mean() < 0.2


def test_too_few_examples():
    labels = np.array([0] * 9 + [1] * 4)
    says("class 1 has 4 examples", "expected 5 or more", "draw fewer", of=subset_per_class, args=[labels, 5, 0])
    says("class 1 has 4 examples", "expected 5 or more", of=split_train_validation, args=[labels, 4])
    assert len(split_train_validation(labels, 3)[0]) == 7


@pytest.mark.parametrize(("labels", "count"), [([], 1), ([[0, 1]], 1), ([0, 1], 0), ([0, 1], -1)])
def test_nothing_to_draw(labels, count):
    says(f"got {count} a class", "labels [N]", of=subset_per_class, args=[np.array(labels), count])
