"""Loader, schedule, checkpoints and exact resumption."""

import collections
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import signal
import socket

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from mr2_core import training
from mr2_core.losses import MR2Loss
from mr2_core.methods import build_method
from mr2_core.models import build_model
from mr2_core.training import (
    CIFAR100_MEAN,
    CIFAR100_STD,
    BatchLoader,
    Interrupted,
    RoundedProducts,
    Settings,
    channel_moments,
    fit,
    learning_rate,
    make_optimizer,
    narrow_products,
    predict,
    process_group,
    stream,
    world,
)

IMAGES = np.random.default_rng(0).integers(0, 256, (70, 8, 8, 1), dtype=np.uint8)
LABELS = np.arange(70) % 5
GREY = {"mean": (0.5,), "std": (0.25,)}
SETTINGS = Settings(epochs=3, batch_size=16, learning_rate=0.05, precision="float32", augment=("crop", "flip"))


def loader(**changes):
    return BatchLoader(IMAGES, LABELS, **({"batch_size": 16, "augment": SETTINGS.augment, **GREY} | changes))


def network(seed=0):
    torch.manual_seed(seed)
    return build_model("compact-grey", 5), MR2Loss(5, 128, warmup=2)


class TestLoader:
    def test_without_augmentation_batches_are_standardised_images(self):
        batches = list(loader(augment=()).epoch(0))
        assert len(batches) == len(loader()) == 4
        order = torch.randperm(70, generator=stream(0, "order", 0)).numpy()
        images = torch.cat([images for images, _ in batches]).numpy()
        labels = torch.cat([labels for _, labels in batches]).numpy()
        np.testing.assert_array_equal(labels, LABELS[order[:64]])
        expected = (IMAGES[order[:64]].transpose(0, 3, 1, 2) / 255 - 0.5) / 0.25
        np.testing.assert_allclose(images, expected, atol=1e-5)

    def test_every_augmented_image_is_a_crop_of_its_own_image_or_its_mirror(self):
        padded = np.pad(IMAGES[..., 0] / 255, ((0, 0), (4, 4), (4, 4)))
        order = torch.randperm(70, generator=stream(0, "order", 0)).numpy()
        images = torch.cat([images for images, _ in loader().epoch(0)]).numpy()[:, 0] * 0.25 + 0.5
        offsets, mirrored = set(), set()
        for image, source in zip(images, order, strict=False):
            crops = {(y, x): padded[source, y : y + 8, x : x + 8] for y in range(9) for x in range(9)}
            found = [
                (at, flip)
                for at, crop in crops.items()
                for flip in (0, 1)
                if np.allclose(image, crop[:, ::-1] if flip else crop, atol=1e-5)
            ]
            assert len(found) == 1
            offsets.add(found[0][0])
            mirrored.add(found[0][1])
        assert len(offsets) > 30
        assert mirrored == {0, 1}

    def test_cutout_blanks_one_rectangle(self):
        plain = torch.cat([images for images, _ in loader(augment=()).epoch(0)])
        cut = torch.cat([images for images, _ in loader(augment=("cutout",)).epoch(0)])
        changed = (plain != cut)[:, 0]
        assert (cut[:, 0][changed] == 0).all()
        assert changed.any(dim=(1, 2)).sum() > 50
        sizes = changed.sum(dim=(1, 2))
        assert sizes.max() == 4  # a quarter of the width, squared
        inside = ~changed[:, [0, -1]].any(dim=(1, 2)) & ~changed[:, :, [0, -1]].any(dim=(1, 2)) & (sizes > 0)
        assert inside.sum() > 20
        assert (sizes[inside] == 4).all()

    def test_views_of_an_image_differ_in_their_policy(self):
        ours = loader(augment=("autoaugment",))
        first, second = (torch.cat([images for images, _ in ours.epoch(0, view=view)]) for view in range(2))
        assert (first != second).any(dim=(1, 2, 3)).float().mean() > 0.5
        again = torch.cat([images for images, _ in ours.epoch(0, view=1)])
        assert torch.equal(second, again)

    @pytest.mark.parametrize("channels", [1, 3])
    def test_autoaugment_is_torchvisions_policy_on_each_part_of_the_images(self, channels):
        images = np.random.default_rng(1).integers(0, 256, (70, 8, 8, channels), dtype=np.uint8)
        mean, std = (0.25,) * channels, (1.0,) * channels
        ours = BatchLoader(images, LABELS, batch_size=16, augment=("autoaugment", "crop"), mean=mean, std=std)
        before, kept = torch.get_rng_state(), ours.images.clone()
        padded = ours.autoaugmented(3)
        assert torch.equal(before, torch.get_rng_state()), "the run's own stream is left alone"
        assert torch.equal(kept, ours.images), "epochs do not add up"
        got = padded[:, 4:-4, 4:-4]
        assert padded.sum() == got.sum(), "the padding stays black"
        with torch.random.fork_rng():
            torch.set_rng_state(stream(0, "augmentation", 3, len(ours)).get_state())
            policy = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10, fill=[64] * channels)
            expected = np.empty_like(images)
            for index in torch.randperm(70).tolist():  # fewer than 400 images: each is a part
                one = policy(torch.from_numpy(images[index].transpose(2, 0, 1).copy()))
                expected[index] = one.numpy().transpose(1, 2, 0)
        np.testing.assert_array_equal(got, expected)
        changed = (expected != images).any(axis=(1, 2, 3)).mean()
        assert 0.5 < changed < 1

    def test_autoaugment_deals_a_large_set_into_400_parts(self, monkeypatch):
        sizes = []
        monkeypatch.setattr(v2.AutoAugment, "forward", lambda self, images: sizes.append(len(images)) or 255 - images)
        many = BatchLoader(np.repeat(IMAGES, 10, axis=0), np.repeat(LABELS, 10), batch_size=50, **GREY)
        assert torch.equal(many.autoaugmented(0), 255 - many.images)
        assert len(sizes) == 400
        assert set(sizes) == {1, 2}

    @pytest.mark.parametrize("augment", [SETTINGS.augment, ("autoaugment", "crop", "flip", "cutout")])
    def test_an_epoch_is_a_function_of_seed_epoch_and_step(self, augment):
        def loader(seed=0):
            return BatchLoader(IMAGES, LABELS, batch_size=16, augment=augment, seed=seed, **GREY)

        first, again = list(loader().epoch(1)), list(loader().epoch(1))
        rest = list(loader().epoch(1, start=2))
        for (a, b), (c, d) in zip(first, again, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)
        assert torch.equal(first[2][0], rest[0][0])
        assert not torch.equal(first[0][1], list(loader().epoch(2))[0][1])
        assert not torch.equal(first[0][1], list(loader(seed=1).epoch(1))[0][1])

    def test_a_set_smaller_than_a_batch_is_one_batch(self):
        assert [len(labels) for _, labels in loader(batch_size=1000).epoch(0)] == [70]

    def test_lengths_that_differ(self):
        with pytest.raises(ValueError, match="images has 70 entries and labels 69"):
            BatchLoader(IMAGES, LABELS[:-1], batch_size=8)

    def test_channel_moments_of_cifar100(self):
        if not os.environ.get("MR2_DATA"):
            pytest.skip("MR2_DATA names no folder with cifar100.npz")
        with np.load(os.path.join(os.environ["MR2_DATA"], "cifar100.npz")) as arrays:
            mean, std = channel_moments(arrays["x_train"])
        np.testing.assert_allclose(mean, CIFAR100_MEAN, atol=5e-5)
        np.testing.assert_allclose(std, CIFAR100_STD, atol=5e-5)

    def test_channel_moments(self):
        mean, std = channel_moments(IMAGES)
        np.testing.assert_allclose([mean[0], std[0]], [(IMAGES / 255).mean(), (IMAGES / 255).std()])


def test_schedule_warms_up_linearly_then_falls_as_half_a_cosine():
    settings = Settings(epochs=11, learning_rate=2.0, warmup_epochs=1)
    rates = [learning_rate(settings, step, 10) for step in range(110)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) * 0.2)
    np.testing.assert_allclose(rates[10:], 1 + np.cos(np.pi * np.arange(100) / 100))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"optimizer": "lion"}, "optimizer is 'lion'; expected one of sgd, adamw"),
        ({"precision": "int8"}, "precision is 'int8'; expected one of float32, bf16, fp16"),
        ({"epochs": 0}, "epochs is 0; expected an integer of at least 1"),
        ({"learning_rate": -1.0}, r"learning_rate is -1.0; expected a number in \(0, inf\)"),
        ({"weight_decay": [1e-3, 1e-2]}, r"weight_decay is \[0.001, 0.01\]; expected a number in \[0, inf\)"),
        ({"clip": "1"}, r"clip is '1'; expected a number in \[0, inf\)"),
        ({"layer_decay": 0.0}, r"layer_decay is 0.0; expected a number in \(0, 1\]"),
        ({"layer_decay": 1.5}, r"layer_decay is 1.5; expected a number in \(0, 1\]"),
        ({"augment": ("blur",)}, "augment holds blur; expected any of crop, flip, cutout, autoaugment"),
    ],
)
def test_settings_out_of_range(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Settings(**change)


def test_a_number_of_epochs_is_whole():
    with pytest.raises(TypeError, match=r"epochs is 2.5; expected an integer of at least 1"):
        Settings(epochs=2.5)


class TestNarrowProducts:
    """What a processor with instructions for narrow types would compute, on one without."""

    OPERATIONS = {
        "conv2d": (functools.partial(torch.nn.functional.conv2d, stride=2, padding=1), [(4, 6, 9, 9), (8, 6, 3, 3)]),
        "linear": (torch.nn.functional.linear, [(7, 12), (5, 12)]),
        "linear with bias": (torch.nn.functional.linear, [(7, 12), (5, 12), (5,)]),
        "matmul": (torch.matmul, [(3, 5, 12), (3, 12, 4)]),
    }

    @staticmethod
    def computed(operation, numbers, context, dtype):
        """The result and the gradients of all numbers, for a slope that the narrow type holds."""
        numbers = [number.to(dtype).requires_grad_() for number in numbers]
        with context:
            out = operation(*numbers)
            slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().half()
            out.backward(slope.to(out.dtype))
        return [part.detach().double() for part in (out, *(number.grad for number in numbers))]

    @pytest.mark.parametrize("operation", OPERATIONS)
    @pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
    def test_they_are_exact_but_for_one_rounding_on_either_side(self, operation, dtype, bits):
        operation, shapes = self.OPERATIONS[operation]
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randn(shape, generator=generator) for shape in shapes]
        found = self.computed(operation, numbers, RoundedProducts(), dtype)
        rounded = [number.to(dtype) for number in numbers]
        exact = self.computed(operation, rounded, contextlib.nullcontext(), torch.float64)
        for got, want in zip(found, exact, strict=True):
            # Half a unit in the last place; near zero, float32's own error.
            np.testing.assert_allclose(got, want, rtol=2.0**-bits, atol=1e-5)
            assert torch.equal(got, got.to(dtype).double())

    def test_other_types_and_functions_are_left_alone(self):
        numbers = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.float64):
            expected = numbers.to(dtype) @ numbers.to(dtype).T
            with RoundedProducts():
                assert torch.equal(numbers.to(dtype) @ numbers.to(dtype).T, expected)
        expected = numbers.bfloat16() + 1
        with RoundedProducts():
            assert torch.equal(numbers.bfloat16() + 1, expected)

    @pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
    @pytest.mark.parametrize("has_them", [True, False])
    def test_they_are_for_processors_that_lack_them(self, monkeypatch, precision, has_them):
        monkeypatch.setattr(training, "has_narrow_products", lambda precision: has_them)
        ours = precision != "float32" and not has_them
        assert isinstance(narrow_products(torch.device("cpu"), precision), RoundedProducts) == ours
        assert not isinstance(narrow_products(torch.device("cuda"), precision), RoundedProducts)

    @pytest.fixture
    def seen(self, monkeypatch):
        """How often each product in bfloat16 was rounded here, on a processor without them."""
        counts = collections.Counter()

        def noted(self, func, types, args=(), kwargs=None, made=RoundedProducts.__torch_dispatch__):
            counts[func] += func in self.functions and args[0].dtype is torch.bfloat16
            return made(self, func, types, args, kwargs)

        monkeypatch.setattr(RoundedProducts, "__torch_dispatch__", noted)
        monkeypatch.setattr(training, "has_narrow_products", lambda precision: False)
        return counts

    @pytest.mark.parametrize(("method", "networks", "evaluated"), [("erm", 1, 0), ("lff", 2, 0), ("fair-dro", 1, 70)])
    def test_training_uses_them_throughout(self, monkeypatch, seen, method, networks, evaluated):
        settings, losses = Settings(epochs=2, batch_size=16, precision="bf16", augment=()), []
        for lacks_them in (True, False):
            monkeypatch.setattr(training, "has_narrow_products", lambda precision, lacks=lacks_them: not lacks)
            model, loss = network()[0], build_method(method, 5, 128)
            losses.append(fit(model, loss, loader(augment=()), settings, progress=False)[0]["loss"])
        convolutions = sum(isinstance(part, torch.nn.Conv2d) for part in model.modules())
        steps = networks * convolutions * settings.epochs * len(loader())
        assert seen[torch.ops.aten.convolution_backward.default] == steps
        assert seen[torch.ops.aten.convolution.default] == steps + convolutions * -(-evaluated // 16)
        assert losses[0] == pytest.approx(losses[1], rel=0.02)

    def test_prediction_uses_them(self, monkeypatch, seen):
        model = network()[0]
        logits = predict(model, IMAGES, precision="bf16", **GREY)[0]
        assert seen.total() == 1 + sum(isinstance(part, torch.nn.Conv2d) for part in model.modules())
        np.testing.assert_allclose(logits, predict(model, IMAGES, **GREY)[0], atol=0.02)
        monkeypatch.setattr(training, "has_narrow_products", lambda precision: True)
        predict(model, IMAGES, precision="bf16", **GREY)
        assert seen.total() == 1 + sum(isinstance(part, torch.nn.Conv2d) for part in model.modules())


class TestFit:
    def test_it_learns_and_records_each_epoch(self, tmp_path):
        model, loss = network()
        history = fit(
            model,
            loss,
            loader(augment=()),
            Settings(epochs=12, batch_size=16, precision="bf16", augment=()),
            checkpoint=tmp_path / "run.pt",
            after_epoch=lambda *_: {"extra": 1},
            progress=False,
        )
        assert [record["epoch"] for record in history] == list(range(1, 13))
        assert history[-1]["train_accuracy"] > 0.6 > history[0]["train_accuracy"]
        assert history[-1]["loss"] < history[0]["loss"]
        lines = (tmp_path / "run.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == history
        assert history[0]["extra"] == 1

    @pytest.mark.parametrize(
        ("method", "options", "within"),
        [
            ("mr2", {"warmup": 4}, True),
            ("mr2", {"warmup": 3}, False),
            ("mr2", {"warmup": 4, "exponent": 0.0}, True),
            ("uniform", {}, False),
            ("erm", {}, False),
        ],
    )
    def test_a_run_of_four_steps_that_ends_within_the_warm_up_says_so(self, recwarn, method, options, within):
        model, loss = network()[0], build_method(method, 5, 128, **options)
        settings = Settings(epochs=2, batch_size=35, precision="float32", augment=())
        fit(model, loss, loader(batch_size=35, augment=()), settings, progress=False)
        said = [str(warning.message) for warning in recwarn if "warmup" in str(warning.message)]
        assert [text.startswith("warmup is 4 and the run has 4 steps") for text in said] == [True] * within
        if method == "mr2":
            assert loss.settled != within

    def test_first_step_is_nesterov_sgd_with_weight_decay(self):
        model, loss = network()[0], build_method("erm", 5, 128)
        settings = Settings(
            epochs=1, batch_size=70, learning_rate=0.1, warmup_epochs=0, precision="float32", augment=()
        )
        images, labels = next(loader(batch_size=70, augment=()).epoch(0))
        before = model.head.weight.detach().clone()
        model.train()
        loss(*model(images), labels).total.backward()
        gradient = model.head.weight.grad + settings.weight_decay * before
        model.zero_grad()
        model.load_state_dict(network()[0].state_dict())
        fit(model, loss, loader(batch_size=70, augment=()), settings, progress=False)
        torch.testing.assert_close(model.head.weight, before - 0.1 * 1.9 * gradient, rtol=1e-4, atol=1e-6)

    def test_layer_decay_scales_the_steps_of_blocks_and_nothing_else(self):
        """PixelUnshuffle has no parameters, so the compact network's blocks are its children 1 to 5; then the head."""
        steps = {}
        for decay in (1.0, 0.5):
            plain = {"momentum": 0.0, "weight_decay": 0.0, "warmup_epochs": 2.0, "augment": ()}
            settings = Settings(epochs=1, batch_size=70, precision="float32", layer_decay=decay, **plain)
            model, loss = network()[0].double(), LearntScale(128).double()
            loss.warmup = 0
            before = {name: p.detach().clone() for name, p in (*model.named_parameters(), *loss.named_parameters())}
            fit(model, loss, doubled(loader(batch_size=70, augment=())), settings, progress=False)
            after = dict((*model.named_parameters(), *loss.named_parameters()))
            steps[decay] = {name: after[name].detach() - value for name, value in before.items()}
        for name, step in steps[1.0].items():
            block = int(name.split(".")[1]) if name.startswith("backbone") else 6
            assert step.abs().max() > 0, name
            torch.testing.assert_close(steps[0.5][name], 0.5 ** (6 - block) * step, rtol=1e-6, atol=1e-12)

    def test_without_layer_decay_all_parameters_are_one_group(self):
        model, loss = network()[0], LearntScale(128)
        (group,) = make_optimizer(model, loss, Settings()).param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in (*model.parameters(), *loss.parameters())]

    @pytest.mark.parametrize(("number", "decay"), [(signal.SIGTERM, 1.0), (signal.SIGINT, 1.0), (signal.SIGTERM, 0.5)])
    def test_stopped_by_a_signal_it_resumes_bit_for_bit(self, tmp_path, number, decay):
        settings = dataclasses.replace(SETTINGS, layer_decay=decay)
        model, loss = network()
        whole = fit(model, loss, loader(), settings, progress=False)

        stopped, its_loss = network()
        batches = 0

        def forward_hook(*_):
            nonlocal batches
            batches += 1
            if batches == 6:  # in the middle of the second epoch
                os.kill(os.getpid(), number)

        handle = stopped.register_forward_hook(forward_hook)
        path = tmp_path / "run.pt"
        with pytest.raises(Interrupted, match=f"Stopped at epoch 1, step 2; its state is in {path}; run the same"):
            fit(stopped, its_loss, loader(), settings, checkpoint=path, progress=False)
        handle.remove()
        assert batches == 6

        resumed, resumed_loss = network(seed=1)  # another initialisation: everything comes from the file
        history = fit(resumed, resumed_loss, loader(), settings, checkpoint=path, progress=False)
        for mine, other in ((model, resumed), (loss, resumed_loss)):
            for name, value in mine.state_dict().items():
                assert torch.equal(value, other.state_dict()[name]), name
        assert [r["loss"] for r in history] == [r["loss"] for r in whole]
        assert [r["train_accuracy"] for r in history] == [r["train_accuracy"] for r in whole]

    def test_handlers_are_put_back(self):
        before = signal.getsignal(signal.SIGTERM)
        fit(*network(), loader(), Settings(epochs=1, batch_size=16, precision="float32"), progress=False)
        assert signal.getsignal(signal.SIGTERM) is before

    @pytest.mark.parametrize("factor", [torch.inf, torch.nan])
    def test_a_loss_that_is_not_finite_stops(self, tmp_path, factor):
        class Broken(MR2Loss):
            def forward(self, logits, features, labels):
                out = super().forward(logits, features, labels)
                return out._replace(total=out.total * (factor if self.statistics.updates == 6 else 1))

        path = tmp_path / "run.pt"
        sentence = f"non-finite at epoch 1, step 2, learning rate 0.0481; the last good checkpoint is {path}"
        with pytest.raises(FloatingPointError, match=sentence):
            fit(network()[0], Broken(5, 128, warmup=0), loader(), SETTINGS, checkpoint=path, progress=False)
        assert torch.load(path, weights_only=True)["state"]["epoch"] == 1

    def test_weights_that_explode_stop(self):
        settings = Settings(
            epochs=3, batch_size=16, learning_rate=1e30, warmup_epochs=0, precision="float32", augment=()
        )
        with pytest.raises(
            FloatingPointError, match=r"non-finite at epoch 0, step \d, learning rate 9.83e\+29; there is no"
        ):
            fit(*network(), loader(), settings, progress=False)

    @pytest.mark.parametrize(("method", "options"), [("mr2", {"warmup": 0}), ("supcon", {})])
    def test_gradient_clipping_bounds_the_step_of_model_and_loss_together(self, method, options):
        settings = Settings(
            epochs=1,
            batch_size=70,
            momentum=0.0,
            weight_decay=0.0,
            warmup_epochs=0,
            learning_rate=1.0,
            clip=0.01,
            precision="float32",
            augment=(),
        )
        modules = network()[0], build_method(method, 5, 128, **options)
        before = [p.detach().clone() for module in modules for p in module.parameters()]
        fit(*modules, loader(batch_size=70, augment=()), settings, progress=False)
        after = [p.detach() for module in modules for p in module.parameters()]
        moved = torch.stack([(new - old).norm() for old, new in zip(before, after, strict=True)])
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
        assert (moved > 0).all()


def doubled(loader):
    """A loader whose batches are float64."""
    epoch = loader.epoch
    loader.epoch = lambda *position: ((images.double(), labels) for images, labels in epoch(*position))
    return loader


class Layers(torch.nn.Module):
    """Two layers and no batch normalisation, which would see each process's share alone."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
        self.head = torch.nn.Linear(32, 5)
        self.register_buffer("moved_by", torch.tensor(-1))  # as running moments are, by each process in its own way

    def forward(self, images):
        self.moved_by.fill_(world()[0])
        features = self.backbone(images)
        return self.head(features), features


class LearntScale(MR2Loss):
    """Margins and no pairs, which stay within a process, and a parameter of the loss's own."""

    def __init__(self, width=32):
        super().__init__(5, width, representation_weight=0.0, warmup=2)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, logits, features, labels):
        return super().forward(self.scale * logits, features, labels)


def train_three_times(process, port, folder):
    """Train without a stop; then with one, asked of the last process alone; then on from there, all begun elsewhere."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)} if port else {}
    os.environ |= {"LOCAL_RANK": str(process), "RANK": str(process), "WORLD_SIZE": "2"} if port else {}
    torch.set_num_threads(1)
    settings, batches = Settings(**{**vars(SETTINGS), "clip": 1.0, "augment": (*SETTINGS.augment, "autoaugment")}), 0
    with process_group("cpu") as device:
        assert world() == ((process, 2) if port else (0, 1))

        def train(name, seed, hook=None):
            model, loss = Layers(seed), LearntScale()
            handle = model.register_forward_hook(hook) if hook else None
            data = loader(augment=settings.augment, device=device)
            history = fit(model, loss, data, settings, checkpoint=folder / f"{name}.pt", progress=False)
            torch.save([model.state_dict(), loss.state_dict(), history], folder / f"{name}-{process}.weights")
            return handle

        def stop(*_):
            nonlocal batches
            batches += 1
            if batches == 6 and process == world()[1] - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        train("whole", 0)
        with pytest.raises(Interrupted, match="Stopped at epoch 1, step 2"):
            train("stopped", 0, stop)
        train("stopped", process + 1)


def test_two_processes_train_as_one_would_and_stop_and_resume_together(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    train_three_times(0, None, tmp_path / "one")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(["mr2_core.studies", "sklearn.datasets"])  # as in test_studies
    start = torch.multiprocessing.start_processes
    start(train_three_times, (port, tmp_path / "two"), nprocs=2, start_method="forkserver")

    def load(name):
        return torch.load(tmp_path / f"{name}.weights", weights_only=True)

    weights, statistics, history = load("one/whole-0")
    first, second, resumed = load("two/whole-0"), load("two/whole-1"), load("two/stopped-0")
    torch.testing.assert_close(first[:2], [weights, statistics], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first[:2], second[:2], rtol=0, atol=0)
    torch.testing.assert_close(first[:2], resumed[:2], rtol=0, atol=0)
    for records in (first[2], second[2], resumed[2]):
        assert [r["train_accuracy"] for r in records] == [r["train_accuracy"] for r in history]
        np.testing.assert_allclose([r["loss"] for r in records], [r["loss"] for r in history], rtol=1e-6)
    for name in ("whole", "stopped"):
        lines = (tmp_path / "two" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3], "one process writes"


def test_predict_is_the_model_in_eval_mode_and_leaves_it_in_its_own():
    model, _ = network()
    model.train()
    logits, features = predict(model, IMAGES, batch_size=32, **GREY)
    assert model.training
    assert (logits.shape, features.shape) == ((70, 5), (70, 128))
    model.eval()
    inputs = torch.from_numpy((IMAGES / 255 - 0.5) / 0.25).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        np.testing.assert_allclose(logits, model(inputs)[0].numpy(), atol=1e-5)
