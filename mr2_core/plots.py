"""The book's figures: one look, one colour per method, readable on a phone, in the dark, in grey and by ear.

Black means "the colour of the page's text": `show` turns it into CSS ``currentColor``, so that axes and words follow the
light or dark theme. Data are drawn in `COLOURS`, which stand out on white and on near-black alike.
"""

import hashlib
import html
import io
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
    "easy": ("#03a692", "^", "-", ""),
    "medium": ("#9453e0", "o", "--", "//"),
    "hard": ("#9c4a00", "v", ":", "xx"),
}
COLOURS, MARKERS, LINES, HATCHES = ({name: look[i] for name, look in _LOOKS.items()} for i in range(4))
THIRDS = ("easy", "medium", "hard")


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
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"alt is {alt!r}, expected a sentence that says what the figure shows.")
    if "$" in alt + (caption or ""):
        raise ValueError("alt and caption must be plain text, but hold a '$': write Unicode symbols instead of TeX.")
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "mr2", "svg.fonttype": "path"}):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, dpi=150, metadata=no_metadata)
    plt.close(figure)
    svg = buffer.getvalue()
    prefix = "mr2-" + hashlib.sha256((svg + alt).encode()).hexdigest()[:10] + "-"
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg))
    used = {name for pair in used for name in pair}
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{prefix}", svg)
    # A style element would apply to the whole page; black without a fill attribute inherits the root's.
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL).replace("#000000", "currentColor")
    label = html.escape(alt)
    root = f'<svg role="img" aria-label="{label}" fill="currentColor" '
    root += 'style="max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt"'
    svg = re.sub(r"<svg([^>]*)>", lambda m: f"{root}{m[1]}><title>{label}</title>", svg, count=1)
    text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="mr2-figure" style="margin:1em 0">{svg.strip()}{text}</figure>'


def show(figure, *, alt, caption=None):
    """Display a figure in a notebook; parameters as in `figure_html`."""
    display(HTML(figure_html(figure, alt=alt, caption=caption)))
