"""The report in a real browser: what it draws, and that a phone can reach all of it.

Needs the extra ``browser`` and a Chromium: playwright's own (``playwright install chromium``), or
the one that ``FEDNAS_BROWSER`` names.
"""

import os
from pathlib import Path

import pytest

from fednas_flwr.report.comparison import compare_runs, write_comparison
from fednas_flwr.report.html_report import write_report

from .conftest import with_config, with_events

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("FEDNAS_BROWSER")
    with sync_api.sync_playwright() as playwright:
        if not Path(path or playwright.chromium.executable_path).is_file():
            pytest.skip("no Chromium: run `playwright install chromium`")
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


WITHIN = """words => [...document.querySelectorAll("main *")].filter(e =>
  [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.includes(words)) &&
  e.getBoundingClientRect().bottom <= innerHeight && e.getBoundingClientRect().top >= 0).length"""


@pytest.mark.parametrize("told", [True, False])
def test_the_first_screen_answers_five_questions(browser, make_run, told):
    def completed(event):
        if event["event"] == "evaluated":
            event["central"]["intervals"] = {"accuracy": [0.84, 0.95]}
            event["central"]["majority"] = 0.6
            event["clients"] = event["clients"] if told else [{"client": c} for c in range(3)]
        if event["event"] == "exported":
            event["inputs"] = {"shape": [1], "schema": [], "mean": [], "std": []}

    folder = with_events(make_run("run", private=True), completed)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(write_report(folder).as_uri())
    page.wait_for_function("document.querySelectorAll('.plot svg').length > 0")
    for words in (
        "but no simpler model was trained",  # is it worth it?
        "95 % interval 84.0 % to 95.0 %",  # how sure?
        "Fares worst: client 1" if told else "clients keep their own scores",
        "Epsilon to state",
        "5.11",
        "fednas predict run patients.csv",  # how is it used?
    ):
        assert page.evaluate(WITHIN, words) > 0, words
    assert str(folder.parent) not in page.content()
    page.close()


@pytest.mark.parametrize(("scheme", "paper"), [("light", "244, 246, 249"), ("dark", "18, 22, 28")])
def test_a_comparison_fits_a_phone_and_a_dark_page(browser, make_run, tmp_path, scheme, paper):
    runs = [make_run(name, accuracy=a) for name, a in (("plain", 0.9), ("other", 0.8))]
    with_config(runs[1], search_space={"channels": 16})
    path = write_comparison(compare_runs(runs), tmp_path / "out")[-1]
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto(path.as_uri())
        page.wait_for_function("document.querySelectorAll('.plot svg rect').length >= 2")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({paper})"
        assert page.evaluate(CUT) == []
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(WITHIN, "plain") > 0
        page.close()


CONTRAST = """() => {
  const channel = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const parts = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c; }
    return [255, 255, 255]; };
  return [...document.querySelectorAll("main *")].filter(e => !e.closest("svg, .heat, progress") &&
    e.offsetWidth && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .map(e => { const [a, b] = [light(parts(getComputedStyle(e).color)), light(behind(e))]
      .sort((x, y) => y - x); return [(a + .05) / (b + .05), e.textContent.slice(0, 40)]; })
    .filter(([ratio]) => ratio < 4.5);
}"""


# Words of pictures that lie outside of them.
CUT = """() => [...document.querySelectorAll(".plot svg text")].filter(t => {
  const [a, b] = [t, t.closest("svg")].map(e => e.getBoundingClientRect());
  return a.left < b.left - 1 || a.right > b.right + 1; }).map(t => t.textContent)"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_that_goes_on_shows_first_where_it_is(browser, make_run, width, scheme):
    """The report of a run that is in its second round."""
    folder = make_run("live")
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    rounds = [place for place, line in enumerate(events) if '"event": "round"' in line]
    (folder / "events.jsonl").write_text("".join(events[: rounds[1] + 1]))
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(write_report(folder).as_uri())
    page.wait_for_function("document.querySelectorAll('.plot svg').length > 0")
    for words in ("Search, round 2 of 3, about 1.5 s left in this stage", "train loss 1.000"):
        assert page.evaluate(WITHIN, words) > 0
    shown = page.locator("#live progress").bounding_box()
    assert shown["y"] + shown["height"] < 400
    assert page.locator("#live progress").get_attribute("value") == "2"
    assert "Use this model" not in page.content()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    assert page.evaluate(CONTRAST) == []
    assert errors == []
    page.close()


@pytest.fixture
def opened(browser, make_run):
    """``opened(width)``: the report of a run on a screen of that width, without network."""
    pages = []
    report = write_report(make_run("run"))

    def opened(width, **look):
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
def test_every_figure_is_drawn_and_fits(opened, width, scheme):
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
    assert len(page.content()) < 150_000
    assert all(marks > 0 and right <= allowed + 1 for marks, right, allowed in boxes)
    assert not page.evaluate(
        "[...document.querySelectorAll('.plot svg [x], .plot svg path, .plot svg circle')].some("
        "e => [...e.attributes].some(a => /NaN|undefined|Infinity/.test(a.value)))"
    )
    assert page.evaluate(CUT) == []
    assert width < 1200 or page.evaluate(CONTRAST) == []  # of WCAG 2.1, level AA
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width  # the page itself never scrolls sideways


def test_on_a_phone_wide_cells_scroll_and_say_so(opened):
    places = opened(390).eval_on_selector_all(
        ".wide",
        "all => all.map(w => [w.scrollWidth, w.clientWidth, getComputedStyle(w).overflowX,"
        " getComputedStyle(w).backgroundImage])",
    )
    assert places
    for inside, outside, overflow, shade in places:
        assert overflow == "auto"
        assert inside > outside
        assert "gradient" in shade  # shadows at the ends that have more


def test_pointing_tells_the_value(opened):
    page = opened(1200)
    bar = page.locator('[data-figure="clients"] rect[data-tip]').first
    bar.scroll_into_view_if_needed()
    bar.hover()
    assert page.locator(".tip").inner_text().startswith("client 0: ")


def test_labels_can_be_told_apart(opened):
    labels = opened(1200).evaluate(
        """() => {
            const place = document.createElement("div");
            document.body.append(place);
            const look = { type: "scatter", mode: "markers", x: [...Array(5).fill(-0.17), 0.5] };
            const text = ["one", "two", "three", "four", "five", "six"];
            const data = [{ ...look, y: [...Array(5).fill(1.60931), 1.60935], text }];
            drawFigure(place, { data, layout: { height: 300, xaxis: {}, yaxis: {} } },
                { width: 1250, size: 12, text: "#222", rule: "#ddd", ends: ["#fff", "#000"] });
            return [...place.querySelectorAll("svg text")].map((t) => t.textContent);
        }"""
    )
    decimals = [label for label in labels if label.startswith("1.609")]
    assert len(decimals) == len(set(decimals)) >= 3
    assert "0" in labels  # and not 1e-17
    assert labels[-5:] == ["one", "two", "three", "four", "six"]  # the fifth has no room
