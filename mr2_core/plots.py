"""The book's figures: one look, one colour per method, readable on a phone, in the dark, in grey and by ear.

Black means "the colour of the page's text": `show` turns it into CSS ``currentColor``, so that axes and words follow
the light or dark theme. Data are drawn in `COLOURS`, which stand out on white and on near-black alike.
"""

import hashlib
import html
import io
import json
import math
import re

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display

from mr2_core.metrics import rank_correlation

# Colour, marker, line and hatch. Every colour has a contrast of at least 3 to white and to #121212, and no two methods
# (and no two thirds) look alike with any kind of colour blindness; the thirds also darken from easy to hard.
_LOOKS = {
    "ERM": ("#858585", "o", "-", ""),
    "uniform": ("#e86400", "s", "--", "//"),
    "MR2": ("#0073c8", "D", "-", "\\\\"),
    "MR2 (printed)": ("#b42a89", "P", "-.", "xx"),
    "no representation loss": ("#13a95c", "^", ":", ".."),
    "weighted": ("#8e544f", "v", (0, (5, 1)), "++"),
    "placebo": ("#ca0012", "X", (0, (1, 1)), "oo"),
    "easy": ("#58a08c", "^", "-", ""),
    "medium": ("#b352ca", "o", "--", "////"),
    "hard": ("#9c4a00", "v", ":", ""),
}
COLOURS, MARKERS, LINES, HATCHES = ({name: look[i] for name, look in _LOOKS.items()} for i in range(4))
THIRDS = ("easy", "medium", "hard")
# plotly's names of the markers
_SYMBOLS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "cross": "P",
    "triangle-up": "^",
    "triangle-down": "v",
    "x": "X",
}


def style():
    """Context manager (or decorator) under which every figure of the book is drawn.

    6.4 inches fill the text column; 12 points remain legible when a phone scales that to 350 pixels.
    """
    return mpl.rc_context(
        {
            "figure.figsize": (6.4, 3.8),
            "figure.constrained_layout.use": True,
            "font.size": 12,
            "axes.titlesize": 12,
            "axes.prop_cycle": mpl.cycler(color=list(COLOURS.values())),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.8,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "black",
            "grid.alpha": 0.15,
            "legend.frameon": False,
            "hatch.color": "black",
            "hatch.linewidth": 0.6,
        }
    )


def figure_html(figure, *, alt, caption=None):
    """A matplotlib figure as an HTML ``<figure>`` with inline SVG, and the figure closed.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Drawn under `style`. Artists with many points should have ``rasterized=True``: they become a PNG in the SVG,
        in which black stays black, so give them a colour.
    alt : str
        What a reader who cannot see the figure needs to know.
    caption : str, optional
        Plain text, shown below. It may not hold TeX: raw HTML is typeset neither by MyST nor in Colab. Write
        Unicode (γ, ‖ŝ‖², μ̂) instead; inside the figure matplotlib's ``$...$`` is fine.

    Returns
    -------
    str
        Equal figures give equal bytes. The ids within depend on the content, so figures on one page do not clash.

    Raises
    ------
    ValueError
        If alt is empty or one of the two texts holds a dollar sign.
    """
    _check_texts(alt, caption)
    return f'<figure class="mr2-figure" style="margin:1em 0">{_svg(figure, alt)}{_caption(caption)}</figure>'


def show(figure, *, alt, caption=None):
    """Display a figure in a notebook; parameters as in `figure_html`."""
    display(HTML(figure_html(figure, alt=alt, caption=caption)))


# A plotly figure's black follows the page's text too: plotly writes colours into style attributes, in this spelling.
_INTERACTIVE = """<figure class="mr2-figure" id="{id}" style="margin:1em 0"><style>
.mr2-plot [style*="stroke: rgb(0, 0, 0)"] {{stroke: currentColor !important}}
.mr2-plot [style*="fill: rgb(0, 0, 0)"] {{fill: currentColor !important}}
.mr2-slider {{display: block; margin: 0.5em 0}}
.mr2-slider input {{display: block; width: 100%; height: 2.5em; margin: 0; accent-color: {accent}; touch-action: pan-y}}
</style><div class="mr2-plot">{still}</div><div class="mr2-sliders" hidden>{sliders}</div>{caption}<script>
(() => {{
  const {{data, layout, frames, values, alt, elsewhere}} = {state};
  const box = document.getElementById("{id}"), plot = box.querySelector(".mr2-plot");
  const inputs = [...box.querySelectorAll("input")];
  function draw() {{
    let frame = 0;
    inputs.forEach((input, i) => {{
      frame = frame * values[i].length + Number(input.value);
      box.querySelectorAll("output")[i].value = values[i][input.value];
      input.setAttribute("aria-valuetext", values[i][input.value]);
    }});
    const traces = data.map((trace, i) => ({{...trace, ...frames[frame].data[i]}}));
    const fresh = {{...structuredClone(layout), ...frames[frame].layout}};  // plotly writes ranges into it
    Plotly.react(plot, traces, fresh, {{staticPlot: true, responsive: true}});
  }}
  function begin() {{
    plot.replaceChildren();
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", alt);
    box.querySelector(".mr2-sliders").hidden = false;
    inputs.forEach(input => input.addEventListener("input", draw));
    draw();
  }}
  function load() {{
    const root = document.documentElement.dataset.content_root;  // only a page of the built book has one
    window.mr2Plotly ??= new Promise((done, failed) => {{
      const script = document.createElement("script");
      script.onload = done;
      script.onerror = failed;
      script.src = root === undefined ? elsewhere : root + "_static/plotly.min.js";
      document.head.append(script);
    }});
    window.mr2Plotly.then(begin);
  }}
  new IntersectionObserver((entries, observer) => {{
    if (entries.some(entry => entry.isIntersecting)) {{
      observer.disconnect();
      load();
    }}
  }}, {{rootMargin: "800px"}}).observe(box);
}})();
</script></figure>"""


def show_interactive(figure, sliders, *, start, alt, caption=None):
    """Display a plotly figure that a reader moves with sliders, no kernel needed.

    Without JavaScript, and until the figure comes near the screen, there is a still of its start. The built book brings
    its own plotly.js; in Jupyter and Colab it comes from plotly's server.

    Parameters
    ----------
    figure : plotly.graph_objects.Figure
        Scatter traces on one pair of axes; black is the page's text colour, as in `show`. ``figure.frames`` say what
        changes, one frame for each combination of the sliders' values, those of the last slider changing fastest.
    sliders : dict of str to sequence of str
        Name of each slider, and its values as they are to be read.
    start : sequence of int
        Position of each slider at first.
    alt, caption : str
        As in `figure_html`.

    Raises
    ------
    ValueError
        If the texts are refused by `figure_html`, or the frames are not as many as the sliders have combinations.
    """
    from plotly.offline import get_plotlyjs_version

    _check_texts(alt, caption)
    values = [list(words) for words in sliders.values()]
    expected = math.prod(map(len, values))
    if len(figure.frames) != expected:
        raise ValueError(f"figure has {len(figure.frames)} frames, expected {expected}, one for each combination.")
    axis = {"color": "black", "gridcolor": "rgba(0,0,0,0.15)", "linecolor": "black", "showline": True}
    axis |= {"zeroline": False, "automargin": True}
    look = {
        **dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)"),
        "font": {"color": "black", "size": 14},
        "title": {"x": 0, "y": 1, "yanchor": "top", "pad": {"t": 16}, "font": {"size": 14}},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "xaxis": axis,
        "yaxis": axis,
    }
    titles = [(part.layout.title.text or "").count("<br>") for part in (figure, *figure.frames)]
    figure.update_layout(
        template={"layout": look, "data": {"scatter": [{"marker": {"size": 8}}]}},
        margin={"l": 10, "r": 10, "b": 10, "t": 36 + 18 * max(titles)},
        showlegend=True,
        height=440,
    )
    first = figure.frames[np.ravel_multi_index(tuple(start), [len(words) for words in values])]
    state = json.loads(figure.to_json())
    state |= {"values": values, "alt": alt, "elsewhere": f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"}
    state = json.dumps(state).replace("</", "<\\/")  # nothing within may end the script
    controls = [
        f'<label class="mr2-slider">{html.escape(name)}: <output>{html.escape(words[at])}</output>'
        f'<input type="range" min="0" max="{len(words) - 1}" value="{at}"></label>'
        for (name, words), at in zip(sliders.items(), start, strict=True)
    ]
    text = _INTERACTIVE.format(
        id="mr2-" + hashlib.sha256((state + str(start)).encode()).hexdigest()[:10],
        accent=COLOURS["MR2"],
        still=_svg(_still(figure, first), alt),
        sliders="".join(controls),
        caption=_caption(caption),
        state=state,
    )
    display(HTML(text))


@style()
def _still(figure, frame):
    """A plotly figure of scatter traces in the state of one of its frames, drawn by matplotlib."""
    lines = {None: "-", "solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
    still, axes = plt.subplots(figsize=(6.4, 4.6))
    for trace, change in zip(figure.data, frame.data, strict=True):
        axes.plot(
            trace.x if change.x is None else change.x,
            trace.y if change.y is None else change.y,
            linestyle=lines[trace.line.dash] if "lines" in trace.mode else "",
            marker=_SYMBOLS[trace.marker.symbol or "circle"] if "markers" in trace.mode else "",
            color=trace.line.color if "lines" in trace.mode else trace.marker.color,
            label=trace.name if trace.showlegend is not False else None,
        )
    for name, side in (("x", figure.layout.xaxis), ("y", figure.layout.yaxis)):
        logarithmic = side.type == "log"
        axes.set(**{f"{name}label": side.title.text, f"{name}scale": "log" if logarithmic else "linear"})
        if side.range:
            axes.set(**{f"{name}lim": [10**end if logarithmic else end for end in side.range]})
        if side.tickvals is not None:
            axes.set(**{f"{name}ticks": side.tickvals, f"{name}ticklabels": [f"{value:g}" for value in side.tickvals]})
            axes.tick_params(name, which="minor", bottom=False, left=False, labelbottom=False, labelleft=False)
    axes.set_aspect("equal" if figure.layout.yaxis.scaleanchor else "auto")
    title = frame.layout.title.text or figure.layout.title.text
    axes.set_title(title.replace("<br>", "\n") if title else "", loc="left")
    still.legend(loc="outside lower left", ncols=2)
    return still


@style()
def accuracy_bars(report, class_names, *, alt, caption=None, ranking=None, named=4):
    """Accuracy of every class, sorted, with 95 % Wilson intervals, coloured by third.

    Parameters
    ----------
    report : ClassReport
    class_names : sequence of str [K]
    ranking : integer array [K], optional
        The classes, easiest first, that define the thirds; by default the report's own.
    named : int
        How many of the easiest and of the hardest classes to name.
    """
    _check_names(class_names, report)
    order = report.ranking[report.count[report.ranking] > 0]
    ranking = report.ranking if ranking is None else np.asarray(ranking)
    third = np.empty(len(report.count), int)
    for i, part in enumerate(np.array_split(ranking[report.count[ranking] > 0], 3)):
        third[part] = i
    figure, axes = plt.subplots(figsize=(6.4, 4.6))
    for i, name in enumerate(THIRDS):
        at = np.flatnonzero(third[order] == i)
        axes.bar(
            at, report.by_class[order][at], width=0.85, color=COLOURS[name], hatch=HATCHES[name], label=f"{name} third"
        )
    low, high = report.wilson()[order].T
    axes.vlines(np.arange(len(order)), low, high, color="black", linewidth=0.8, alpha=0.6)
    words = [f"{class_names[k]} {100 * report.by_class[k]:.0f}%" for k in order]
    below = {"y": -0.02, "va": "top", "transform": axes.get_xaxis_transform()}
    axes.text(-1, s="\n".join(["easiest:", *words[:named]]), **below)
    axes.text(len(order), s="\n".join(["hardest:", *words[-named:]]), ha="right", **below)
    axes.set(xlabel="classes, by accuracy", ylabel="accuracy", ylim=(0, 1), xlim=(-1, len(order)), xticks=[])
    _percent(axes.yaxis)
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper left", ncols=3)
    show(figure, alt=alt, caption=caption)


@style()
def confusion_pairs(report, class_names, *, alt, caption=None, most=12, method="ERM"):
    """The commonest confusions, "true → predicted", as shares of the images of the true class.

    Parameters
    ----------
    report : ClassReport
    class_names : sequence of str [K]
    most : int
        How many pairs to show; pairs that never occur are left out.
    method : str
        Sets the colour.
    """
    _check_names(class_names, report)
    rates = report.confusion / np.maximum(report.count, 1)[:, None]
    np.fill_diagonal(rates, 0)
    pairs = np.argsort(-rates, axis=None, kind="stable")[:most]
    true, predicted = np.unravel_index(pairs[rates.flat[pairs] > 0], rates.shape)
    figure, axes = plt.subplots(figsize=(6.4, 0.7 + 0.3 * len(true)))
    labels = [f"{class_names[i]} → {class_names[j]}" for i, j in zip(true, predicted, strict=True)]
    bars = axes.barh(labels, rates[true, predicted], color=COLOURS[method], hatch=HATCHES[method])
    axes.bar_label(bars, fmt=lambda rate: f"{100 * rate:.0f}%", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="share of the true class's images")
    _percent(axes.xaxis)
    axes.grid(visible=False, axis="y")
    show(figure, alt=alt, caption=caption)


@style()
def thirds_dumbbell(reports, ranking, *, alt, caption=None):
    """Accuracy of the hard, medium and easy third of several methods, with 95 % bootstrap intervals.

    Parameters
    ----------
    reports : dict of str to ClassReport
        By method; methods named in `COLOURS` get their colour, others the text's.
    ranking : integer array [K]
        The classes, easiest first; it should come from runs that are not shown.
    """
    figure, axes = plt.subplots(figsize=(6.4, 1.3 + 0.5 * len(reports)))
    for row, (method, report) in enumerate(reports.items()):
        middle = report.thirds(ranking)
        low, high = report.interval(lambda draw: draw.thirds(ranking)).T
        colour = COLOURS.get(method, "black")
        axes.plot([middle.min(), middle.max()], [row, row], color=colour, linewidth=1, alpha=0.5)
        for i, name in enumerate(THIRDS):
            axes.plot([low[i], high[i]], [row, row], color=colour, linewidth=3)
            axes.plot(middle[i], row, MARKERS[name], color=colour, markersize=9)
            if row == 0:
                axes.text(middle[i], -0.4, name, ha="center", va="bottom")
    axes.set(xlabel="accuracy", yticks=range(len(reports)), yticklabels=reports, ylim=(len(reports) - 0.5, -0.8))
    _percent(axes.xaxis)
    axes.grid(visible=False, axis="y")
    show(figure, alt=alt, caption=caption)


@style()
def statistic_scatter(x, accuracy, xlabel, *, alt, caption=None, method="ERM"):
    """Class accuracy against a class statistic, with Spearman's ρ and its 95 % bootstrap interval over classes.

    Parameters
    ----------
    x, accuracy : float arrays [K]
    xlabel : str
        Name of the statistic; may hold ``$...$``.
    method : str
        Sets the colour and the marker.
    """
    rho, low, high = rank_correlation(x, accuracy)
    figure, axes = plt.subplots()
    axes.plot(x, accuracy, MARKERS[method], color=COLOURS[method], alpha=0.8)
    axes.set_title(f"Spearman's ρ = {_signed(rho)}, 95% interval {_signed(low)} to {_signed(high)}", loc="left")
    axes.set(xlabel=xlabel, ylabel="accuracy")
    _percent(axes.yaxis)
    show(figure, alt=alt, caption=caption)


@style()
def interval_rows(series, xlabel, *, alt, caption=None):
    """Estimates with intervals, one row a quantity, for up to three series told apart by their markers.

    Parameters
    ----------
    series : dict of str to dict of str to (estimate, low, high)
        Series, then rows in the same order in each, such as results of `rank_correlation`.
    xlabel : str
        What the estimates measure.
    """
    rows = list(next(iter(series.values())))
    figure, axes = plt.subplots(figsize=(6.4, 1.2 + (0.2 + 0.25 * len(series)) * len(rows)))
    for i, (name, estimates) in enumerate(series.items()):
        middle, low, high = np.transpose([estimates[row] for row in rows])
        y = np.arange(len(rows)) + 0.25 * (i - (len(series) - 1) / 2)
        colour = ("black", "0.5", "black")[i]
        axes.hlines(y, low, high, color=colour, linewidth=1.5)
        axes.plot(middle, y, "os^"[i], color=colour, label=name)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel=xlabel, yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    axes.grid(visible=False, axis="y")
    if len(series) > 1:
        figure.legend(loc="outside upper left", ncols=len(series))
    show(figure, alt=alt, caption=caption)


@style()
def images_grid(images, titles, *, alt, caption=None, columns=5):
    """Pictures with a title each, pixel for pixel.

    Parameters
    ----------
    images : uint8 array [M, H, W, 3] or [M, H, W]
    titles : sequence of str [M]
    """
    rows = -(-len(images) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(6.4, 1.6 * rows), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (image, title) in zip(grid.flat, zip(images, titles, strict=True), strict=False):
        axes.imshow(image, cmap="gray", interpolation="none")  # "none" leaves the enlarging to the browser
        axes.set_title(title)
    show(figure, alt=alt, caption=caption)


def _check_texts(alt, caption):
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"alt is {alt!r}, expected a sentence that says what the figure shows.")
    if "$" in alt + (caption or ""):
        raise ValueError("alt and caption must be plain text, but hold a '$': write Unicode symbols instead of TeX.")


def _caption(caption):
    return f'<figcaption style="color:inherit">{html.escape(caption)}</figcaption>' if caption else ""


def _svg(figure, alt):
    """The SVG element of `figure_html`; closes the figure."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "mr2", "svg.fonttype": "path"}):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, dpi=150, metadata=no_metadata)
    plt.close(figure)
    svg = buffer.getvalue()
    prefix = "mr2-" + hashlib.sha256((svg + alt).encode()).hexdigest()[:10] + "-"
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{prefix}", svg)
    # A style element would apply to the whole page; black without a fill attribute inherits the root's.
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL).replace("#000000", "currentColor")
    label = html.escape(alt)
    root = f'<svg role="img" aria-label="{label}" fill="currentColor" '
    root += 'style="max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt"'
    svg = re.sub(r"<svg([^>]*)>", lambda m: f"{root}{m[1]}><title>{label}</title>", svg, count=1)
    return svg.strip()


def _check_names(class_names, report):
    if len(class_names) != len(report.count):
        raise ValueError(f"got {len(class_names)} class names, expected {len(report.count)}, one for each class.")


def _percent(axis):
    axis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=0))


def _signed(value):
    """Two digits with a proper minus sign."""
    return f"{value:+.2f}".replace("-", "−")
