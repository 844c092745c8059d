"""Classifiers of images: a backbone and a head that return ``(logits, features)``."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CosineHead(nn.Linear):
    """Logits as scaled cosines between unit features and unit class weights; the scale is learned.

    Parameters
    ----------
    in_features, out_features : int
        D and K.
    scale : float
        Initial inverse temperature.
    """

    def __init__(self, in_features: int, out_features: int, scale: float = 16.0):
        super().__init__(in_features, out_features, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(scale).log())

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, K]."""
        return self.log_scale.exp() * F.linear(F.normalize(features, dim=-1), F.normalize(self.weight, dim=-1))


def zero_shot_head(texts: Tensor, scale: float = 100.0) -> CosineHead:
    """A head that was never trained: class weights are embeddings of texts that name the classes (Radford et al. 2021).

    Parameters
    ----------
    texts : Tensor
        [K, D], or [K, T, D] for T texts a class, whose unit vectors are averaged; from the text tower that belongs to
        the features' image tower.
    scale : float
        Inverse temperature; CLIP's own is 100.

    Raises
    ------
    ValueError
        On another shape, or where a class's embeddings are not finite or average to zero.
    """
    texts = torch.as_tensor(texts, dtype=torch.float32)
    if texts.ndim not in (2, 3):
        raise ValueError(f"texts has shape {list(texts.shape)}; expected [K, D] or [K, T, D].")
    mean = F.normalize(texts, dim=-1) if texts.ndim == 2 else F.normalize(texts, dim=-1).mean(dim=1)
    length = mean.norm(dim=-1)
    if (empty := ~(length > 1e-6)).any():  # NaN, too
        raise ValueError(
            f"the texts of class {empty.nonzero()[0].item()} have no direction; expected finite rows, not 0."
        )
    head = CosineHead(texts.shape[-1], len(texts), scale)
    with torch.no_grad():
        head.weight.copy_(mean)
    return head


class Classifier(nn.Module):
    """Backbone and head; ``features`` are what the head's inner products see (unit vectors under a cosine head)."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images [B, C, H, W] to logits [B, K] and features [B, D]."""
        features = self.backbone(images)
        if isinstance(self.head, CosineHead):
            features = F.normalize(features, dim=-1)
        return self.head(features), features


def conv_bn(inputs: int, outputs: int, stride: int = 1, kernel: int = 3) -> nn.Sequential:
    """Convolution without bias and batch normalisation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Shrink(nn.Module):
    """The parameter-free shortcut of He et al. (2016) for CIFAR (option A): every other pixel, new channels zero."""

    def __init__(self, new_channels: int):
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Halve the image and append zero channels."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.residual = nn.Sequential(
            conv_bn(inputs, outputs, stride), nn.ReLU(inplace=True), conv_bn(outputs, outputs)
        )
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else Shrink(outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual to the shortcut."""
        return F.relu(self.shortcut(x) + self.residual(x), inplace=True)


class PreActivationBlock(nn.Module):
    """Batch normalisation and ReLU before each convolution (Zagoruyko & Komodakis 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.residual = nn.Sequential(
            *conv_bn(inputs, outputs, stride),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual to the shortcut, which sees the activated input where it has weights."""
        active = self.norm(x)
        return self.residual(active) + (x if self.shortcut is None else self.shortcut(active))


def pooled(*layers: nn.Module) -> nn.Sequential:
    """Layers, then the mean over pixels."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def compact_cnn(channels: int = 3) -> tuple[nn.Module, int]:
    """A residual network for CPUs: 0.38 M parameters at 100 classes, D = 128; images of any even size."""

    def stage(inputs, outputs, stride):
        return nn.Sequential(conv_bn(inputs, outputs, stride), nn.ReLU(inplace=True))

    return pooled(
        nn.PixelUnshuffle(2),
        stage(4 * channels, 48, 1),
        BasicBlock(48, 48),
        stage(48, 96, 2),
        BasicBlock(96, 96),
        stage(96, 128, 2),
    ), 128


def cifar_resnet(depth: int) -> tuple[nn.Module, int]:
    """The CIFAR ResNet of He et al. (2016), section 4.2: 6n + 2 layers of 16, 32 and 64 channels."""
    blocks = (depth - 2) // 6
    layers, channels = [conv_bn(3, 16), nn.ReLU(inplace=True)], 16
    for outputs in (16, 32, 64):
        for block in range(blocks):
            layers.append(BasicBlock(channels, outputs, 2 if block == 0 and outputs > 16 else 1))
            channels = outputs
    return pooled(*layers), 64


def wide_resnet(depth: int, width: int) -> tuple[nn.Module, int]:
    """WRN-depth-width of Zagoruyko & Komodakis (2016), without dropout."""
    blocks = (depth - 4) // 6
    layers, channels = [nn.Conv2d(3, 16, 3, padding=1, bias=False)], 16
    for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range(blocks):
            layers.append(PreActivationBlock(channels, outputs, 2 if block == 0 and stage > 0 else 1))
            channels = outputs
    return pooled(*layers, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)), channels


def imagenet_resnet(depth: int, *, small_images: bool) -> tuple[nn.Module, int]:
    """torchvision's ResNet; for small images with the CIFAR stem: one 3×3 convolution, no pooling."""
    import torchvision

    network = getattr(torchvision.models, f"resnet{depth}")(weights=None)
    width = network.fc.in_features
    if small_images:
        network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    network.fc = nn.Identity()
    return network, width


def small_vit(image_size: int = 32) -> tuple[nn.Module, int]:
    """torchvision's vision transformer for 32×32 images: patches of 4, 6 layers of 192, 3 heads."""
    import torchvision

    network = torchvision.models.VisionTransformer(
        image_size=image_size, patch_size=4, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=768
    )
    network.heads = nn.Identity()
    return network, 192


BACKBONES = {
    "compact": compact_cnn,
    "compact-grey": lambda: compact_cnn(channels=1),
    **{f"resnet{depth}": (lambda depth=depth: cifar_resnet(depth)) for depth in (20, 32, 56)},
    **{f"resnet{depth}": (lambda depth=depth: imagenet_resnet(depth, small_images=True)) for depth in (18, 34, 50)},
    **{f"resnet{depth}-imagenet": (lambda d=depth: imagenet_resnet(d, small_images=False)) for depth in (18, 34, 50)},
    "wrn16-4": lambda: wide_resnet(16, 4),
    "wrn28-10": lambda: wide_resnet(28, 10),
    "vit": small_vit,
}


def build_model(name: str, num_classes: int, *, head: str = "linear") -> Classifier:
    """Build a classifier by name.

    Parameters
    ----------
    name : str
        One of ``BACKBONES``.
    num_classes : int
        The number of classes, K.
    head : {"linear", "cosine"}
        An affine head, or :class:`CosineHead`.

    Raises
    ------
    ValueError
        On an unknown name or head.
    """
    if name not in BACKBONES:
        raise ValueError(f"model is {name!r}; expected one of {', '.join(BACKBONES)}.")
    heads = {"linear": nn.Linear, "cosine": CosineHead}
    if head not in heads:
        raise ValueError(f"head is {head!r}; expected one of {', '.join(heads)}.")
    backbone, width = BACKBONES[name]()
    return Classifier(backbone, heads[head](width, num_classes))
