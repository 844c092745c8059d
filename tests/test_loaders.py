"""Image folders read by workers: the same batches whoever reads them, and exact resumption."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

import mr2_core.training
from mr2_core.data import DataError
from mr2_core.loaders import FolderLoader
from mr2_core.losses import MR2Loss
from mr2_core.methods import build_method
from mr2_core.models import build_model
from mr2_core.training import BatchLoader, Interrupted, Settings, fit, predict_batches

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """22 images of three classes, of many sizes; green says the class and blue falls from left to right."""
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for index in range(22):
        label = index % 3
        height, width = generator.integers(20, 40, 2)
        pixels = np.zeros((height, width, 3), dtype=np.uint8)
        pixels[..., 0] = generator.integers(0, 256, (height, width))
        pixels[..., 1] = 100 * label
        pixels[..., 2] = np.linspace(255, 0, width)
        (root / "abc"[label]).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(root / "abc"[label] / f"{index:02}.png")
    return root


def loader(folder, **changes):
    return FolderLoader(folder, **({"batch_size": 5, "size": 16, "workers": 0, **PLAIN} | changes))


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, second, strict=True)
    )


def test_an_epoch_is_a_function_of_seed_and_epoch_whatever_the_number_of_workers(folder):
    alone, together = loader(folder), loader(folder, workers=2)
    assert len(alone) == 4
    before = torch.get_rng_state()
    epochs = [list(alone.epoch(epoch)) for epoch in range(2)]
    assert equal(epochs[0], list(together.epoch(0)))
    assert equal(epochs[1][2:], list(together.epoch(1, start=2)))
    views = list(zip(together.epoch(1, view=0), together.epoch(1, view=1), strict=True))
    assert equal(epochs[1], [first for first, _ in views])
    assert not any(torch.equal(first[0], second[0]) for first, second in views)
    assert all(torch.equal(first[1], second[1]) for first, second in views)
    assert torch.equal(before, torch.get_rng_state()), "the run's own stream is left alone"
    assert not equal(epochs[0], epochs[1])
    for change in ({"seed": 1}, {"interpolation": "bicubic"}):
        assert not equal(epochs[0], list(loader(folder, **change).epoch(0)))
    assert equal(epochs[0], list(loader(folder, resize=20).epoch(0))), "it is for evaluation only"


def test_images_are_random_crops_and_mirrored_half_of_the_time_with_the_labels_of_their_folder(folder):
    images, labels = map(torch.cat, zip(*[b for e in range(6) for b in loader(folder).epoch(e)], strict=True))
    assert images.shape == (120, 3, 16, 16)
    torch.testing.assert_close(images[:, 1] * 255, (100.0 * labels)[:, None, None].expand(-1, 16, 16))
    slope = images[:, 2, :, -1].mean(dim=1) - images[:, 2, :, 0].mean(dim=1)
    assert 40 < (slope > 0).sum() < 80
    assert slope.abs().min() < 0.5 < slope.abs().max(), "crops of many widths"


def test_a_subset_and_a_last_batch_that_is_the_only_one(folder):
    chosen = np.arange(0, 22, 3)
    some = loader(folder, chosen=chosen, batch_size=100)
    assert torch.equal(some.labels, loader(folder).labels[chosen])
    ((images, labels),) = some.epoch(0)
    assert len(images) == 8
    (order,) = some.order(0)
    assert sorted(order.tolist()) == list(range(8))
    assert torch.equal(labels, some.labels[order])


@pytest.mark.parametrize(("given", "resize", "interpolation"), [((), 18, "bilinear"), ((20, "bicubic"), 20, "bicubic")])
def test_evaluation_sees_the_centre_of_every_image_in_order(folder, given, resize, interpolation):
    look = dict(zip(("resize", "interpolation"), given, strict=False))
    images = torch.cat(list(loader(folder, workers=2, **look).in_order()))
    assert images.shape == (22, 3, 16, 16)
    paths = sorted(folder.glob("*/*.png"))
    for image, path in zip(images, paths, strict=True):
        whole = Image.open(path)
        scale = resize / min(whole.size)
        small = whole.resize([int(side * scale) for side in whole.size], Image.Resampling[interpolation.upper()])
        left, top = (round((side - 16) / 2) for side in small.size)
        expected = np.asarray(small.crop((left, top, left + 16, top + 16)), dtype=np.float32) / 255
        np.testing.assert_allclose(image.permute(1, 2, 0), expected, atol=1e-6)
    model = build_model("compact", 3)
    logits, features = predict_batches(model, loader(folder, **look).in_order())
    assert (logits.shape, features.shape) == ((22, 3), (22, 128))
    model.eval()
    with torch.no_grad():
        np.testing.assert_allclose(logits, model(images)[0], atol=1e-5)


def test_stopped_in_mid_epoch_training_resumes_bit_for_bit(folder, tmp_path):
    settings = Settings(epochs=2, batch_size=5, precision="float32", learning_rate=0.05)

    def network(seed):
        torch.manual_seed(seed)
        return build_model("compact", 3), MR2Loss(3, 128, warmup=2)

    def stop_at_the_sixth(_, inputs, outputs):
        nonlocal batches
        batches += 1
        if batches == 6:
            os.kill(os.getpid(), signal.SIGINT)

    model, loss = network(0)
    whole = fit(model, loss, loader(folder), settings, progress=False)
    stopped, its_loss = network(0)
    batches, path = 0, tmp_path / "run.pt"
    handle = stopped.register_forward_hook(stop_at_the_sixth)
    with pytest.raises(Interrupted, match="Stopped at epoch 1, step 2"):
        fit(stopped, its_loss, loader(folder, workers=2), settings, checkpoint=path, progress=False)
    handle.remove()
    resumed, resumed_loss = network(1)
    history = fit(resumed, resumed_loss, loader(folder, workers=2), settings, checkpoint=path, progress=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert [record["loss"] for record in history] == [record["loss"] for record in whole]


def test_workers_outlive_an_interrupt_from_the_terminal(folder):
    batches = loader(folder, workers=2).epoch(0)
    begun = [next(batches), next(batches)]  # one from each worker, so that both have started
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
    assert equal([*begun, *batches], list(loader(folder).epoch(0)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_takes_its_share_of_every_batch(folder, monkeypatch, rank):
    arrays = np.random.default_rng(0).integers(0, 256, (26, 8, 8, 3), dtype=np.uint8), np.arange(26)

    def loaders():
        augment = ("crop", "flip", "cutout", "autoaugment")
        return loader(folder, batch_size=4), BatchLoader(*arrays, batch_size=4, augment=augment)

    whole = [list(one.epoch(0)) for one in loaders()]
    monkeypatch.setattr(mr2_core.training, "world", lambda: (rank, 2))
    for one, batches in zip(loaders(), whole, strict=True):
        assert one.batch_size == 4
        assert equal(list(one.epoch(0)), [(images[rank::2], labels[rank::2]) for images, labels in batches])
    with pytest.raises(ValueError, match="a batch of 5 cannot be dealt to 2 processes; choose a multiple"):
        list(loader(folder).epoch(0))


def test_methods_that_make_their_own_batches_do_so_from_folders(folder):
    torch.manual_seed(0)
    model, jtt = build_model("compact", 3), build_method("jtt", 3, 128, first_epochs=1, upweight=4.0)
    one = loader(folder, chosen=np.arange(1, 22, 2), batch_size=4)
    jtt.begin(model, one, lambda *_: None)
    images = torch.cat(list(loader(folder).in_order()))[1::2]
    with torch.no_grad():
        wrong = model.eval()(images)[0].argmax(dim=1) != one.labels
    assert 0 < wrong.sum() < len(wrong)
    raw = torch.where(wrong, 4.0, 1.0)
    torch.testing.assert_close(jtt.weights, raw / raw.mean())
    for chosen, plain, batch in zip(one.order(2, 1), one.epoch(2, 1), jtt.batches(one, 2, 1), strict=True):
        assert equal([plain], [batch[:2]])
        assert torch.equal(batch[2], jtt.weights[chosen])
    pairs = next(build_method("supcon", 3, 128).batches(one, 0, 0))
    views = [next(one.epoch(0, view=view)) for view in (0, 1)]
    assert equal([pairs], [tuple(map(torch.cat, zip(*views, strict=True)))])


@pytest.mark.parametrize("method", ["mixup", "lff", "jtt", "supcon", "supcon-two-stage", "fair-dro"])
def test_methods_with_hooks_train_from_folders(folder, method):
    torch.manual_seed(0)
    stages = {"jtt": {"first_epochs": 1, "upweight": 2.0}, "supcon-two-stage": {"first_epochs": 1}}
    model, loss = build_model("compact", 3), build_method(method, 3, 128, **stages.get(method, {}))
    settings = Settings(epochs=2, batch_size=5, precision="float32", learning_rate=0.05)
    history = fit(model, loss, loader(folder), settings, progress=False)
    assert [record["epoch"] for record in history] == [1, 2]
    assert all(0 <= record["train_accuracy"] <= 1 for record in history)


def test_what_cannot_be_read_is_named(folder, tmp_path):
    with pytest.raises(DataError, match="nowhere cannot be read .*: expected a folder of images for each class"):
        loader(tmp_path / "nowhere")
    sound = (folder / "a" / "00.png").read_bytes()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sound.png").write_bytes(sound)
    (tmp_path / "a" / "torn.png").write_bytes(sound[:300])
    with pytest.raises(DataError, match=r"torn\.png is not a readable image"):
        list(loader(tmp_path, workers=1).epoch(0))
