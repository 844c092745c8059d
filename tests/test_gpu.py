"""On a GPU: the numbers of a CPU, and training that stops and goes on."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from mr2_core.losses import FORMS, STATISTICS, MR2Loss
from mr2_core.models import build_model
from mr2_core.training import BatchLoader, Interrupted, Settings, fit, predict

GPU = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")

IMAGES = np.random.default_rng(0).integers(0, 256, (600, 16, 16, 3), dtype=np.uint8)
LABELS = np.arange(600) % 10


@pytest.fixture(autouse=True)
def float32_throughout():
    """Convolutions in float32, where cuDNN would round to TF32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def loader(device, augment=()):
    return BatchLoader(IMAGES, LABELS, batch_size=100, augment=augment, device=device)


def network():
    torch.manual_seed(0)
    return build_model("compact", 10), MR2Loss(10, 128, warmup=3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_losses_gradients_and_statistics_agree(statistic, form):
    results = []
    for device in ("cpu", GPU):
        generator = torch.Generator().manual_seed(0)
        loss = MR2Loss(20, 16, statistic=statistic, representation=form, representation_weight=0.1, p=3.0, warmup=2)
        loss.to(device)
        results.append([])
        for _ in range(6):
            logits = torch.randn(64, 20, generator=generator).to(device).requires_grad_()
            features = torch.randn(64, 16, generator=generator).to(device).requires_grad_()
            out = loss(logits, features, torch.randint(20, (64,), generator=generator).to(device))
            out.total.backward()
            results[-1] += [*out, logits.grad, features.grad]
        results[-1] += [loss.margins, loss.mean_deviation, *loss.state_dict().values()]
    torch.testing.assert_close(
        *[[value.detach().cpu() for value in values] for values in results], rtol=1e-4, atol=1e-6
    )


def test_batches_agree_and_augmentation_is_a_function_of_the_seed():
    for (ours, truth), (images, labels) in zip(loader(GPU).epoch(0), loader("cpu").epoch(0), strict=True):
        torch.testing.assert_close(ours.cpu(), images, rtol=1e-5, atol=1e-5)
        assert torch.equal(truth.cpu(), labels)
    augment = ("crop", "flip", "cutout", "autoaugment")
    first, rest = list(loader(GPU, augment).epoch(1)), list(loader(GPU, augment).epoch(1, start=3))
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first[3:], rest, strict=True))
    both = [loader(device, augment).autoaugmented(0).cpu().float() for device in ("cpu", GPU)]
    assert (both[0] - both[1]).abs().mean() < 0.5, "the same sub-policies, but for rounding"


def test_a_short_training_agrees():
    settings = Settings(epochs=2, batch_size=100, learning_rate=0.02, precision="float32", augment=())
    found = []
    for device in ("cpu", GPU):
        model, loss = network()
        history = fit(model, loss, loader(device), settings, progress=False)
        logits, _ = predict(model, IMAGES, device=device)
        found.append([record["loss"] for record in history] + [loss.margins.cpu().numpy(), logits])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stopped_by_a_signal_training_goes_on(tmp_path, precision):
    settings, batches = Settings(epochs=3, batch_size=100, precision=precision, learning_rate=0.05), 0

    def stop_at_the_eighth(*_):
        nonlocal batches
        batches += 1
        if batches == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = fit(*network(), loader(GPU, settings.augment), settings, progress=False)
    model, loss = network()
    handle = model.register_forward_hook(stop_at_the_eighth)
    path = tmp_path / "run.pt"
    with pytest.raises(Interrupted, match="Stopped at epoch 1, step 2"):
        fit(model, loss, loader(GPU, settings.augment), settings, checkpoint=path, progress=False)
    handle.remove()
    history = fit(*network(), loader(GPU, settings.augment), settings, checkpoint=path, progress=False)
    np.testing.assert_allclose([r["loss"] for r in history], [r["loss"] for r in whole], rtol=0.1)


def test_a_process_group_sums_on_both_sides():
    program = """
import torch
from mr2_core.training import process_group
with process_group("cuda") as device:
    for place in ("cpu", device):
        value = torch.ones(3, device=place)
        torch.distributed.all_reduce(value)
        print(device, value.sum().item())
"""
    single = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | single, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["cuda:0 3.0"] * 2, done.stderr


def test_a_signal_keeps_no_checkpoint_that_is_not_finite(tmp_path):
    """On a GPU losses are looked at every hundred steps, and a signal may come between."""
    model, loss, batches = *network(), 0

    def spoil(*_):
        nonlocal batches
        batches += 1
        if batches == 8:  # of the second epoch of six steps
            with torch.no_grad():
                model.head.weight.fill_(torch.nan)
        if batches == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    model.register_forward_pre_hook(spoil)
    settings = Settings(epochs=3, batch_size=100, precision="float32", augment=())
    with pytest.raises(FloatingPointError, match="the last good checkpoint is"):
        fit(model, loss, loader(GPU), settings, checkpoint=tmp_path / "run.pt", progress=False)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert saved["state"]["epoch"] == 1
    assert all(value.isfinite().all() for value in saved["model"].values())
