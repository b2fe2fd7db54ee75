"""``fednas watch``: the report of a run as it is now, on a page that reloads itself."""

import json

import pytest

from fednas_flwr.cli import main
from fednas_flwr.report import html_report
from fednas_flwr.runs.events import EventLog

from ..refusals import raising

RELOADS = "location.reload()"


@pytest.fixture
def unfinished(make_run):
    folder = make_run("run")
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(events[:-1]))
    return folder


def test_the_page_follows_the_run_and_reloads_itself_no_more_after_it(
    unfinished, monkeypatch, prints
):
    page = unfinished / "report.html"
    seen = []

    def wait(seconds):
        seen.append(page.read_text())
        assert seconds == html_report.RENEW_S
        with EventLog(unfinished / "events.jsonl") as log:
            if len(seen) == 1:
                log.emit("warning", message="a later warning </body>")
            else:
                log.emit("run_finished", status="completed", seconds=1.0)

    monkeypatch.setattr("time.sleep", wait)
    assert str(page) in prints("watch", unfinished)
    first, second = seen
    assert first.count(RELOADS) == first.count("</body>") == second.count(RELOADS) == 1
    assert "a later warning" not in first
    assert "a later warning &lt;/body&gt;" in second
    assert page.read_text() == html_report.write_report(unfinished).read_text()
    assert RELOADS not in page.read_text()


def test_a_torn_line_of_a_run_that_is_writing_is_no_error(unfinished):
    with (unfinished / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "message": "half"})[:20])
    assert RELOADS in html_report.write_report(unfinished, renews=True).read_text()


def test_an_end_by_hand_leaves_a_page_that_rests(unfinished, monkeypatch):
    monkeypatch.setattr("time.sleep", raising(KeyboardInterrupt))
    assert main(["watch", str(unfinished)]) > 0
    assert RELOADS not in (unfinished / "report.html").read_text()


def test_a_folder_without_a_run_is_one_sentence(tmp_path, prints):
    assert "holds no events.jsonl" in prints("watch", tmp_path, code=2)
