"""What the figures promise: alternative texts, both themes, grey and colour-blind readers, small pages."""

import inspect
import itertools
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from mr2_core import plots
from mr2_core.metrics import ClassReport, rank_correlation

pytestmark = pytest.mark.filterwarnings("error")
METHODS = [name for name in plots.COLOURS if name not in plots.THIRDS]
NAMES = [f"class {k}" for k in range(30)]


def make_report(seed=0):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(30), 40)
    right = rng.random(1200) < np.linspace(0.95, 0.2, 30)[labels]
    return ClassReport(labels, np.where(right, labels, (labels + rng.integers(1, 4, 1200)) % 30), 30)


REPORT, OTHER = make_report(), make_report(1)
ROWS = {"first": (0.5, 0.3, 0.6), "second": (-0.7, -0.8, -0.5)}
FIGURES = {
    "accuracy_bars": lambda **texts: plots.accuracy_bars(REPORT, NAMES, **texts),
    "accuracy_bars by another run": lambda **texts: plots.accuracy_bars(REPORT, NAMES, ranking=OTHER.ranking, **texts),
    "confusion_pairs": lambda **texts: plots.confusion_pairs(REPORT, NAMES, method="uniform", **texts),
    "thirds_dumbbell": lambda **texts: plots.thirds_dumbbell({"ERM": REPORT, "mine": OTHER}, range(30), **texts),
    "statistic_scatter": lambda **texts: plots.statistic_scatter(
        np.arange(30), REPORT.by_class, r"$\|\hat s_k\|^2$", **texts
    ),
    "interval_rows": lambda **texts: plots.interval_rows({"a": ROWS, "b": ROWS}, "ρ", **texts),
    "images_grid": lambda **texts: plots.images_grid(np.zeros((7, 8, 8, 3), np.uint8), NAMES[:7], **texts),
}


@pytest.fixture
def page(monkeypatch):
    """HTML of each figure displayed."""
    shown = []
    monkeypatch.setattr(plots, "display", lambda output: shown.append(output.data))
    return shown


@pytest.fixture
def drawn(monkeypatch):
    """Each figure that would have been shown."""
    figures = []
    monkeypatch.setattr(plots, "show", lambda figure, **texts: figures.append(figure))
    yield figures
    plt.close("all")


def simple(**kwargs):
    with plots.style():
        figure, axes = plt.subplots()
        axes.plot([0, 1], [0, 1], label="line", **kwargs)
        axes.legend()
    return figure


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES.keys())
def test_every_figure_is_accessible_themed_and_small(draw, page):
    draw(alt='Bars <fall> & "rise"', caption="γ < 1 & ‖ŝ‖²")
    assert plt.get_fignums() == []
    assert len(page) == 1
    text = page[0]
    root = ElementTree.fromstring(text)
    svg = root.find("{*}svg")
    assert root.tag == "figure"
    assert root.get("class") == "mr2-figure"
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == svg.find("{*}title").text == 'Bars <fall> & "rise"'
    assert root.find("figcaption").text == "γ < 1 & ‖ŝ‖²"
    # Words and axes take the page's colour, nothing paints a background, no rule leaks to the rest of the page.
    assert svg.get("fill") == "currentColor"
    for forbidden in ("#000000", "#ffffff", "black", "white", "<style", "<metadata", "<?xml", "<!DOCTYPE"):
        assert forbidden not in text
    assert svg.get("viewBox").startswith("0 0 460.8 ")  # 6.4 inches
    assert "max-width:100%" in svg.get("style")
    assert len(text) < 100_000
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) == set(ids)


def test_ids_of_two_figures_on_a_page_differ():
    one, two = (plots.figure_html(simple(color=colour), alt="A line.") for colour in ("red", "blue"))
    one, two = (set(re.findall(r' id="([^"]+)"', text)) for text in (one, two))
    assert one
    assert not one & two


def test_equal_figures_give_equal_bytes():
    assert plots.figure_html(simple(), alt="A line.") == plots.figure_html(simple(), alt="A line.")


def test_black_becomes_the_text_colour_and_other_colours_stay():
    text = plots.figure_html(simple(color="#123456"), alt="A line.")
    assert "stroke: #123456" in text
    assert "stroke: currentColor" in text
    with plots.style():
        figure, axes = plt.subplots()
        axes.set_axis_off()
        axes.bar([0], [1], color="black")  # matplotlib writes no fill for black: it must come from the root
    text = plots.figure_html(figure, alt="A bar.")
    assert re.findall("[a-z]+[:=].?currentColor", text) == ['fill="currentColor']


def test_many_points_become_a_picture_inside_the_figure():
    points = np.random.default_rng(0).normal(size=(2, 5000))
    sizes = {}
    for rasterized in (False, True):
        with plots.style():
            figure, axes = plt.subplots()
            axes.plot(*points, ".", color=plots.COLOURS["ERM"], rasterized=rasterized)
        text = plots.figure_html(figure, alt="A cloud.")
        assert ("data:image/png;base64" in text) == rasterized
        sizes[rasterized] = len(text)
    assert sizes[True] < sizes[False] / 3


@pytest.mark.parametrize("alt", ["", "  ", None, 3])
def test_a_figure_without_alternative_text_is_refused(alt):
    with pytest.raises(ValueError, match=r"^alt is .*, expected a sentence that says what the figure shows\.$"):
        plots.show(simple(), alt=alt)
    plt.close("all")


@pytest.mark.parametrize("texts", [{"alt": "$a_k$"}, {"alt": "A line.", "caption": "$a_k$"}])
def test_tex_that_nobody_would_typeset_is_refused(texts):
    with pytest.raises(ValueError, match="hold a '\\$': write Unicode"):
        plots.show(simple(), **texts)
    plt.close("all")


def test_caption_is_optional(page):
    plots.show(simple(), alt="A line.")
    assert "figcaption" not in page[0]


def test_every_figure_function_requires_alt_by_keyword():
    functions = {
        name: function
        for name, function in inspect.getmembers(plots, inspect.isfunction)
        if function.__module__ == "mr2_core.plots" and not name.startswith("_") and name != "style"
    }
    assert {name.split()[0] for name in FIGURES} | {"show", "figure_html", "show_interactive"} == set(functions)
    for function in functions.values():
        parameters = inspect.signature(function).parameters
        assert parameters["alt"].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters["alt"].default is inspect.Parameter.empty
        assert parameters["caption"].default is None


def movable():
    """A plotly figure whose curve is a·x + b for the frames (a, b), b changing fastest, and its sliders."""
    import plotly.graph_objects as go

    x = np.arange(3.0)
    frames = [
        go.Frame(data=[go.Scatter(y=a * x + b), {}], layout={"title": {"text": f"{a}<br>{b}"}})
        for a, b in itertools.product((1, 2), (10, 20, 30))
    ]
    figure = go.Figure(
        [
            go.Scatter(x=x, mode="lines", name="</script>", line={"color": "black", "dash": "dot"}),
            go.Scatter(x=x, y=x, mode="markers", name="dots", marker={"color": "#123456", "symbol": "square"}),
        ],
        frames=frames,
    )
    figure.update_layout(
        yaxis={"type": "log", "range": [0, 2], "title": {"text": "height"}}, xaxis={"tickvals": [0, 2]}
    )
    return figure, {"slope <a>": ["1", "2"], "offset": ["ten", "twenty", "thirty"]}


def test_interactive_figure_holds_every_frame_and_a_still(page):
    plots.show_interactive(*movable(), start=(1, 0), alt='Lines "here"', caption="γ < 1")
    assert plt.get_fignums() == []
    text = page[0]
    # Without JavaScript: a labelled picture, and no sliders that would do nothing
    assert '<div class="mr2-plot"><svg role="img" aria-label="Lines &quot;here&quot;"' in text
    assert '<div class="mr2-sliders" hidden>' in text
    assert '<figcaption style="color:inherit">γ &lt; 1</figcaption>' in text
    assert "slope &lt;a&gt;: <output>2</output>" in text
    assert "offset: <output>ten</output>" in text
    assert re.findall(r'max="(\d)" value="(\d)"', text) == [("1", "1"), ("2", "0")]
    # With it: the state that the script reads, which cannot end the script early
    assert text.count("</script>") == 1
    state = json.loads(re.search(r"const {.*?} = (.*);\n", text)[1])
    assert state["values"] == [["1", "2"], ["ten", "twenty", "thirty"]]
    assert state["alt"] == 'Lines "here"'
    titles = [frame["layout"]["title"]["text"] for frame in state["frames"]]
    assert titles == ["1<br>10", "1<br>20", "1<br>30", "2<br>10", "2<br>20", "2<br>30"]
    assert state["layout"]["template"]["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"
    assert re.findall(r"https?://(?!www\.w3\.org/)[^/]*", text) == ["https://cdn.plot.ly"]


def test_still_shows_the_start():
    figure, _ = movable()
    axes = plots._still(figure, figure.frames[3]).axes[0]
    line, dots = axes.lines
    np.testing.assert_array_equal(line.get_xydata(), [[0, 10], [1, 12], [2, 14]])
    np.testing.assert_array_equal(dots.get_xydata(), [[0, 0], [1, 1], [2, 2]])
    assert (line.get_linestyle(), line.get_marker()) == (":", "")
    assert (dots.get_linestyle(), dots.get_marker()) == ("None", "s")
    assert to_rgb(dots.get_color()) == to_rgb("#123456")
    assert axes.get_title("left") == "2\n10"
    assert (axes.get_yscale(), axes.get_ylim(), axes.get_ylabel()) == ("log", (1, 100), "height")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2"]
    plt.close("all")


def test_interactive_figure_refuses_what_cannot_be_moved_or_read():
    figure, sliders = movable()
    with pytest.raises(ValueError, match=r"^figure has 6 frames, expected 2, one for each combination\.$"):
        plots.show_interactive(figure, {"slope": ["1", "2"]}, start=(0,), alt="Lines.")
    with pytest.raises(ValueError, match="^alt is ''"):
        plots.show_interactive(figure, sliders, start=(0, 0), alt="")


def test_plotly_is_loaded_only_where_it_is_used():
    code = "import sys, mr2_core.plots; print('plotly' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_class_names_must_fit_the_report():
    for draw in (plots.accuracy_bars, plots.confusion_pairs):
        with pytest.raises(ValueError, match=r"^got 3 class names, expected 30, one for each class\.$"):
            draw(REPORT, NAMES[:3], alt="Bars.")


def test_style_leaves_no_trace():
    before = dict(mpl.rcParams)
    plots.figure_html(simple(), alt="A line.")
    assert dict(mpl.rcParams) == before
    with plots.style():
        assert mpl.rcParams["font.size"] >= 11
    plt.close("all")


def test_accuracy_bars_show_accuracies_intervals_and_thirds(drawn):
    plots.accuracy_bars(REPORT, NAMES, alt="Bars.", ranking=OTHER.ranking, named=2)
    axes = drawn[0].axes[0]
    bars = sorted(axes.patches, key=lambda bar: bar.get_x())
    np.testing.assert_allclose([bar.get_height() for bar in bars], np.sort(REPORT.by_class)[::-1])
    for third, part in zip(plots.THIRDS, np.array_split(OTHER.ranking, 3), strict=True):
        colour = to_rgb(plots.COLOURS[third])
        assert {REPORT.ranking[i] for i, bar in enumerate(bars) if bar.get_facecolor()[:3] == colour} == set(part)
    ends = np.array([segment[:, 1] for segment in axes.collections[0].get_segments()])
    np.testing.assert_allclose(ends, REPORT.wilson()[REPORT.ranking])
    easiest, hardest = (text.get_text().split("\n") for text in axes.texts)
    first, last = REPORT.ranking[[0, -1]]
    assert easiest[:2] == ["easiest:", f"class {first} {100 * REPORT.by_class[first]:.0f}%"]
    assert (len(hardest), hardest[-1]) == (3, f"class {last} {100 * REPORT.by_class[last]:.0f}%")


def test_accuracy_bars_leave_out_classes_without_images(drawn):
    report = ClassReport([0, 0, 2, 3], [0, 1, 2, 0], 5)
    plots.accuracy_bars(report, NAMES[:5], alt="Bars.", ranking=[1, 4, 2, 0, 3], named=1)
    colours = [bar.get_facecolor()[:3] for bar in sorted(drawn[0].axes[0].patches, key=lambda bar: bar.get_x())]
    assert colours == [to_rgb(plots.COLOURS[third]) for third in plots.THIRDS]
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["easiest:\nclass 2 100%", "hardest:\nclass 3 0%"]


def test_confusion_pairs_show_the_largest_rates(drawn):
    report = ClassReport([0] * 4 + [1] * 2 + [2], [0, 1, 1, 2, 1, 0, 2], 4)
    plots.confusion_pairs(report, ["a", "b", "c", "absent"], alt="Bars.", most=9)
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a → b", "b → a", "a → c"]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [0.5, 0.5, 0.25])
    assert [text.get_text() for text in axes.texts] == ["50%", "50%", "25%"]
    plots.confusion_pairs(REPORT, NAMES, alt="Bars.", most=5)
    assert len(drawn[1].axes[0].patches) == 5


def test_thirds_dumbbell_shows_thirds_and_intervals(drawn):
    ranking = OTHER.ranking
    plots.thirds_dumbbell({"MR2": REPORT, "mine": OTHER}, ranking, alt="Dots.")
    axes = drawn[0].axes[0]
    for row, (report, colour) in enumerate([(REPORT, plots.COLOURS["MR2"]), (OTHER, "black")]):
        lines = [line for line in axes.lines if np.ravel(line.get_ydata())[0] == row]
        assert {line.get_color() for line in lines} == {colour}
        dots = {line.get_marker(): np.ravel(line.get_xdata())[0] for line in lines if line.get_marker() != "None"}
        assert dots == dict(zip([plots.MARKERS[t] for t in plots.THIRDS], report.thirds(ranking), strict=True))
        intervals = [line.get_xdata() for line in lines if line.get_linewidth() == 3]
        np.testing.assert_allclose(intervals, report.interval(lambda draw: draw.thirds(ranking)))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["MR2", "mine"]
    assert [text.get_text() for text in axes.texts] == list(plots.THIRDS)


def test_statistic_scatter_states_the_correlation(drawn):
    x = np.arange(30) ** 2
    plots.statistic_scatter(x, REPORT.by_class, "x", alt="Dots.", method="MR2")
    axes = drawn[0].axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), np.column_stack([x, REPORT.by_class]))
    rho, low, high = (f"−{abs(value):.2f}" for value in rank_correlation(x, REPORT.by_class))
    assert axes.get_title("left") == f"Spearman's ρ = {rho}, 95% interval {low} to {high}"


def test_interval_rows_keep_rows_and_series_apart(drawn):
    plots.interval_rows({"a": ROWS, "b": dict(reversed(ROWS.items()))}, "ρ", alt="Dots.")
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    one, two = axes.lines[:2]
    np.testing.assert_array_equal(one.get_xdata(), [0.5, -0.7])
    np.testing.assert_array_equal(two.get_xdata(), [0.5, -0.7])
    assert one.get_marker() != two.get_marker()
    assert not set(one.get_ydata()) & set(two.get_ydata())
    np.testing.assert_array_equal([s[:, 0] for s in axes.collections[0].get_segments()], [[0.3, 0.6], [-0.8, -0.5]])


def test_images_grid_pairs_pictures_and_titles(drawn):
    images = np.arange(3 * 4).reshape(3, 2, 2)
    plots.images_grid(images, "abc", alt="Pictures.", columns=2)
    grid = drawn[0].axes
    assert [axes.get_title() for axes in grid] == ["a", "b", "c", ""]
    np.testing.assert_array_equal([axes.images[0].get_array() for axes in grid[:3]], images)
    with pytest.raises(ValueError, match="shorter"):
        plots.images_grid(images, "ab", alt="Pictures.")


def linear(colour):
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return linear(colour) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("name", plots.COLOURS)
@pytest.mark.parametrize("background", ["#ffffff", "#121212"])
def test_colours_stand_out_on_both_backgrounds(name, background):
    """WCAG 2.1, success criterion 1.4.11: contrast of graphics at least 3 to 1."""
    dark, light = sorted([luminance(plots.COLOURS[name]), luminance(background)])
    assert (light + 0.05) / (dark + 0.05) >= 3


# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
VISION = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(rgb):
    """Ottosson (2020): a space in which Euclidean distance follows perceived difference."""
    to_cone = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return to_lab @ np.cbrt(to_cone @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("group", [METHODS, plots.THIRDS], ids=["methods", "thirds"])
def test_colours_differ_with_every_kind_of_colour_vision(vision, group):
    seen = {name: oklab(np.array(VISION[vision]) @ linear(plots.COLOURS[name])) for name in group}
    # 0.02 is a just noticeable difference in OKLab; the markers and hatches carry the rest.
    distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(group, 2)}
    assert min(distances.values()) > 0.06, min(distances, key=distances.get)


def test_methods_and_thirds_differ_without_colour():
    for looks in (plots.MARKERS, plots.HATCHES):
        assert len({looks[name] for name in METHODS}) == len(METHODS)
    for looks in (plots.MARKERS, plots.LINES):
        assert len({looks[name] for name in plots.THIRDS}) == 3
    for one, two in itertools.combinations(plots.THIRDS, 2):
        grey = [luminance(plots.COLOURS[name]) ** (1 / 2.2) * 255 for name in (one, two)]
        assert plots.HATCHES[one] != plots.HATCHES[two] or abs(grey[0] - grey[1]) > 40
