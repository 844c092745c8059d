"""Backbones and heads."""

import pytest
import torch
from torch.nn import functional as F

from mr2_core.models import BACKBONES, CosineHead, build_model, zero_shot_head

# He et al. (2016), table 6, give 0.27, 0.46 and 0.85 M for 10 classes; 90 more add 90 × 65. The wide networks are
# 36.5 M and 2.77 M (Zagoruyko & Komodakis 2016); torchvision's with a 3×3 stem and 100 classes are counted by hand, and
# with their own stem have what torchvision publishes for 1000 classes, less 900 of the head's rows.
PARAMETERS = {
    "compact": 378_628,
    "compact-grey": 375_172,
    "resnet20": 275_572,
    "resnet32": 470_004,
    "resnet56": 858_868,
    "resnet18": 11_220_132,
    "resnet34": 21_328_292,
    "resnet50": 23_705_252,
    "resnet18-imagenet": 11_689_512 - 900 * 513,
    "resnet34-imagenet": 21_797_672 - 900 * 513,
    "resnet50-imagenet": 25_557_032 - 900 * 2049,
    "wrn16-4": 2_772_020,
    "wrn28-10": 36_536_884,
    "vit": 2_710_948,
}


@pytest.mark.parametrize("name", BACKBONES)
def test_size_is_the_published_one(name):
    with torch.device("meta"):
        model = build_model(name, 100)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in BACKBONES if name not in ("wrn28-10", "resnet34", "resnet50")])
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_features_are_what_the_head_sees(name, head):
    torch.manual_seed(0)
    model = build_model(name, 7, head=head).eval()
    channels = 1 if name == "compact-grey" else 3
    with torch.no_grad():
        logits, features = model(torch.randn(2, channels, 32, 32))
        assert logits.shape == (2, 7)
        torch.testing.assert_close(model.head(features), logits)
        if head == "cosine":
            torch.testing.assert_close(features.norm(dim=1), torch.ones(2))


def test_cosine_head_is_scaled_cosine():
    torch.manual_seed(0)
    head, features = CosineHead(5, 3, scale=10.0), torch.randn(4, 5)
    expected = 10 * F.cosine_similarity(features[:, None], head.weight[None], dim=-1)
    torch.testing.assert_close(head(features), expected)
    torch.testing.assert_close(head(100 * features), expected)
    assert head.log_scale.requires_grad


def test_zero_shot_head_scores_images_by_the_angle_to_the_mean_text():
    torch.manual_seed(0)
    texts, features = torch.randn(3, 4, 5), torch.randn(6, 5)  # 3 classes, 4 texts each
    head = zero_shot_head(texts.numpy(), scale=50.0)
    mean = (texts / texts.norm(dim=2, keepdim=True)).mean(dim=1)
    torch.testing.assert_close(head(features), 50 * F.cosine_similarity(features[:, None], mean[None], dim=-1))
    one = zero_shot_head(7 * texts[:, 0])
    torch.testing.assert_close(one(features), 2 * zero_shot_head(texts[:, :1], scale=50.0)(features))
    assert one.log_scale.exp().item() == pytest.approx(100)
    assert one.weight.requires_grad


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (torch.ones(5), r"texts has shape \[5\]; expected \[K, D\] or \[K, T, D\]"),
        (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "the texts of class 1 have no direction"),
        (torch.tensor([[1.0, torch.nan], [0.0, 1.0]]), "the texts of class 0 have no direction"),
        (torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]), "the texts of class 0 have no direction"),
    ],
)
def test_texts_that_make_no_head(texts, sentence):
    with pytest.raises(ValueError, match=sentence):
        zero_shot_head(texts)


def test_unknown_names_are_listed():
    with pytest.raises(ValueError, match="model is 'resnet19'; expected one of compact, .*vit"):
        build_model("resnet19", 10)
    with pytest.raises(ValueError, match="head is 'mlp'; expected one of linear, cosine"):
        build_model("compact", 10, head="mlp")
