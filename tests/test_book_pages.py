"""The built book as a reader meets it: launch buttons, and each page in a browser, wide, narrow and dark."""

import functools
import http.server
import re
import shutil
import threading

import pytest
from test_repository import ADDRESS, NAME, OWNER, PAGES, ROOT, TAG

HTML = ROOT / "_build" / "html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(not (HTML / "index.html").is_file(), reason="there is no built book: run `make book`")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH")
each_page = pytest.mark.parametrize("page", PAGES)
SOURCES = {page: ROOT / f"{page}.ipynb" for page in PAGES if (ROOT / f"{page}.ipynb").is_file()}
INTERACTIVE = [page for page, path in SOURCES.items() if "show_interactive(" in path.read_text(encoding="utf-8")]


@each_page
def test_launch_button_opens_the_notebook(page):
    html = (HTML / f"{page}.html").read_text(encoding="utf-8")
    links = set(re.findall(r'href="(https://colab\.research\.google\.com/[^"]*)"', html))
    if (ROOT / f"{page}.ipynb").is_file():
        assert links == {f"https://colab.research.google.com/github/{OWNER}/{NAME}/blob/{TAG}/{page}.ipynb"}
    else:
        assert links == set()
    assert f'href="{ADDRESS}"' in html


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--disable-quic", *quiet]
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Open a page of the book, fail on what it complains about, and on every request to another host."""
    contexts, complaints = [], []

    def visit(page, width=1280, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
        tab.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
        tab.goto(f"{address}/{page}.html", wait_until="load")
        tab.evaluate("() => window.MathJax?.startup?.promise")
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.browser
@needs_browser
@each_page
def test_page_is_sound(visit, page):
    tab = visit(page)
    assert tab.locator("main article h1").count() == 1
    assert tab.locator("input[type=search]").count() == 1
    # Pictures and drawings say what they show
    for picture in tab.locator("main img:visible").all():
        alt = picture.get_attribute("alt") or ""
        assert alt.strip(), picture.get_attribute("src")
        assert not re.search(r"\.(png|svg|jpe?g)$", alt)
    for drawing in tab.locator("main .cell_output svg:not(button svg, [role=img] svg), .mr2-plot[role=img]").all():
        assert drawing.get_attribute("role") == "img"
        assert (drawing.get_attribute("aria-label") or "").strip()
    # Every equation was set, none with an error, and no markup was left as text
    unset = "nodes => nodes.filter(node => !node.querySelector('mjx-container')).map(node => node.textContent)"
    assert tab.locator("main .math").evaluate_all(unset) == []
    assert tab.locator("mjx-merror, [data-mml-node=merror], [data-mjx-error]").count() == 0
    prose = tab.locator("main").evaluate(
        "main => { const copy = main.cloneNode(true);"
        " copy.querySelectorAll('pre, code, script, mjx-container').forEach(node => node.remove());"
        " return copy.textContent }"
    )
    assert re.findall(r"\{\w[\w:-]*\}`|\$\$|\$\\\w|\\\(|\\begin\{", prose) == []


@pytest.mark.browser
@needs_browser
@each_page
def test_page_fits_a_phone(visit, page):
    tab = visit(page, width=390)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.evaluate(wide) <= 0
    # Nothing is cut off either: what reaches beyond the screen lies in something that scrolls
    cut = tab.locator("main .math, main table, main svg, main img, main pre, main figure").evaluate_all(
        """nodes => nodes.filter(node => {
            if (!node.offsetParent && !(node instanceof SVGElement)) return false;
            if (node.getBoundingClientRect().right <= innerWidth + 1) return false;
            for (let box = node; box && box.tagName !== 'MAIN'; box = box.parentElement)
                if (['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) return false;
            return true;
        }).map(node => node.outerHTML.slice(0, 200))"""
    )
    assert cut == []


@pytest.mark.browser
@needs_browser
@each_page
def test_page_is_dark_where_the_reader_wants_it(visit, page):
    tab = visit(page, scheme="dark")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    # Figures take the page's colours: a light box round them would blind
    boxes = tab.locator(".mr2-figure, .cell_output:has(.mr2-figure), .text_html:has(.mr2-figure)")
    backgrounds = boxes.evaluate_all("nodes => nodes.map(node => getComputedStyle(node).backgroundColor)")
    assert set(backgrounds) <= {"rgba(0, 0, 0, 0)"}


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("page", INTERACTIVE)
def test_sliders_move_a_figure_without_a_kernel(visit, page):
    html = (HTML / f"{page}.html").read_text(encoding="utf-8")
    assert '<div class="mr2-plot"><svg role="img"' in html  # what a reader without JavaScript sees
    tab = visit(page, width=390)
    box = tab.locator(".mr2-figure:has(.mr2-slider)")
    box.scroll_into_view_if_needed()
    box.locator(".mr2-plot[role=img] .scatterlayer path").first.wait_for(state="attached")

    def shapes():
        return box.locator(".scatterlayer").inner_html()

    def data():
        return box.locator(".mr2-plot").evaluate("plot => JSON.stringify(plot.data)")

    for slider in box.locator("input[type=range]").all():
        assert slider.bounding_box()["height"] >= 24  # WCAG 2.2, success criterion 2.5.8
        shape, datum, reading = shapes(), data(), slider.get_attribute("aria-valuetext")
        slider.press("ArrowRight")
        assert shapes() != shape
        assert slider.get_attribute("aria-valuetext") not in (reading, None)
        slider.press("ArrowLeft")
        assert data() == datum
    # Words follow the theme when it is toggled
    for theme in ("dark", "light"):
        tab.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        words = box.locator(".xtick text").first.evaluate("node => getComputedStyle(node).fill")
        assert words == box.evaluate("node => getComputedStyle(node).color")
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_margins_losses_and_terms_of_the_bound_can_be_moved():
    chapters = ("03_one_third_law", "04_two_losses", "09_class_sensitive_bound")
    assert {f"notebooks/{chapter}" for chapter in chapters} <= set(INTERACTIVE)


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("page", INTERACTIVE)
def test_a_figure_that_moves_is_a_still_without_javascript(browser, address, page):
    context = browser.new_context(viewport={"width": 390, "height": 900}, java_script_enabled=False)
    context.route(lambda url: not url.startswith((address, "data:")), lambda route: route.abort())
    tab = context.new_page()
    tab.goto(f"{address}/{page}.html", wait_until="load")
    still = tab.locator(".mr2-figure:has(.mr2-sliders) .mr2-plot svg[role=img]")
    assert still.is_visible()
    assert (still.get_attribute("aria-label") or "").strip()
    assert not tab.locator(".mr2-slider").first.is_visible()
    context.close()
