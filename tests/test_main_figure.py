"""The landing page's figure shows the embedded data as they are."""

from test_repository import ROOT, module

MAIN_FIGURE = module(ROOT / "book" / "make_main_figure.py")


def test_main_figure_is_up_to_date():
    drawn = MAIN_FIGURE.TARGET.read_text(encoding="utf-8")
    assert drawn == MAIN_FIGURE.main_figure() + "\n", "the data or the drawing changed: python book/make_main_figure.py"
    assert "_static/main_figure.html" in (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
