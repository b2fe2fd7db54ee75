import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser

import pytest

from fednas_flwr.api import Result
from fednas_flwr.report import score_tables
from fednas_flwr.report.html_report import write_report
from fednas_flwr.runs.events import EventLog
from fednas_flwr.runs.numbers import read_run

from ..refusals import lacking, raising, refuses
from ..rows import seldom
from . import conftest as made

VOID = {"meta", "link", "input", "br", "img", "hr", "path", "rect", "circle"}
OUTSIDE = re.compile(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", re.IGNORECASE)


class Page(HTMLParser):
    """Ids, links, tags and texts of a page; fails on tags that do not match."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.addresses, self.tags, self.scripts, self.plots = [], [], [], [], []
        self.text, self._open = "", []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if values.get("id") else []
        self.plots += [values["data-figure"]] if values.get("data-figure") else []
        self.addresses += [values[k] or "" for k in ("src", "href", "action") if k in values]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] != "style":
            self.text += data


def page_of(folder):
    """Return the report that is written of a run, and its words with single blanks."""
    page = Page(write_report(folder))
    return page, " ".join(page.text.split())


def test_the_page_of_a_finished_run(make_run):
    folder = make_run("run")
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path)
    sections = "answer baselines scores clients-results network alphas search retrain cost".split()
    sections += "partition failures run".split()
    assert [i for i in page.ids if i in sections] == sections
    assert len(page.ids) == len(set(page.ids))
    shown = ("digits, 3 clients", "90.0 %", "75.0 %", "12.3 k", "6.7 M", "abc1234")
    absent = ["Configurations chosen", "noised"]
    assert lacking(page.text, *shown, *absent) == absent
    assert "Epsilon to statenone" in page.text.replace("\n", "")
    assert page.tags.count("svg") == 2
    figures = json.loads(page.scripts[0])
    assert set(page.plots) == set(figures)
    assert {"search_loss", "search_entropy", "retrain_loss", "partition", "clients"} <= set(figures)
    assert {"alphas_normal", "alphas_reduction"} <= set(figures)


def test_the_page_needs_no_network(make_run):
    path = write_report(make_run("run"))
    page = Page(path)
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    for target in page.addresses:
        assert not target.startswith("#") or target[1:] in page.ids
    text = path.read_text(encoding="utf-8")
    assert not OUTSIDE.search(text)
    assert lacking(text, "@import", "url(") == ["@import", "url("]
    assert len(text) < 1.5e6
    assert not {"iframe", "img", "object", "embed"} & set(page.tags)


@pytest.mark.parametrize("evil", [*made.EVIL[:3], *map(seldom, made.EVIL[3:])])
def test_what_others_wrote_is_escaped(make_run, evil):
    """The page has the same elements, ids and scripts whatever clients and others have written."""
    plain, page = (
        Page(write_report(made.make_hostile(make_run(name), words)))
        for name, words in (("plain", "plain words"), ("evil", evil))
    )
    assert page.text.count("\n".join(evil.splitlines())) >= plain.text.count("plain words") // 3
    assert (page.tags, page.ids, page.scripts[1:]) == (plain.tags, plain.ids, plain.scripts[1:])
    assert json.loads(page.scripts[0])
    links = [address for address in page.addresses if not address.startswith("#")]
    assert links[0] == "data:,"
    assert [link[:2] for link in links[1:]] == ["./"]  # a path in any browser, of no scheme


def test_a_run_that_failed_in_search_has_only_what_it_reached(make_run):
    page = Page(write_report(make_run("run", until="search")))
    assert "Why the run failed" in page.text
    assert {"search", "alphas", "partition"} <= set(page.ids)
    assert not {"retrain", "network", "clients-results", "baselines"} & set(page.ids)


def test_a_run_without_search_alphas_partition_and_config(tmp_path):
    made.emit(tmp_path, "stage_started", stage="retrain", rounds=1)
    made.emit(tmp_path, "round", **made.ROUND, stage="retrain", round=1, rounds=1)
    made.emit(tmp_path, "derived", genotype=None, num_parameters=5, multiply_adds=None)
    made.emit(tmp_path, "evaluated", central=None, clients=[], linear=None)
    page = Page(write_report(tmp_path))
    assert "retrain" in page.ids
    assert (page.plots, page.tags.count("svg")) == ([], 0)


def test_a_notebook_shows_a_picture_of_the_report(make_run):
    result = Result(make_run("run"))
    html = result.plot()._repr_html_()
    assert html.startswith("<iframe")
    (shown,) = re.findall(r"id=&#34;figures&#34;&gt;(.*?)&lt;/script&gt;", html)
    names = json.loads(unescape(shown))["shown"]["data"][0]["y"]
    assert names[:2] == ["found", "the pooled linear model"]
    assert result.plot("clients").figure["data"][0]["type"] == "bar"
    refuses("plot=oddity is unknown: choose one of .*leaderboard", result.plot, "oddity")


def test_a_run_that_goes_on_says_where_it_is(make_run):
    folder = make_run("run", until="start")
    assert "live" not in Page(write_report(folder)).ids
    with EventLog(folder / "events.jsonl") as log:
        made.emit_rounds(log, "search", range(1, 3), 5)
    page, text = page_of(folder)
    assert page.ids.index("live") < page.ids.index("answer")
    assert "Search, round 2 of 5, about 4.5 s left in this stage; train accuracy 40.0 %" in text


def test_a_failed_write_leaves_the_old_report(make_run, monkeypatch):
    folder = make_run("run")
    path = write_report(folder)
    before = path.read_bytes()
    made.emit(folder, "warning", message="late")
    monkeypatch.setattr("os.fsync", raising(OSError("no space left")))
    refuses("no space", write_report, folder, error=OSError)
    assert path.read_bytes() == before
    assert [p.name for p in folder.iterdir() if p.name.endswith(".tmp")] == []


def test_the_page_of_a_private_run(make_run):
    page, text = page_of(make_run("run", private=True))
    assert page.ids.index("cost") < page.ids.index("privacy") < page.ids.index("partition")
    assert "#privacy" in page.addresses
    parts = (
        "State (5.11, 1e-05)-differential privacy per record, add/remove",
        "at delta 1e-05, per record, add/remove",
        *("Poisson sampling", "0.032 to 0.0533", "an approximation and no bound"),
        *("2.90 of 8", "Loss, noised"),
        *("validation accuracy, noised", "accuracy, with the noise that it added"),
        *("declared by the clients", "Client 1 left the run. Dropped replies"),
        "left the run: its budget has ended",
    )
    assert lacking(text, *parts, "Linear model", "Test seed") == ["Linear model", "Test seed"]
    figures = json.loads(page.scripts[0])
    assert "partition" not in figures
    assert figures["clients"]["layout"]["xaxis"]["range"] == [-0.05, 1.03]


@pytest.mark.parametrize("private", [False, True])
def test_a_run_that_has_just_started_knows_nothing(make_run, private):
    page = Page(write_report(make_run("run", private=private, until="start")))
    assert "unfinished" in page.text
    assert not {"search", "partition", "clients-results"} & set(page.ids)
    assert private == ("privacy" in page.ids) == ("no epsilon is known" in page.text)


def test_a_resumed_private_run_says_that_its_table_holds_the_rest(make_run):
    folder = make_run("run", private=True)
    assert "since the run was resumed" not in Page(write_report(folder)).text
    accepted = read_run(folder).privacy
    rest = [accepted["schedule"][0] | {"steps": 77}]
    clients = [promise | {"unit": "person"} for promise in accepted["clients"]]
    made.emit(folder, "run_started", resumed=True)
    made.emit(folder, "privacy", schedule=rest, clients=clients)
    _, text = page_of(folder)
    assert dict(score_tables.setting_rows(read_run(folder)))["privacy.unit"] == "person"
    assert "What is released, at most, since the run was resumed" in text
    assert "counts as booked before" in text
    assert "1,200" not in text


def test_a_run_that_stopped_early_tells_how_far_it_came(make_run):
    folder = make_run("run", private=True, until="search")

    def without_round_3(event):
        if event["event"] == "round" and event["round"] == 3:
            event["event"] = "lost"

    shown = dict(score_tables.setting_rows(read_run(made.with_events(folder, without_round_3))))
    told = [shown[name] for name in ("rounds", "retrain.rounds", "clients")]
    assert told == ["2 of 3", "0 of 2", "3, 1 left before the end"]
    parts = ("Not all of it was released", "Search, 2 of 3 rounds", "Clients that took part: 3, 1")
    assert lacking(page_of(folder)[1], *parts) == []


def test_a_run_without_a_round_does_not_praise_its_clients(make_run):
    folder = make_run("run", until="start")
    text = Page(write_report(folder)).text
    assert "every client answered" not in text
    assert text.count("no round has finished") == 1
    shown = dict(score_tables.setting_rows(read_run(folder)))
    assert (shown["clients"], shown["rounds"]) == ("0 of 3", "0 of 3")


@pytest.mark.parametrize("stage", ["search", "start"])
def test_a_search_that_did_not_run_was_not_private(make_run, stage):
    aware = {"dp_aware": {"max_grad_norm": 0.1, "noise_multiplier": 0.2}}
    folder = made.with_config(make_run("run", until=stage), algorithm=aware)
    page = write_report(folder).read_text(encoding="utf-8")
    assert ("<dt>the search was</dt>" in page) == (stage == "search")


def test_a_client_that_never_appeared_has_no_row_and_moves_nobody(make_run):
    folder = make_run("run", until="start")
    two = {"counts": [[10, 20], [5, 5]], "clients": [0, 2], "splits": made.PARTITION["splits"][:2]}
    made.emit(folder, "partition", **made.PARTITION | two)
    assert dict(score_tables.setting_rows(read_run(folder)))["clients"] == "2 of 3"
    path = write_report(folder)
    rows = r'<tr><td>(\d)</td><td class="num">20</td>'
    assert re.findall(rows, path.read_text(encoding="utf-8")) == ["0", "2"]
    assert json.loads(Page(path).scripts[0])["partition"]["data"][0]["x"] == ["0", "2"]


def test_lines_to_copy_are_safe_in_a_folder_of_any_name(make_run):
    folder = made.make_hostile(make_run('a"b $(touch x)'), "words")
    text = Page(write_report(folder)).text
    assert shlex.split(re.search("fednas predict .*", text)[0])[2] == folder.name
    assert f"load({json.dumps(folder.name)})" in text
