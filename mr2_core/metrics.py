"""Per-class accuracy, its disparity measures and their uncertainty."""

import operator

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata


class ClassAccuracies:
    """Accuracy by class from counts alone: the base of `ClassReport`, and all that a bootstrap draw consists of.

    Parameters
    ----------
    correct, count : int64 arrays [K]
        Images classified correctly and images in all, by class.
    ranking : int64 array [K], optional
        Classes, easiest first; by default by accuracy, ties in class order, classes without images last.
    """

    def __init__(self, correct, count, ranking=None):
        self.correct = correct
        self.count = count
        self.by_class = np.divide(correct, count, out=np.full(len(count), np.nan), where=count > 0)
        self.ranking = np.argsort(-self.by_class, kind="stable") if ranking is None else ranking

    @property
    def accuracy(self):
        """Share of all images classified correctly, a float."""
        return float(self.correct.sum() / self.count.sum())

    @property
    def balanced_accuracy(self):
        """Mean of the class accuracies, a float; equals `accuracy` when classes have equally many images."""
        return float(np.nanmean(self.by_class))

    @property
    def std(self):
        """Standard deviation over the classes, a float; it includes the sampling noise of each class accuracy."""
        return float(np.nanstd(self.by_class))

    @property
    def difference(self):
        """Highest minus lowest class accuracy, a float (fairlearn's name for it)."""
        return float(np.nanmax(self.by_class) - np.nanmin(self.by_class))

    @property
    def gap(self):
        """Easy minus hard third under the report's own ranking, a float.

        This exaggerates: classes that were lucky in this very run are ranked easy and unlucky ones hard, so a second
        run of the same method has a smaller gap under the first run's ranking (regression to the mean). To compare
        runs use `thirds` with a ranking that comes from other runs.
        """
        easy, _, hard = self.thirds(self.ranking)
        return float(easy - hard)

    def worst(self, k):
        """Mean of the `k` lowest class accuracies, a float; ``worst(1)`` is the minimum.

        Raises
        ------
        ValueError, TypeError
            If `k` is no integer from 1 to the number of classes with images.
        """
        present = np.sort(self.by_class[self.count > 0])
        if not 1 <= operator.index(k) <= len(present):
            raise ValueError(f"k is {k}, expected 1 to {len(present)}, the number of classes with images.")
        return float(present[:k].mean())

    def thirds(self, ranking):
        """Mean accuracy of the easy, medium and hard third of the classes, float64 array [3].

        Parameters
        ----------
        ranking : integer array [K]
            All classes, easiest first. To compare runs, take it from *other* runs (see `gap`). The split is that of
            `numpy.array_split` (34, 33, 33 classes for K = 100) after leaving out classes without images; a third
            that gets no class is NaN.

        Raises
        ------
        ValueError
            If it does not hold each class once.
        """
        ranking = _integers("ranking", ranking)
        if not np.array_equal(np.sort(ranking), np.arange(len(self.count))):
            raise ValueError(f"ranking must hold each class from 0 to {len(self.count) - 1} once, easiest first.")
        parts = np.array_split(self.by_class[ranking[self.count[ranking] > 0]], 3)
        return np.array([part.mean() if part.size else np.nan for part in parts])


class ClassReport(ClassAccuracies):
    """How well each class of a labelled set of images is recognised.

    Parameters
    ----------
    labels, predictions : integer arrays, lists or tensors [N]
        True and predicted class of each image, 0 to K - 1.
    num_classes : int
        The number of classes, K.

    Attributes
    ----------
    accuracy, balanced_accuracy, std, difference, gap : float
    by_class : float64 array [K]
        Accuracy of each class; NaN for a class without images.
    correct, count, ranking : int64 arrays [K]
    confusion : int64 array [K, K]
        ``confusion[i, j]`` images of class i were predicted to be of class j.

    Raises
    ------
    ValueError
        If the two differ in length, are empty, are not one integer an image, or leave 0 to K - 1.
    """

    def __init__(self, labels, predictions, num_classes):
        size = operator.index(num_classes)
        labels, predictions = _integers("labels", labels), _integers("predictions", predictions)
        if len(labels) != len(predictions):
            raise ValueError(
                f"got {len(labels)} labels and {len(predictions)} predictions, expected one each an image."
            )
        for name, values in (("labels", labels), ("predictions", predictions)):
            low, high = values.min(), values.max()
            if low < 0 or high >= size:
                raise ValueError(f"{name} run from {low} to {high}, expected 0 to {size - 1} as num_classes is {size}.")
        self.confusion = np.bincount(labels * size + predictions, minlength=size**2).reshape(size, size)
        super().__init__(self.confusion.diagonal(), self.confusion.sum(1))

    def interval(self, statistic, level=0.95, resamples=2000, seed=0):
        """Percentile bootstrap interval over test images, stratified by class, float64 array [..., 2].

        Drawing n_k images of class k again with replacement leaves Binomial(n_k, accuracy_k) of them correct, so counts
        are drawn and no image is touched. A class at 0 % or 100 % gets an interval of length zero: use `wilson`. Draws
        keep the report's `ranking`; the interval of `gap` shows its noise, not the exaggeration that `gap` warns of.
        The draws' own noise widens the differences between classes, so `std`, `difference` and `worst` come out large,
        large and low.

        Parameters
        ----------
        statistic : str or callable
            One of ``"accuracy"``, ``"balanced_accuracy"``, ``"by_class"``, ``"difference"``, ``"gap"`` and ``"std"``,
            or a function of a `ClassAccuracies` such as ``lambda r: r.thirds(ranking)``.
        level : float
            Confidence level.
        resamples, seed : int
            Number of draws, and the seed that makes them repeatable.

        Raises
        ------
        ValueError
            If there is no such statistic, or the level or the number of draws is out of range.
        """
        names = ("accuracy", "balanced_accuracy", "by_class", "difference", "gap", "std")
        if not callable(statistic) and statistic not in names:
            raise ValueError(
                f"statistic is {statistic!r}, expected a function of a report or one of {', '.join(names)}."
            )
        function = statistic if callable(statistic) else operator.attrgetter(statistic)
        ends = _ends(level, resamples)
        chance = np.nan_to_num(self.by_class)
        draws = np.random.default_rng(seed).binomial(self.count, chance, (resamples, len(chance)))
        values = [function(ClassAccuracies(correct, self.count, self.ranking)) for correct in draws]
        return np.moveaxis(np.quantile(values, ends, axis=0), 0, -1)

    def wilson(self, level=0.95):
        """Wilson's score interval of each class accuracy, float64 array [K, 2] (Wilson 1927); NaN without images.

        Raises
        ------
        ValueError
            If the level is not between 0 and 1.
        """
        z = ndtri(_ends(level)[1])
        n = np.where(self.count > 0, self.count, np.nan)
        centre = self.by_class + z**2 / (2 * n)
        half = z * np.sqrt(self.by_class * (1 - self.by_class) / n + z**2 / (4 * n**2))
        return np.clip(np.stack([centre - half, centre + half], axis=-1) / (1 + z**2 / n)[:, None], 0, 1)


def rank_correlation(x, y, level=0.95, resamples=2000, seed=0):
    """Spearman's rank correlation of two numbers per class and its percentile bootstrap interval over classes.

    Parameters
    ----------
    x, y : float arrays [K]
        For instance a class statistic and the class accuracy.
    level, resamples, seed
        As in `ClassReport.interval`.

    Returns
    -------
    float64 array [3]
        Correlation, lower end, upper end; NaN if x or y is constant.

    Raises
    ------
    ValueError
        If the two are not one finite number a class each.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.ndim != 1 or x.size < 2 or x.shape != y.shape or not np.isfinite([x, y]).all():
        raise ValueError(
            f"x and y have shapes {x.shape} and {y.shape}, expected one finite number each for 2 or more classes."
        )
    ends = _ends(level, resamples)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.full(3, np.nan)
    picks = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    picks = np.vstack([np.arange(len(x)), picks])  # the first row is the sample itself
    a, b = (rankdata(values[picks], axis=1) - (len(x) + 1) / 2 for values in (x, y))
    with np.errstate(invalid="ignore"):  # a draw of one class only has no correlation
        rho = (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return np.array([rho[0], *np.nanquantile(rho[1:], ends)])


def _ends(level, resamples=1):
    """Quantiles at the two ends of an interval."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, expected a number between 0 and 1 such as 0.95.")
    if operator.index(resamples) < 1:
        raise ValueError(f"resamples is {resamples}, expected at least 1.")
    return (1 - level) / 2, (1 + level) / 2


def _integers(name, values):
    """One int64 an entry, from an array, a list or a tensor on any device."""
    array = np.asarray(values.tolist() if hasattr(values, "tolist") else values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}, expected [N] with N > 0: one class number an entry.")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {array.dtype} values, expected integers: class numbers, not scores or names.")
    return array.astype(np.int64)
