"""The HTML report: what it says, that it is one file, and how a real browser takes it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from browser import CHROMIUM, Browser
from report_samples import could_not_run, healthy, one_head_only, window_defect

from backlight.doctor.report import Picture, StageRow, svg
from backlight.doctor.report.graph import edges
from backlight.doctor.report.html import html, write_html

SAMPLES = {"window": window_defect, "one-head": one_head_only, "healthy": healthy, "could-not-run": could_not_run}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Checked(HTMLParser):
    """Collects attributes and proves that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(params=SAMPLES)
def page(request) -> str:
    return html(SAMPLES[request.param]())


def test_well_formed_and_self_contained(page):
    checked = Checked()
    checked.feed(page)
    assert checked.open == []
    for tag, name, value in checked.attributes:
        if name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (value or "").startswith(("data:", "#")), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    assert "<script" not in page
    assert not re.search(r"@import|url\(|https?://", page)


def test_the_page_says_what_the_report_says():
    page = html(window_defect())
    for text in (
        "Backward window is one too wide".lower(),
        "the backward pass sees one key more than the window allows.",
        "run again with --window 96,0: the leak must move to i-j = 97.",
        "explains 99.99 % of the error",
        "192 leaks (must be zero and are not)",
        "zeros that are right",
        "my_kernel.py:12",
        "gradcheck passed",
        "4 of 10",
    ):
        assert text in page.lower(), text


def test_user_text_is_escaped():
    report = window_defect()
    report.headline = "<script>alert(1)</script>"
    report.pictures[0].data["heads"][0] = '<b onload="x">'
    page = html(report)
    assert "<script" not in page
    assert "<b onload" not in page
    assert "window+1 &lt;here&gt; &amp; there" in page


def test_best_finding_comes_first():
    page = html(window_defect())
    assert page.index("one key more than the window") < page.index("Something before dv is wrong")


def test_the_graph_follows_the_formulas():
    """Edges are read off the stages' signatures; these are the ones a reader of the backward pass expects."""
    found = set(edges())
    forward, backward = [("s", "lse"), ("lse", "p"), ("p", "o")], [("dp", "ds"), ("delta", "ds"), ("ds", "dq")]
    recomputed = [("s", "p (bwd)"), ("lse", "p (bwd)"), ("p (bwd)", "dv"), ("p (bwd)", "ds")]
    for pair in forward + backward + recomputed:
        assert pair in found, pair
    assert ("p", "dv") not in found
    assert ("dq", "dk") not in found
    assert ("o", "p") not in found


def test_a_culprit_is_drawn_as_one_and_unseen_stages_are_hollow():
    page = html(window_defect())
    assert re.search(r'<rect [^>]*class="box culprit"[^>]*><title>p [(]bwd[)]: culprit', page)
    assert re.search(r'<rect [^>]*class="box inherited"[^>]*><title>dq: inherited', page)
    assert re.search(r'<rect [^>]*class="box unseen"[^>]*><title>delta: the kernel does not return it', page)
    assert "dsink" not in page


def test_weights_of_both_directions_are_boxes_of_their_own():
    """A wrong recomputation in the backward does not make the forward's weights look guilty."""
    report = window_defect()
    report.stages.insert(0, StageRow("p", "ok", global_error=0.001, local_error=0.001))
    page = html(report)
    assert re.search(r'<rect [^>]*class="box ok"[^>]*><title>p: ok', page)
    assert re.search(r'<rect [^>]*class="box culprit"[^>]*><title>p [(]bwd[)]: culprit', page)


def test_a_stage_that_was_not_seen_says_how_it_is_known():
    report = window_defect()
    report.stages = [row for row in report.stages if not row.name.startswith("p")]
    report.stages.append(StageRow("p (bwd)", "culprit", note="not seen itself; inferred from dq, dk, dv"))
    page = html(report)
    assert "<title>p (bwd): culprit, not seen itself; inferred from dq, dk, dv</title>" in page
    assert ">inferred</text>" in page


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (None, "none"),
        (0.0, "h0"),
        (1.9, "h3"),
        (2.0, "h3"),
        (2.1, "h4"),
        (4.1, "h5"),
        (1e9, "h8"),
        (float("nan"), "hx"),
        (float("inf"), "hx"),
    ],
)
def test_heat_steps(value, step):
    assert svg.heat_step(value, 2.0) == step


def test_support_merges_runs_but_keeps_every_leak():
    cells = [[1] * i + [0] * (50 - i) for i in range(50)]
    cells[10][40] = 2
    drawn = svg.support({"cells": cells, "sq": 50, "sk": 50})
    assert drawn.count('class="leak"') == 1
    assert drawn.count('class="visible"') == 49


@pytest.mark.parametrize(
    "picture",
    [
        Picture("head_tile", "", {"stage": "dq", "unit": "rho_A", "limit": 2.0, "tile": 16, "heads": [], "values": []}),
        Picture(
            "support", "", {"stage": "p", "head": "b0 h0", "sq": 0, "sk": 0, "step": 1, "leaks": 0, "holes": 0, "cells": []}
        ),
        Picture("ulp", "", {"edges": [0, 1], "counts": {"dq": [0, 0]}}),
        Picture("repeats", "", {"runs": 0, "rows": []}),
    ],
    ids=lambda picture: picture.kind,
)
def test_empty_pictures_are_drawn(picture):
    report = healthy()
    report.pictures = [picture]
    assert f'class="card {picture.kind}"' in html(report)


# --- a real browser ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with Browser() as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_browser_no_request_no_console_message(browser, tmp_path, sample, dark):
    path = write_html(SAMPLES[sample](), tmp_path / "deep" / "report.html")
    asked, said = browser.open(path, dark=dark)
    assert asked == []
    assert said == []
    assert browser.evaluate("document.querySelector('h1').textContent") == SAMPLES[sample]().headline
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", str(background))[:3])) < 384) == dark


@pytest.mark.parametrize("width", [1280, 390])
def test_browser_nothing_is_cut_off(browser, tmp_path, width):
    browser.open(write_html(window_defect(), tmp_path / "report.html"), width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().width > 0)")
    outside = """[...document.querySelectorAll('svg')].filter(s => { const view = s.viewBox.baseVal;
        return [...s.querySelectorAll('text')].some(t => { const b = t.getBBox();
            return b.x < -1 || b.y < -1 || b.x + b.width > view.width + 1 || b.y + b.height > view.height + 1; }); }).length"""
    assert browser.evaluate(outside) == 0


def test_browser_watches(browser, tmp_path):
    """The checks above can fail: a page with a request and a console message is caught."""
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><img src='missing.png'><script>console.error('seen')</script>")
    asked, said = browser.open(path)
    assert any(url.endswith("missing.png") for url in asked)
    assert any("seen" in line for line in said)


def test_browser_a_phone_shows_names_that_can_be_read(browser, tmp_path):
    """The graph is scrolled sideways where it does not fit, and sentences of tables keep a width of their own."""
    browser.open(write_html(one_head_only(), tmp_path / "report.html"), width=390)
    small = "[...document.querySelectorAll('#stages .scroll > svg text.name')].map(t => t.getBoundingClientRect().height)"
    heights = browser.evaluate(small)
    assert heights
    assert min(heights) >= 10
    narrow = "[...document.querySelectorAll('td.text')].map(t => t.getBoundingClientRect().width)"
    assert min(browser.evaluate(narrow)) >= 200


@pytest.mark.parametrize("width", [1280, 390])
def test_browser_numbers_keep_their_unit_beside_them(browser, tmp_path, width):
    report = window_defect()
    report.probes[0].seconds = 0.378
    report.probes[0].detail = "long words that want the whole width of the table " * 5
    browser.open(write_html(report, tmp_path / "report.html"), width=width)
    lines = """[...document.querySelectorAll('#probes td.number')].map(cell => { const r = document.createRange();
        r.selectNodeContents(cell); return new Set([...r.getClientRects()].map(box => box.top)).size; })"""
    assert set(browser.evaluate(lines)) == {1}
