"""Class reports against fairlearn, scikit-learn and scipy, and their intervals against simulated truth."""

import numpy as np
import pytest
import torch
from fairlearn.metrics import MetricFrame
from scipy.stats import binomtest, bootstrap, spearmanr
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix, recall_score

from mr2_core.metrics import ClassAccuracies, ClassReport, rank_correlation

pytestmark = pytest.mark.filterwarnings("error")


def simulate(rng, chance, images):
    """Labels and predictions of classes that are right with the given chance and else name another class."""
    labels = np.repeat(np.arange(len(chance)), images)
    wrong = (labels + rng.integers(1, len(chance), len(labels))) % len(chance)
    return labels, np.where(rng.random(len(labels)) < np.asarray(chance)[labels], labels, wrong)


@pytest.fixture(scope="module")
def hundred():
    rng = np.random.default_rng(0)
    labels, predictions = simulate(rng, rng.beta(5, 4, 100), rng.integers(20, 120, 100))
    order = rng.permutation(len(labels))
    return labels[order], predictions[order]


def test_equal_to_scikit_learn(hundred):
    report = ClassReport(*hundred, 100)
    assert report.accuracy == pytest.approx(accuracy_score(*hundred), abs=1e-15)
    assert report.balanced_accuracy == pytest.approx(balanced_accuracy_score(*hundred), abs=1e-15)
    np.testing.assert_allclose(report.by_class, recall_score(*hundred, average=None), rtol=1e-15)
    np.testing.assert_array_equal(report.confusion, confusion_matrix(*hundred))
    np.testing.assert_array_equal(report.count, np.bincount(hundred[0]))


def test_equal_to_fairlearn(hundred):
    labels, predictions = hundred
    frame = MetricFrame(
        metrics=accuracy_score, y_true=labels, y_pred=predictions, sensitive_features=labels.astype(str)
    )
    report = ClassReport(labels, predictions, 100)
    assert report.accuracy == pytest.approx(frame.overall, abs=1e-15)
    by_group = frame.by_group.rename(int).sort_index()
    np.testing.assert_allclose(report.by_class, by_group, rtol=1e-15)
    assert report.difference == pytest.approx(frame.difference(), abs=1e-15)
    assert report.worst(1) == pytest.approx(frame.group_min(), abs=1e-15)
    assert report.std == pytest.approx(by_group.std(ddof=0), abs=1e-12)


def test_by_hand():
    report = ClassReport([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 0, 0, 3, 0], 4)
    np.testing.assert_array_equal(report.by_class, [0.5, 1, 0, 0.5])
    np.testing.assert_array_equal(report.ranking, [1, 0, 3, 2])  # classes 0 and 3 tie and keep their order
    assert report.worst(1) == 0
    assert report.worst(3) == pytest.approx(1 / 3)
    assert report.worst(4) == report.balanced_accuracy == report.accuracy == 0.5
    np.testing.assert_array_equal(report.thirds([1, 0, 3, 2]), [0.75, 0.5, 0])
    np.testing.assert_array_equal(report.thirds([2, 3, 0, 1]), [0.25, 0.5, 1])
    assert report.gap == 0.75
    np.testing.assert_array_equal(report.confusion[2], [2, 0, 0, 0])


def test_thirds_of_a_hundred_classes_hold_34_33_and_33():
    ranking = np.random.default_rng(0).permutation(100)
    labels = np.arange(100)
    for third, size in enumerate((34, 33, 33)):
        right = np.array_split(ranking, 3)[third]
        assert len(right) == size
        thirds = ClassReport(labels, np.where(np.isin(labels, right), labels, (labels + 1) % 100), 100).thirds(ranking)
        np.testing.assert_array_equal(thirds, np.eye(3)[third])


def test_class_without_images():
    report = ClassReport([0, 0, 2, 3], [0, 1, 2, 0], 5)
    np.testing.assert_array_equal(report.by_class, [0.5, np.nan, 1, 0, np.nan])
    np.testing.assert_array_equal(report.ranking, [2, 0, 3, 1, 4])
    np.testing.assert_array_equal(report.thirds([1, 0, 4, 3, 2]), [0.5, 0, 1])
    assert (report.gap, report.worst(1), report.difference) == (1, 0, 1)
    assert report.balanced_accuracy == 0.5
    np.testing.assert_array_equal(np.isnan(report.wilson()).all(1), [False, True, False, False, True])
    assert np.isnan(report.interval("by_class")[[1, 4]]).all()
    assert np.isfinite(report.interval("accuracy")).all()
    np.testing.assert_array_equal(ClassReport([0, 1], [0, 0], 2).thirds([0, 1]), [1, 0, np.nan])


@pytest.mark.parametrize("labels", [[0, 0, 1, 1], [0, 0, 0, 0]], ids=["all present", "one absent"])
def test_return_types_never_change(labels):
    report = ClassReport(labels, [0, 1, 1, 1], 2)
    for value in (
        report.accuracy,
        report.balanced_accuracy,
        report.std,
        report.difference,
        report.gap,
        report.worst(1),
    ):
        assert type(value) is float
    for array, shape in ((report.by_class, (2,)), (report.thirds([0, 1]), (3,)), (report.wilson(), (2, 2))):
        assert (array.dtype, array.shape) == (np.float64, shape)
    for array, shape in ((report.count, (2,)), (report.ranking, (2,)), (report.confusion, (2, 2))):
        assert (array.dtype, array.shape) == (np.int64, shape)
    assert report.interval("gap", resamples=10).shape == (2,)
    assert report.interval("by_class", resamples=10).shape == (2, 2)
    assert report.interval(lambda r: r.thirds([1, 0]), resamples=10).shape == (3, 2)


@pytest.mark.parametrize(
    "convert",
    [np.ndarray.tolist, lambda x: list(np.uint8(x)), np.uint8, torch.tensor, lambda x: torch.tensor(x).to(torch.uint8)],
    ids=["list", "list of uint8", "uint8", "int64 tensor", "uint8 tensor"],
)
def test_arrays_lists_and_tensors_are_the_same(hundred, convert):
    # 99 * 100 + 99 does not fit in eight bits.
    expected = ClassReport(*hundred, 100)
    report = ClassReport(*(convert(values) for values in hundred), 100)
    np.testing.assert_array_equal(report.confusion, expected.confusion)


def test_interval_equals_stratified_bootstrap_of_scipy():
    labels, predictions = simulate(np.random.default_rng(1), [0.3, 0.6, 0.9], 80)
    report = ClassReport(labels, predictions, 3)
    strata = [(labels == predictions)[labels == k].astype(float) for k in range(3)]

    def reference(statistic):
        result = bootstrap(strata, statistic, method="percentile", n_resamples=20_000, rng=0, vectorized=True)
        return np.array(result.confidence_interval)

    overall = reference(lambda *x, axis: sum(part.mean(axis) for part in x) / 3)
    gap = reference(lambda easy, medium, hard, axis: hard.mean(axis) - easy.mean(axis))
    # The ends are multiples of 1/240 and 1/80: one step of tolerance for the noise of 20,000 draws.
    np.testing.assert_allclose(report.interval("accuracy", resamples=20_000), overall, atol=1.01 / 240)
    np.testing.assert_allclose(report.interval("gap", resamples=20_000), gap, atol=1.01 / 80)
    np.testing.assert_array_equal(
        report.interval("gap"), report.interval(lambda r: r.thirds(report.ranking) @ [1, 0, -1])
    )


def test_intervals_cover_the_truth_as_often_as_they_say():
    level, repeats = 0.9, 300
    rng = np.random.default_rng(2)
    chance = np.linspace(0.2, 0.9, 12)
    ranking = np.arange(12)[::-1]
    truth = [chance.mean(), *(part.mean() for part in np.array_split(chance[ranking], 3))]
    hits, wilson_hits = np.zeros(4), np.zeros(12)
    for seed in range(repeats):
        report = ClassReport(*simulate(rng, chance, 100), 12)
        ends = report.interval(lambda r: [r.accuracy, *r.thirds(ranking)], level, resamples=200, seed=seed)
        hits += (ends[:, 0] <= truth) & (truth <= ends[:, 1])
        low, high = report.wilson(level).T
        wilson_hits += (low <= chance) & (chance <= high)
    # Three standard errors, and 0.01 for the quantiles of only 200 draws and the discreteness of counts.
    noise = 3 * np.sqrt(level * (1 - level) / repeats) + 0.01
    assert np.abs(hits / repeats - level).max() < noise
    # Wilson's coverage of one proportion swings about the level with the proportion; its mean does not.
    assert abs(wilson_hits.mean() / repeats - level) < 0.015


def test_interval_is_repeatable_and_wider_at_a_higher_level(hundred):
    report = ClassReport(*hundred, 100)
    first = report.interval("gap")
    np.testing.assert_array_equal(first, report.interval("gap"))
    assert not np.array_equal(first, report.interval("gap", seed=1))
    assert (
        first[0] < report.interval("gap", level=0.5)[0] < report.gap < report.interval("gap", level=0.5)[1] < first[1]
    )


def test_wilson_equals_scipy(hundred):
    report = ClassReport(*hundred, 100)
    for level in (0.9, 0.95):
        expected = [
            binomtest(int(c), int(n)).proportion_ci(level, "wilson")
            for c, n in zip(report.correct, report.count, strict=True)
        ]
        np.testing.assert_allclose(report.wilson(level), expected, atol=1e-12)


def test_wilson_does_not_collapse_at_the_ends_where_the_bootstrap_does():
    report = ClassReport([0] * 10 + [1] * 10, [0] * 20, 2)
    np.testing.assert_array_equal(report.interval("by_class"), [[1, 1], [0, 0]])
    np.testing.assert_allclose(report.wilson(), [[0.72246, 1], [0, 0.27754]], atol=1e-5)


def test_own_ranking_exaggerates_the_gap_and_another_run_does_not():
    """Equal classes: the true gap is 0, the own ranking sees one, the ranking of a second run does not."""
    rng = np.random.default_rng(3)
    own, other = [], []
    for _ in range(30):
        first, second = (ClassReport(*simulate(rng, np.full(30, 0.5), 100), 30) for _ in range(2))
        own.append(first.gap)
        easy, _, hard = first.thirds(second.ranking)
        other.append(easy - hard)
    # Expected: the outer thirds of 30 normal variables of deviation 0.05 lie 1.06 deviations each from their mean.
    assert np.mean(own) == pytest.approx(2 * 1.06 * 0.05, abs=0.01)
    assert abs(np.mean(other)) < 3 * np.std(other) / np.sqrt(30)


def test_rank_correlation_equals_scipy():
    rng = np.random.default_rng(4)
    x = rng.normal(size=100)
    y = np.round(x + rng.normal(size=100), 1)  # with ties
    rho, low, high = rank_correlation(x, y, resamples=4000)
    assert rho == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    expected = bootstrap(
        (x, y),
        lambda a, b: spearmanr(a, b).statistic,
        paired=True,
        vectorized=False,
        n_resamples=1000,
        method="percentile",
        rng=0,
    ).confidence_interval
    np.testing.assert_allclose([low, high], expected, atol=0.02)
    np.testing.assert_array_equal(rank_correlation(x, -x), [-1, -1, -1])
    assert np.isnan(rank_correlation(np.ones(5), x[:5])).all()
    assert np.isfinite(rank_correlation([1, 2, 3], [1, 3, 2])).all()  # though some draws hold one class three times


CASES = {
    "lengths": (lambda: ClassReport([0, 1], [0], 2), "2 labels and 1 predictions"),
    "empty": (lambda: ClassReport([], [], 2), r"labels has shape \(0,\)"),
    "float labels": (lambda: ClassReport([0.0, 1.0], [0, 1], 2), "labels holds float64"),
    "float tensor": (lambda: ClassReport([0, 1], torch.ones(2, dtype=torch.bfloat16), 2), "predictions holds float64"),
    "names": (lambda: ClassReport(["cat", "dog"], [0, 1], 2), "labels holds <U3 values, expected integers"),
    "truth values": (lambda: ClassReport([True, False], [0, 1], 2), "labels holds bool"),
    "scores": (lambda: ClassReport([0, 1], np.eye(2, dtype=int), 2), r"predictions has shape \(2, 2\)"),
    "label too high": (lambda: ClassReport([0, 2], [0, 1], 2), "labels run from 0 to 2, expected 0 to 1"),
    "label negative": (lambda: ClassReport([0, -1], [0, 1], 2), "labels run from -1 to 0"),
    "prediction too high": (lambda: ClassReport([0, 1], [0, 2], 2), "predictions run from 0 to 2"),
    "worst of none": (lambda: report().worst(0), "k is 0, expected 1 to 3"),
    "worst of too many": (lambda: report().worst(4), "k is 4, expected 1 to 3, the number of classes with images"),
    "ranking too short": (lambda: report().thirds([0, 1, 2]), "each class from 0 to 3 once"),
    "ranking with a repeat": (lambda: report().thirds([0, 1, 2, 2]), "each class from 0 to 3 once"),
    "ranking of floats": (lambda: report().thirds([0.0, 1, 2, 3]), "ranking holds float64"),
    "unknown statistic": (lambda: report().interval("confusion"), "statistic is 'confusion', expected .* accuracy"),
    "level in per cent": (lambda: report().interval("gap", level=95), "level is 95, expected a number between 0 and 1"),
    "no resamples": (lambda: report().interval("gap", resamples=0), "resamples is 0"),
    "level of wilson": (lambda: report().wilson(0), "level is 0"),
    "correlation of unequal lengths": (lambda: rank_correlation([1, 2], [1, 2, 3]), r"shapes \(2,\) and \(3,\)"),
    "correlation with a NaN": (lambda: rank_correlation([1, 2], [1, np.nan]), "finite"),
    "correlation of one class": (lambda: rank_correlation([1], [1]), "2 or more classes"),
}


def report():
    return ClassReport([0, 1, 2], [0, 0, 2], 4)


@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_explained_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")


def test_num_classes_must_be_an_integer():
    with pytest.raises(TypeError):
        ClassReport([0, 1], [0, 1], 2.0)


def test_bootstrap_draws_have_no_images():
    with pytest.raises(AttributeError):
        ClassAccuracies(np.array([1]), np.array([2])).confusion  # noqa: B018
