"""Draw the landing page's figure from the embedded data: ``python book/make_main_figure.py``.

A test fails while book/_static/main_figure.html differs from what this draws.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from mr2_core import ClassReport, class_margins, plots
from mr2_core.data import load_features

TARGET = Path(__file__).resolve().parent / "_static" / "main_figure.html"


@plots.style()
def main_figure():
    """Accuracy and printed margin of every class, easiest class first.

    Returns
    -------
    str
        HTML, as from `plots.figure_html`.
    """
    data = load_features("cifar100-compact")
    names = [name.replace("_", " ") for name in data["class_names"]]
    report = ClassReport(data["y_test"], data["test_prediction"][0], len(names))
    order, accuracy = report.ranking, report.by_class
    spread = (data["train_mean"].astype(float) ** 2).sum(axis=1) + data["train_deviation"]
    # Rounded, so that every machine draws the same bytes
    margins = class_margins(torch.from_numpy(spread)).numpy().round(3)

    figure, (above, below) = plt.subplots(2, figsize=(6.4, 5.6), sharex=True, height_ratios=(3, 2))
    means = {}
    for third, places in zip(plots.THIRDS, np.array_split(np.arange(len(names)), 3), strict=True):
        edges = np.append(places, places[-1] + 1)
        above.stairs(accuracy[order[places]], edges, fill=True, color=plots.COLOURS[third], label=f"{third} third")
        gamma = margins[order[places]]
        below.plot(places + 0.5, gamma, plots.MARKERS[third], color=plots.COLOURS[third], markersize=4, alpha=0.8)
        means[third] = gamma.mean().round(3)
        below.plot(edges[[0, -1]], [means[third]] * 2, color=plots.COLOURS[third], linewidth=2)
    below.axhline(1, color="black", linewidth=0.8, linestyle=":")
    above.set(ylabel="test accuracy", ylim=(0, 1), xlim=(0, len(names)), xticks=[])
    above.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    below.set(ylabel="margin γ", xlabel=f"the {len(names)} classes, from the easiest to the hardest")
    for axes in (above, below):
        axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper left", ncols=3)

    best, worst = order[0], order[-1]
    ends = f"from {accuracy[best]:.0%} ({names[best]}) to {accuracy[worst]:.0%} ({names[worst]})"
    larger = "hard" if means["hard"] > means["easy"] else "easy"
    by_third = f"{means['easy']:.2f} in the easy third, {means['hard']:.2f} in the hard third"
    return plots.figure_html(
        figure,
        alt=f"Two panels over the classes in order of accuracy. Test accuracy falls {ends}. Below, the mean margin is "
        f"{by_third}.",
        caption=f"A network trained on equally many images of every class. Above: its test accuracy, {ends}. Below: "
        f"the margins that the printed one-third law gives to the same classes, with the mean of each third; they are "
        f"larger for {larger} classes ({by_third}). Whether that helps, and whom, is what this book is about.",
    )


if __name__ == "__main__":
    TARGET.write_text(main_figure() + "\n", encoding="utf-8")
