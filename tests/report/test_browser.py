"""The report in a real browser: what it draws, and that a phone can reach all of it.

Needs the extra ``browser`` and a Chromium: playwright's own (``playwright install chromium``), or
the one that ``FEDNAS_BROWSER`` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fednas_flwr.report.html_report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = os.environ.get("FEDNAS_BROWSER")
    with sync_api.sync_playwright() as playwright:
        if not Path(path or playwright.chromium.executable_path).is_file():
            pytest.skip("no Chromium: run `playwright install chromium`")
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, make_run: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """``opened(width)``: the report of a run on a screen of that width, without network."""
    pages = []
    report = write_report(make_run("run"))

    def opened(width: int, **look: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800}, **look)
        page.errors, page.asked = [], []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda line: line.type == "error" and page.errors.append(line.text))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(report.as_uri())
        page.wait_for_function("document.querySelectorAll('.plot svg').length > 0")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_and_fits(
    opened: Callable[..., Any], width: int, scheme: str
) -> None:
    page = opened(width, color_scheme=scheme)
    assert page.errors == []
    assert all(url.startswith(("file:", "data:")) for url in page.asked)
    boxes = page.eval_on_selector_all(
        ".plot",
        "all => all.map(p => [p.querySelectorAll('svg path, svg rect, svg circle').length,"
        " p.querySelector('svg').getBoundingClientRect().right,"
        " p.getBoundingClientRect().right])",
    )
    assert len(boxes) >= 6
    for marks, right, allowed in boxes:
        assert marks > 0
        assert right <= allowed + 1
    assert not page.evaluate(
        "[...document.querySelectorAll('.plot svg [x], .plot svg path, .plot svg circle')].some("
        "e => [...e.attributes].some(a => /NaN|undefined|Infinity/.test(a.value)))"
    )
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width  # the page itself never scrolls sideways


def test_on_a_phone_wide_cells_scroll_and_say_so(opened: Callable[..., Any]) -> None:
    page = opened(390)
    places = page.eval_on_selector_all(
        ".wide",
        "all => all.map(w => [w.scrollWidth, w.clientWidth, getComputedStyle(w).overflowX,"
        " getComputedStyle(w).backgroundImage])",
    )
    assert places
    for inside, outside, overflow, shade in places:
        assert overflow == "auto"
        assert inside > outside
        assert "gradient" in shade  # shadows at the ends that have more


def test_pointing_tells_the_value_and_the_slider_moves_the_alphas(
    opened: Callable[..., Any],
) -> None:
    page = opened(1200)
    bar = page.locator('[data-figure="clients"] rect[data-tip]').first
    bar.scroll_into_view_if_needed()
    bar.hover()
    assert page.locator(".tip").inner_text().startswith("client 0: ")
    colours = "[...document.querySelectorAll('[data-kind] rect[data-tip]')].map(r => r.dataset.tip)"
    last = page.evaluate(colours)
    page.locator("#round").evaluate("s => { s.value = 0; s.dispatchEvent(new Event('input')); }")
    assert page.evaluate(colours) != last
    assert page.locator("#round-number").inner_text() == "1"


def test_labels_of_neighbouring_ticks_differ(opened: Callable[..., Any]) -> None:
    page = opened(1200)
    labels = page.evaluate(
        """() => {
            const place = document.createElement("div");
            document.body.append(place);
            const y = [1.60931, 1.60932, 1.60935];
            const data = [{ type: "scatter", mode: "lines", x: [1, 2, 3], y }];
            drawFigure(place, { data, layout: { height: 300, xaxis: {}, yaxis: {} } },
                { width: 400, size: 12, text: "#222", rule: "#ddd", ends: ["#fff", "#000"] });
            return [...place.querySelectorAll("svg text")].map((t) => t.textContent);
        }"""
    )
    decimals = [label for label in labels if label.startswith("1.609")]
    assert len(decimals) == len(set(decimals)) >= 3
