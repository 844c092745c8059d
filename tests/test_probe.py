"""Probes: the optimum is scikit-learn's, a batch is its runs one by one, and a study of probes is a study."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from mr2_core import class_margins, margin_cross_entropy
from mr2_core.__main__ import main
from mr2_core.data import DataError, subset_per_class
from mr2_core.methods import METHODS
from mr2_core.models import CosineHead
from mr2_core.probe import (
    OF_FEATURES,
    ProbeSettings,
    TrainedProbeSettings,
    exact_margins,
    fit_probe,
    minimise,
    run_probe,
    train_probe,
)
from mr2_core.studies import execute, read_study

ROOT = Path(__file__).resolve().parent.parent
K, D, M = 4, 6, 80
STATISTICS = ("second_moment", "deviation", "centred", "relative")
EXACT = {"tolerance": 1e-9}


def sample(seed=0, size=M, num_classes=K, dtype=torch.float64):
    """Overlapping classes of unequal width, scale and number, with coordinates of very different size."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % num_classes
    labels[: size // 8] = 0
    centres = 2 * torch.randn(num_classes, D, generator=generator, dtype=dtype)
    noise = torch.randn(size, D, generator=generator, dtype=dtype)
    stretch = torch.tensor([0.1, 1, 1, 1, 3, 10], dtype=dtype)
    return (centres[labels] + (1 + labels[:, None] / num_classes) * noise + 0.5) * stretch, labels


def gradient_of(probe, features, labels, margins, decay, class_weights=None):
    """Gradient of the printed objective, by autograd and the module's own loss, at a solved linear head."""
    weight, bias = (part.clone().requires_grad_() for part in (probe.weight, probe.bias))
    each = torch.stack(
        [
            margin_cross_entropy(features[i : i + 1] @ weight.T + bias, labels[i : i + 1], margins)
            * (1 if class_weights is None else class_weights[labels[i]])
            for i in range(len(labels))
        ]
    )
    (each.mean() + decay / 2 * weight.square().sum()).backward()
    return weight.grad, bias.grad


@pytest.mark.parametrize("decay", [1e-3, 0.1])
def test_erm_is_logistic_regression(decay):
    features, labels = sample()
    probe = fit_probe(features, labels, torch.ones(K), decay, **EXACT)
    reference = LogisticRegression(C=1 / (decay * M), solver="newton-cg", tol=1e-10, max_iter=10_000)
    reference.fit(features.numpy(), labels.numpy())
    np.testing.assert_allclose(probe.weight, reference.coef_, atol=1e-5)
    np.testing.assert_allclose(
        probe.bias - probe.bias.mean(), reference.intercept_ - reference.intercept_.mean(), atol=1e-5
    )
    shares = reference.predict_proba(features.numpy())
    np.testing.assert_allclose(probe.logits(features).softmax(dim=1), shares, atol=1e-6)
    assert probe.predict(features).tolist() == reference.predict(features.numpy()).tolist()


def test_two_classes_are_binary_logistic_regression():
    """Rows ±w/2 of the softmax are w of the logistic function, and their penalty is half of w's."""
    features, labels = sample(num_classes=2)
    probe = fit_probe(features, labels, torch.ones(2), 0.05, **EXACT)
    reference = LogisticRegression(C=2 / (0.05 * M), solver="newton-cg", tol=1e-10).fit(
        features.numpy(), labels.numpy()
    )
    np.testing.assert_allclose(probe.weight[1] - probe.weight[0], reference.coef_[0], atol=1e-5)
    np.testing.assert_allclose(probe.weight[0], -probe.weight[1], atol=1e-6)
    np.testing.assert_allclose(probe.bias[1] - probe.bias[0], reference.intercept_[0], atol=1e-5)


def test_with_margins_and_weights_the_gradient_of_the_printed_objective_vanishes():
    features, labels = sample()
    margins = torch.tensor([0.5, 1.0, 2.0, 0.8], dtype=torch.float64)
    weights = torch.tensor([1.0, 3.0, 0.5, 0.7], dtype=torch.float64)
    for class_weights in (None, weights):
        probe = fit_probe(features, labels, margins, 0.02, class_weights=class_weights, **EXACT)
        for gradient in gradient_of(probe, features, labels, margins, 0.02, class_weights):
            assert gradient.abs().max() < 1e-7
    assert min(g.abs().max() for g in gradient_of(probe, features, labels, torch.ones_like(margins), 0.02)) > 1e-3


def test_float32_finds_the_optimum_too():
    features, labels = sample()
    margins = torch.tensor([0.5, 1.0, 2.0, 0.8])
    values = []
    for dtype in (torch.float64, torch.float32):
        probe = fit_probe(features.to(dtype), labels, margins.to(dtype), 0.01, tolerance=1e-5)
        assert probe.weight.dtype == dtype
        logits = probe.logits(features.to(dtype)).double()
        penalty = 0.01 / 2 * probe.weight.double().square().sum()
        values.append((margin_cross_entropy(logits, labels, margins.double()) + penalty).item())
    assert values[1] == pytest.approx(values[0], rel=1e-5)


@pytest.mark.parametrize("head", ["linear", "cosine"])
@pytest.mark.parametrize(("in_cache", "groups"), [(10_000, [3]), (2 * M * K, [2, 1]), (1, [1, 1, 1])])
def test_a_batch_is_its_runs_one_by_one(head, in_cache, groups, monkeypatch):
    monkeypatch.setattr("mr2_core.probe.LOGITS_IN_CACHE", in_cache)
    together = []
    monkeypatch.setattr(
        "mr2_core.probe.minimise", lambda f, start, *rest: together.append(len(start)) or minimise(f, start, *rest)
    )
    runs = []
    for seed, decay in enumerate((0.3, 0.02, 1e-3)):
        features, labels = sample(seed)
        margins = 0.5 + torch.rand(K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        features = F.normalize(features, dim=1) if head == "cosine" else features
        runs.append((features, labels, margins, torch.tensor(decay), margins.flip(0)))
    *arguments, weights = (torch.stack(parts) for parts in zip(*runs, strict=True))
    batch = fit_probe(*arguments, class_weights=weights, head=head, **EXACT)
    assert together == groups
    assert batch.weight.shape == (3, K, D)
    steps = []
    for i, (*arguments, weights) in enumerate(runs):
        alone = fit_probe(*arguments, class_weights=weights, head=head, **EXACT)
        torch.testing.assert_close(alone.weight, batch.weight[i], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(alone.bias, batch.bias[i], atol=1e-6, rtol=1e-5)
        steps.append(alone.iterations)
        torch.testing.assert_close(alone.logits(arguments[0]), batch.logits(arguments[0])[i], atol=1e-5, rtol=1e-5)
    assert batch.iterations == pytest.approx(max(steps), abs=2)  # rounding may cost or save a step


def test_what_has_no_leading_dimension_is_shared():
    features, labels = sample()
    decays = torch.tensor([0.01, 0.1])
    shared = fit_probe(features, labels, torch.ones(K), decays, **EXACT)
    for i, decay in enumerate(decays):
        torch.testing.assert_close(
            shared.weight[i], fit_probe(features, labels, torch.ones(K), decay, **EXACT).weight, atol=1e-6, rtol=1e-5
        )
    assert shared.predict(features).shape == (2, M)


def test_a_solved_run_stays_where_it_is_while_others_go_on():
    def easy(x):
        return x[:, 0] ** 2 + 3 * x[:, 1] ** 2 + x[:, 0] ** 4

    def objective(x):  # beside the easy one Rosenbrock's valley
        valley = 100 * (x[:, 1] - x[:, 0] ** 2) ** 2 + (1 - x[:, 0]) ** 2
        return torch.where(torch.arange(len(x)) == 0, easy(x), valley)

    start = torch.tensor([[1.0, 1.0], [-1.2, 1.0]], dtype=torch.float64)
    both, steps = minimise(objective, start, lambda g: g, 1e-6, 200)
    alone, fewer = minimise(easy, start[:1], lambda g: g, 1e-6, 200)
    assert fewer < steps / 2
    assert torch.equal(both[:1], alone)
    torch.testing.assert_close(both[1], torch.ones(2, dtype=torch.float64), atol=1e-3, rtol=0)


def test_steps_are_halved_until_the_value_falls():
    """The first step leads to where the function is flat, which only its value tells from a minimum."""
    solution, _ = minimise(
        lambda x: 1 - (-(x**2)).exp().prod(dim=1), torch.full((1, 3), 0.5).double(), lambda g: 100 * g, 1e-9, 100
    )
    assert solution.abs().max() < 1e-8


def test_preconditioning_makes_it_quick():
    """Coordinates whose scales differ by a factor of 1,000 would take L-BFGS alone several hundred steps."""
    features, labels = sample(size=400)
    features = features * torch.logspace(-1.5, 1.5, D)
    assert fit_probe(features, labels, torch.ones(K), 1e-3, tolerance=1e-6).iterations < 80


def test_a_uniform_margin_is_a_weight_decay():
    """z/c̄ with W is z with W/c̄, whose penalty is α c̄² a half its square."""
    features, labels = sample()
    first = fit_probe(features, labels, torch.full((K,), 3.0), 0.01, **EXACT)
    second = fit_probe(features, labels, torch.ones(K), 0.09, **EXACT)
    torch.testing.assert_close(first.weight / 3, second.weight, atol=1e-7, rtol=1e-5)


class TestCosine:
    features, labels = sample()
    features = F.normalize(features, dim=1)
    margins = torch.tensor([0.7, 1.0, 1.4, 0.9], dtype=torch.float64)

    def objective(self, weight, scale, decay=0.005):
        """With the head of mr2_core.models: rows of norm ``scale``, penalised like a linear head's."""
        head = CosineHead(D, K).double()
        logits = torch.func.functional_call(head, {"weight": weight, "log_scale": scale.log()}, (self.features,))
        return margin_cross_entropy(logits, self.labels, self.margins) + decay / 2 * K * scale**2

    def test_rows_have_one_norm_and_nothing_near_is_better(self):
        probe = fit_probe(self.features, self.labels, self.margins, 0.005, head="cosine", **EXACT)
        norms = probe.weight.norm(dim=1)
        torch.testing.assert_close(norms, norms.mean().expand(K))
        assert not probe.bias.any()
        weight, scale = probe.weight.clone().requires_grad_(), norms[0].clone().requires_grad_()
        value = self.objective(weight, scale)
        for gradient in torch.autograd.grad(value, (weight, scale)):
            assert gradient.abs().max() < 1e-6
        generator = torch.Generator().manual_seed(0)
        for size in (0.01, 0.1, 1.0):
            for _ in range(20):
                other = weight + size * torch.randn(K, D, generator=generator, dtype=torch.float64)
                assert self.objective(other, scale * (1 + 0.1 * size)) > value

    def test_a_unit_feature_has_spread_one_at_p_2_alone(self):
        margins, _ = exact_margins("mr2", self.features, self.labels, K)
        torch.testing.assert_close(margins, torch.ones(K, dtype=torch.float64), atol=1e-6, rtol=0)
        for p in (3.0, 4.0, 5.0):
            margins, _ = exact_margins("mr2", self.features, self.labels, K, p=p)
            rows = [self.features[self.labels == k] for k in range(K)]
            spread = torch.stack(
                [
                    torch.linalg.vector_norm(r.mean(0), ord=p) ** 2
                    + (torch.linalg.vector_norm(r - r.mean(0), ord=p, dim=1) ** 2).mean()
                    for r in rows
                ]
            )
            torch.testing.assert_close(margins, spread ** (1 / 3) / (spread ** (1 / 3)).mean(), atol=1e-5, rtol=0)
            assert margins.std() > 1e-3

    def test_features_of_other_lengths_are_refused(self):
        with pytest.raises(ValueError, match=r"features have lengths 2 … 2; a cosine head expects unit vectors"):
            fit_probe(2 * self.features, self.labels, self.margins, 0.005, head="cosine")


class TestMargins:
    features, labels = sample()

    def expected(self, statistic):
        """[K], by numpy."""
        rows = [self.features[self.labels == k].numpy() for k in range(K)]
        mean = np.stack([r.mean(axis=0) for r in rows])
        deviation = np.array([((r - r.mean(axis=0)) ** 2).sum(axis=1).mean() for r in rows])
        square, centred = (mean**2).sum(axis=1), ((mean - mean.mean(axis=0)) ** 2).sum(axis=1)
        return {
            "second_moment": square + deviation,
            "deviation": deviation,
            "centred": centred + deviation,
            "relative": deviation / square,
        }[statistic]

    @pytest.mark.parametrize("statistic", STATISTICS)
    @pytest.mark.parametrize("exponent", [1 / 3, 1.0, -1 / 3])
    def test_they_come_from_the_exact_statistics(self, statistic, exponent):
        margins, weights = exact_margins(
            "mr2", self.features, self.labels, K, statistic=statistic, exponent=exponent, mean_margin=2.0
        )
        power = self.expected(statistic) ** exponent
        np.testing.assert_allclose(margins, 2 * power / power.mean(), rtol=1e-5)
        assert weights.tolist() == [1.0] * K

    def test_the_weighted_method_weighs_by_margins_that_average_to_one(self):
        margins, weights = exact_margins("mr2-weighted", self.features, self.labels, K, mean_margin=2.0)
        torch.testing.assert_close(weights, margins / 2)
        assert margins.std() > 0.01

    def test_the_placebo_deals_the_same_margins_to_other_classes_by_seed(self):
        margins, _ = exact_margins("mr2", self.features, self.labels, K)
        before = torch.random.get_rng_state()
        dealt = [exact_margins("mr2-placebo", self.features, self.labels, K, seed=s)[0] for s in range(8)]
        assert torch.equal(before, torch.random.get_rng_state())
        assert all(torch.equal(d.sort().values, margins.sort().values) for d in dealt)
        assert len({tuple(d.tolist()) for d in dealt}) > 3
        assert torch.equal(dealt[5], exact_margins("mr2-placebo", self.features, self.labels, K, seed=5)[0])

    def test_erm_and_uniform(self):
        assert exact_margins("erm", self.features, self.labels, K)[0].tolist() == [1.0] * K
        margins, _ = exact_margins("uniform", self.features, self.labels, K, mean_margin=1.5)
        torch.testing.assert_close(margins, torch.full((K,), 1.5, dtype=torch.float64))

    @pytest.mark.parametrize(
        ("method", "hyperparameters", "sentence"),
        [
            ("focal", {}, "method is 'focal'; the probe knows erm, uniform, mr2, mr2-weighted, mr2-placebo"),
            ("mr2", {"warmup": 3, "decay": 0.5}, "a probe has no decay, warmup: its features are frozen"),
            ("mr2", {"representation": "printed"}, "a probe has no representation"),
            ("mr2", {"statistic": "norm"}, "statistic is 'norm'"),
        ],
    )
    def test_what_a_probe_cannot_do_is_refused(self, method, hyperparameters, sentence):
        with pytest.raises(ValueError, match=sentence):
            exact_margins(method, self.features, self.labels, K, **hyperparameters)

    def test_labels_of_another_type_are_refused(self):
        with pytest.raises(TypeError, match=r"labels has type torch.float64; expected class indices"):
            exact_margins("mr2", self.features, self.labels.double(), K)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"features": np.zeros((M, D))}, TypeError, "features has type ndarray; expected float32 or float64"),
        ({"features": torch.zeros(M, D).half()}, TypeError, "features has type torch.float16"),
        ({"labels": torch.zeros(M)}, TypeError, "labels has type torch.float32; expected class indices"),
        ({"margins": torch.ones(K, dtype=torch.int64)}, TypeError, "margins has type torch.int64"),
        ({"features": torch.zeros(M)}, ValueError, r"features has shape \[80\]; expected \[M, D\] or \[R, M, D\]"),
        ({"labels": torch.zeros(2, M).long(), "margins": torch.ones(3, K)}, ValueError, "with one R among"),
        ({"labels": torch.arange(M - 1) % K}, ValueError, r"labels has shape \[1, 79\].* the 80 rows of features"),
        ({"class_weights": torch.ones(K + 1)}, ValueError, r"class_weights \[1, 5\].*as the 4 margins"),
        ({"margins": torch.tensor([1.0, 0, 1, 1])}, ValueError, r"margins lies in 0.0 … 1.0; expected positive"),
        ({"weight_decay": 0.0}, ValueError, r"weight_decay lies in 0.0 … 0.0; expected positive, finite"),
        ({"features": torch.full((M, D), torch.nan)}, ValueError, "features holds NaN or infinite values"),
        ({"labels": torch.arange(M) % (K + 1)}, ValueError, "labels lie in 0 … 4; expected 0 … 3, as there are 4"),
        ({"labels": torch.arange(M) % (K - 1)}, ValueError, "class 3 has no example in run 0"),
        ({"head": "bilinear"}, ValueError, "head is 'bilinear'; expected one of linear, cosine"),
    ],
)
def test_bad_input_is_one_sentence(changes, error, sentence):
    features, labels = sample()
    arguments = {"features": features, "labels": labels, "margins": torch.ones(K), "weight_decay": 0.1} | changes
    with pytest.raises(error, match=sentence) as caught:
        fit_probe(**arguments)
    assert "\n" not in str(caught.value)


def test_what_is_not_solved_is_not_returned():
    features, labels = sample()
    sentence = r"after 3 steps a gradient is still \S+ of what it was .* at most 1.0e-09"
    with pytest.raises(FloatingPointError, match=sentence):
        fit_probe(features, labels, torch.ones(K), 1e-3, max_iterations=3, **EXACT)


NEEDED = {"jtt": {"first_epochs": 2, "upweight": 3.0}}
NEEDED |= dict.fromkeys(("mr2", "mr2-weighted", "mr2-placebo"), {"warmup": 20})  # a run has eighty steps


def test_erm_trained_by_steps_comes_to_the_optimum():
    features, labels = sample(dtype=torch.float32)
    features = (features - features.mean(dim=0)) / features.std(dim=0)
    settings = TrainedProbeSettings(epochs=200, batch_size=M, learning_rate=1.0, weight_decay=0.05)
    trained = train_probe(features, labels, K, "erm", settings)
    assert trained.iterations == 200
    weight, bias = (part.clone().requires_grad_() for part in (trained.weight, trained.bias))
    F.cross_entropy(features @ weight.T + bias, labels).backward()
    for part in (weight, bias):  # the loop's weight decay falls on the bias too
        torch.testing.assert_close(part.grad, -0.05 * part, rtol=0, atol=1e-4)
    again, other = (train_probe(features, labels, K, "erm", settings, seed=seed) for seed in (0, 1))
    assert torch.equal(trained.weight, again.weight)
    assert not torch.equal(trained.weight, other.weight)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_that_acts_on_the_head_trains_one(method):
    features, labels = sample(size=200, dtype=torch.float32)
    settings = TrainedProbeSettings(epochs=20, batch_size=50, learning_rate=0.3)
    options = NEEDED.get(method, {})
    if method in OF_FEATURES:
        with pytest.raises(ValueError, match=f"^method '{method}' differs from erm in what it does to features"):
            train_probe(features, labels, K, method, settings, **options)
        return
    probe = train_probe(features, labels, K, method, settings, **options)
    assert (probe.predict(features) == labels).float().mean() > 2 / K


STUDY = """
name = "tiny"
kind = "{kind}"
dataset = "features:made"
per_class = 12
model = "probe"
head = "{head}"
seeds = [0, 1]
[training]
weight_decay = {decay}
[arms.erm]
method = "erm"
[arms.placebo]
method = "mr2-placebo"
training = {{ weight_decay = 0.01 }}
"""


class TestStudy:
    @pytest.fixture
    def made(self, monkeypatch):
        features, labels = sample(size=3 * M, dtype=torch.float32)
        parts = {"class_names": np.array(list("abcd"))}
        for i, split in enumerate(("train", "validation", "test")):
            parts |= {f"x_{split}": features[i::3].numpy(), f"y_{split}": labels[i::3].numpy().astype(np.uint8)}
        monkeypatch.setattr("mr2_core.probe.load_features", {"made": parts}.__getitem__)
        return parts

    @pytest.fixture
    def study(self, tmp_path):
        def write(kind="confirmatory", head="linear", decay="0.05"):
            path = tmp_path / "tiny.toml"
            path.write_text(STUDY.format(kind=kind, head=head, decay=decay))
            return path

        return write

    def test_tuning_records_every_trial_and_never_reads_test(self, made, study, tmp_path):
        del made["x_test"], made["y_test"]
        run = read_study(study("tuning", decay="[0.001, 0.1, 10.0]"), tmp_path)[0]
        record = execute(run)
        assert [trial["weight_decay"] for trial in record["trials"]] == [0.001, 0.1, 10.0]
        accuracies = [trial["validation_accuracy"] for trial in record["trials"]]
        assert accuracies[2] < max(accuracies)
        counts = np.bincount(made["y_validation"])
        assert np.average(record["validation_by_class"], weights=counts) == pytest.approx(max(accuracies))
        assert "test_by_class" not in record
        assert not run.result.with_suffix(".npz").exists()
        assert run.record == json.loads(json.dumps(record))

    def test_features_without_validation_rows_are_refused(self, made, study, tmp_path):
        run = read_study(study(), tmp_path)[0]
        del made["x_validation"], made["y_validation"]
        with pytest.raises(DataError, match="has no validation rows; expected x_validation and y_validation beside"):
            execute(run)

    @pytest.mark.parametrize("head", ["linear", "cosine"])
    def test_a_run_is_what_fit_probe_gives(self, made, study, tmp_path, head):
        run = read_study(study(head=head), tmp_path)[3]
        assert (run.arm, run.seed) == ("placebo", 1)
        record = execute(run)
        chosen = subset_per_class(made["y_train"], 12, seed=1)
        labels = torch.from_numpy(made["y_train"][chosen]).long()
        features, test = (torch.from_numpy(made[name]) for name in ("x_train", "x_test"))
        if head == "cosine":
            features, test = F.normalize(features, dim=1), F.normalize(test, dim=1)
        margins, _ = exact_margins("mr2-placebo", features[chosen], labels, K, seed=1)
        assert not torch.equal(margins, exact_margins("mr2-placebo", features[chosen], labels, K, seed=0)[0])
        prediction = fit_probe(features[chosen], labels, margins, 0.01, head=head).predict(test).numpy()
        by_class = [(prediction == k)[made["y_test"] == k].mean() for k in range(K)]
        np.testing.assert_allclose(record["test_by_class"], by_class, atol=1e-6)
        np.testing.assert_allclose(record["margins"], margins, atol=1e-4)
        with np.load(run.result.with_suffix(".npz")) as arrays:
            assert (np.diff(arrays["label"].astype(int)) >= 0).all()
            order = np.argsort(made["y_test"], kind="stable")
            assert arrays["prediction"].tolist() == prediction[order].tolist()

    def test_a_trained_probe_is_what_train_probe_gives(self, made, study, tmp_path):
        path = study(decay="[0.001, 10.0]", kind="tuning")
        text = path.read_text().replace('"probe"', '"probe-sgd"').replace('"mr2-placebo"', '"fair-dro"')
        path.write_text(text + "\nradius = 0.2\n")
        tuning, other = read_study(path, tmp_path)[2:]
        assert tuning.configuration["training"]["precision"] == "float32"
        assert len(execute(tuning)["trials"]) == 2
        record = execute(other)
        chosen = subset_per_class(made["y_train"], 12, seed=1)
        parts = torch.from_numpy(made["x_train"][chosen]), torch.from_numpy(made["y_train"][chosen]).long()
        settings = TrainedProbeSettings(weight_decay=0.01)
        probe = train_probe(*parts, K, "fair-dro", settings, seed=1, radius=0.2)
        prediction = probe.predict(torch.from_numpy(made["x_validation"])).numpy()
        by_class = [(prediction == k)[made["y_validation"] == k].mean() for k in range(K)]
        np.testing.assert_allclose(record["validation_by_class"], by_class, atol=1e-6)
        path.write_text(text.replace('"linear"', '"cosine"'))
        with pytest.raises(ValueError, match="head is 'cosine'; the model probe-sgd has a linear one"):
            execute(read_study(path, tmp_path)[0])

    def test_it_runs_and_reports_by_the_command_line(self, made, study, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("os.cpu_count", lambda: 1)  # so small a problem is quicker on one thread
        path, results = str(study()), ["--results", str(tmp_path / "results")]
        assert main(["run", path, *results]) == 0
        assert main(["report", path, *results]) == 0
        printed = capsys.readouterr().out
        assert "All runs are done." in printed
        assert "4 of 4 runs are done; thirds by all; Δ against erm" in printed

    def test_a_wrong_study_is_refused(self, made, study, tmp_path):
        with pytest.raises(ValueError, match=r"weight_decay is \[0.1, 0.2\]; only a tuning study may have several"):
            execute(read_study(study(decay="[0.1, 0.2]"), tmp_path)[0])
        with pytest.raises(ValueError, match="arm erm: weight_decay or tolerance holds -1.0; expected positive"):
            read_study(study(decay="-1.0"), tmp_path)
        with pytest.raises(ValueError, match="holds True"):
            ProbeSettings(weight_decay=True)
        with pytest.raises(ValueError, match="holds -1; expected positive"):
            TrainedProbeSettings(weight_decay=[0.1, -1])
        with pytest.raises(ValueError, match="augment holds flip; expected nothing"):
            TrainedProbeSettings(augment=("flip",))


@pytest.mark.parametrize(
    "name",
    [
        *(f"cifar100-probe-{features}" for features in ("compact", "compact-cosine", "lite0", "lite0-cosine")),
        "imagewoof-probe",
    ],
)
def test_the_recorded_study_uses_what_its_tuning_chose(name):
    results = ROOT / "data" / "results"
    tuning, study = (read_study(ROOT / "studies" / f"{name}{part}.toml", results) for part in ("-tuning", ""))
    chosen = {}
    for run in tuning:
        best = max(run.record["trials"], key=lambda trial: trial["validation_accuracy"])
        chosen[run.arm] = best["weight_decay"]
        assert len(run.record["trials"]) == 8
    assert {run.arm for run in study} == set(chosen)
    for run in study:
        assert run.configuration["training"]["weight_decay"] == chosen[run.arm]
        assert run.record, f"{run.arm} seed {run.seed} has not been run"


def test_the_recorded_baselines_use_what_their_tuning_chose():
    results = ROOT / "data" / "results"
    tuning, study = (
        read_study(ROOT / "studies" / f"cifar100-baselines-probe{part}.toml", results) for part in ("-tuning", "")
    )
    trials = {}
    for run in tuning:
        method, own = run.configuration["method"], run.configuration["hyperparameters"]
        trials.setdefault(method, []).extend((own, trial) for trial in run.record["trials"])
    assert {run.arm for run in study} == set(trials)
    for run in study:
        assert len(trials[run.arm]) == 8
        own, best = max(trials[run.arm], key=lambda trial: trial[1]["validation_accuracy"])
        assert run.configuration["hyperparameters"] == own
        assert run.configuration["training"]["weight_decay"] == best["weight_decay"]
        assert run.record, f"{run.arm} seed {run.seed} has not been run"


def test_a_recorded_run_can_be_repeated():
    run = next(
        run
        for run in read_study(ROOT / "studies" / "cifar100-probe-lite0.toml", ROOT / "data" / "results")
        if (run.arm, run.seed) == ("relative", 3)
    )
    record, arrays = run_probe(run.configuration)
    np.testing.assert_allclose(record["margins"], run.record["margins"], atol=2e-4)
    with np.load(run.result.with_suffix(".npz")) as recorded:
        assert (recorded["label"] == arrays["label"]).all()
        assert (recorded["prediction"] == arrays["prediction"]).mean() > 0.999
    law = class_margins(torch.tensor(record["margins"]), exponent=1.0)
    torch.testing.assert_close(law, torch.tensor(record["margins"]), atol=1e-3, rtol=0)


def test_fewer_images_than_features_are_solved():
    """Float32 rounding makes the first guess of the curvature indefinite; float64 is the reference."""
    generator = torch.Generator().manual_seed(0)
    features = 20 + torch.randn(100, 1280, generator=generator)
    labels = torch.arange(100) % K
    solved = fit_probe(features, labels, torch.ones(K), 1e-3)
    reference = fit_probe(features.double(), labels, torch.ones(K), 1e-3, tolerance=1e-8)
    torch.testing.assert_close(
        solved.logits(features).softmax(dim=1), reference.logits(features.double()).softmax(dim=1).float(),
        rtol=0, atol=1e-2,
    )  # fmt: skip


def test_a_head_trained_by_steps_knows_class_frequencies():
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(2), torch.tensor([190, 10]))
    features = torch.randn(200, 4, generator=generator) + labels[:, None]
    settings = TrainedProbeSettings(epochs=2, batch_size=50, learning_rate=0.1, weight_decay=1e-3)
    plain, adjusted = (train_probe(features, labels, 2, name, settings, seed=0) for name in ("erm", "logit-adjustment"))
    assert (adjusted.predict(features) == 1).sum() > (plain.predict(features) == 1).sum()
