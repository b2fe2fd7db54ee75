import io
import re

import pytest
from rich.console import Console

from fednas_flwr.cli import fail
from fednas_flwr.report.comparison import compare_runs, print_comparison
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.terminal import ProgressDisplay, print_summary
from fednas_flwr.runs.events import read_events

from ..refusals import lacking
from .conftest import EVIL, make_hostile, printed, with_events


def _round(number, rounds, elapsed):
    metrics = {"train_loss": 1.25, "validation_accuracy": 0.5}
    place = {"event": "round", "stage": "search", "round": number, "rounds": rounds}
    return place | {"seconds": 2.0, "elapsed": elapsed, "metrics": metrics}


def _show(events, *, terminal=False, width=120):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, legacy_windows=False)
    with ProgressDisplay(console) as display:
        for event in events:
            display(event)
    return out.getvalue()


def test_a_short_stage_has_one_line_per_round_with_time_left():
    started = {"event": "stage_started", "stage": "search", "rounds": 3}
    lines = _show([started, *(_round(n, 3, 2.0 * n) for n in (1, 2, 3))]).splitlines()
    assert len(lines) == 4
    first = "search 1/3  train loss 1.250  validation accuracy 50.0 %  2.00 s  4.0 s left"
    assert lines[1] == first
    assert "left" not in lines[3]


def test_a_long_stage_has_about_one_line_per_five_seconds_and_the_last():
    rounds = 400
    text = _show([_round(n, rounds, 0.1 * n) for n in range(1, rounds + 1)])
    shown = [int(line.split()[1].split("/")[0]) for line in text.splitlines()]
    assert shown == [1, 51, 101, 151, 201, 251, 301, 351, 400]


def test_warnings_and_failures_are_printed_whole_and_a_repeated_failure_once():
    failure = {"event": "client_failed", "stage": "search", "round": 1, "action": "train.search"}
    failure |= {"client": 2, "reason": "[bold]KeyError[/bold]: " + "long " * 40}
    warning = {"event": "warning", "message": "the newest checkpoint is damaged"}
    for terminal in (False, True):
        text = _show([failure, warning, failure | {"round": 2}], terminal=terminal)
        assert text.count("[bold]KeyError[/bold]: " + "long " * 39) == 1
        assert "warning: the newest checkpoint is damaged" in text


def test_what_fails_before_the_first_round_has_no_round():
    failure = {"event": "client_failed", "stage": "connect", "round": 0, "client": 2}
    text = _show([failure | {"action": "query.describe", "reason": "KeyError: x"}])
    place = "before the first round, when it was asked what it has (query.describe)"
    assert text == f"client 2 failed {place}: KeyError: x\n"


def test_whoever_waits_for_a_person_is_told_with_the_command():
    awaited = [{"client": client, "schedule": "a1" * 16} for client in (0, 2)]
    text = _show([{"event": "approval_awaited", "run": "r", "clients": awaited}], terminal=False)
    words = f"waits for a person's approval: `fednas approve {'a1' * 16}` at its site"
    assert text.splitlines() == [f"client 0 {words}", f"client 2 {words}"]


@pytest.mark.parametrize("terminal", [False, True])
def test_networks_beside_a_run_have_a_bar_and_the_time_left(terminal):
    place = {"event": "beside", "stage": "baselines", "share": 0.5, "left": 63.0}
    events = [
        {"event": "stage_started", "stage": "baselines", "rounds": None},
        place,
        place | {"position": "1/2", "text": "random_1: accuracy 96.8 %"},
        place | {"share": 1.0, "left": 0.0, "position": "2/2", "text": "linear: no [red]luck"},
        {"event": "stage_finished", "stage": "baselines", "seconds": 3.0},
        {"event": "told", "text": "delivered: linear"},
    ]
    text = _show(events, terminal=terminal)
    lines = ("baselines 1/2  random_1: accuracy 96.8 %  1:03 min left", "delivered: linear")
    assert lacking(text, *lines, "baselines 2/2  linear: no [red]luck") == []
    if terminal:
        assert re.search(r"baselines .*━.* 2/2", text)
    else:
        assert text.count("\n") == 5


def test_a_terminal_gets_bars_and_its_cursor_back(make_run):
    text = _show(read_events(make_run("run") / "events.jsonl"), terminal=True)
    assert lacking(text, "search", "3/3", "train loss 0.667") == []
    assert text.rstrip().endswith("\x1b[?25h")


def test_the_summary_names_numbers_and_report(make_run):
    folder = make_run("run")
    assert "report:" not in printed(print_summary, folder, width=80)
    (folder / "report.html").touch()
    parts = ("90.0 %", "80.0 %", "75.0 %", "12.3 k", "6.7 M", f"report: {folder}/report.html")
    assert lacking(printed(print_summary, folder, width=80), *parts) == []


def test_a_narrow_terminal_gets_the_columns_that_matter(make_run):
    folder = make_run("run")
    path = folder / "events.jsonl"
    interval = '"linear": {"intervals": {"accuracy": [0.71, 0.79]}, '
    path.write_text(path.read_text().replace('"linear": {', interval))
    for width, left_out in ((72, "parameters, rounds."), (120, "")):
        text = printed(print_summary, folder, width=width)
        board = text.partition("Models that were compared")[2]
        assert "│ the pooled linear model │ 75.0 % (71.0 % – 79.0 %) │" in board
        told = board.partition("In the report, as this terminal is narrow: ")[2]
        assert told.partition("\n")[0] == left_out


def test_the_summary_of_a_failed_run_gives_the_reason(make_run):
    text = printed(print_summary, make_run("run", until="search"))
    assert lacking(text, "run failed", "client 2: disk full", "linear") == ["linear"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_private_run_says_what_it_promises_and_what_is_noised(make_run, terminal):
    text = _show(read_events(make_run("run", private=True) / "events.jsonl"), terminal=terminal)
    parts = (
        "privacy: (epsilon, delta) at most (5.11, 1e-05) per record, add/remove",
        "budget of client 1: covers 2 of 3 rounds of search, then the client leaves",
        "budget of 1 of 3 clients: covers the run",
        "client 1 left the run in search round 2 (train.weight_gradient): its budget",
        *("validation accuracy 120.0 % (noised)", "validation loss -2.000 (noised)"),
    )
    assert lacking(text, *parts, "est seed") == ["est seed"]


def test_a_private_run_with_a_test_seed_is_warned_of_at_start_and_end(make_run):
    folder = make_run("run", private=True, secure_noise=False)
    shown = _show(read_events(folder / "events.jsonl"))
    assert "warning: Test seed: no privacy. Noise and sampling of client 2" in shown
    text = printed(print_summary, folder, width=100)
    lines = [line.strip("│").split("│") for line in text.splitlines() if "│" in line]
    assert {
        "(epsilon, delta)": "(5.11, 1e-05) per record, add/remove",
        "accountant, sampling": "PRV, Poisson",
        "warning": "test seed: no privacy",
        "mean accuracy over clients, noised": "49.0 %",
        "clients that left": "1",
    }.items() <= {label.strip(): value.strip() for label, value in lines}.items()


def test_the_summary_of_a_run_without_privacy_does_not_speak_of_it(make_run):
    text = printed(print_summary, make_run("run"))
    assert [line.split()[-2] for line in text.splitlines() if "F1" in line] == ["0.625"]
    assert not any(word in text for word in ("epsilon", "noised", "left", "warning"))


NO_BETTER = [
    (0.75, 0.4, ""),
    (
        0.95,
        0.4,
        "No: the network has accuracy 90.0 % on 100 test records of the server and is no "
        "better than the pooled linear model with 95.0 %",
    ),
    (0.9, 0.91, "is no better than its linear skip alone with 91.0 %"),
]


@pytest.mark.parametrize(("linear", "without_cells", "sentence"), NO_BETTER)
def test_a_run_says_what_its_network_is_no_better_than(make_run, linear, without_cells, sentence):
    def scored(event):
        if event["event"] == "evaluated":
            event["linear"]["accuracy"] = linear
            event["central"]["without_cells"] = without_cells

    folder = with_events(make_run("run"), scored)
    text = printed(print_summary, folder)
    assert ("no better than" in text) == bool(sentence)
    assert sentence in text
    assert sentence in write_report(folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("evil", EVIL)
def test_strangers_words_only_print_themselves(make_run, capsys, evil):
    """No word moves the cursor, sets a colour or a title, begins a line, or is markup of rich."""
    folder = make_hostile(make_run("run"), evil)
    group = folder / "baselines" / "random_[red]\x1b[31m"
    group.mkdir(parents=True)
    (group / "events.jsonl").write_bytes((folder / "events.jsonl").read_bytes())
    other = make_hostile(make_run("other", seed=2), evil + "2")
    text = _show(read_events(folder / "events.jsonl"), width=4000)
    starts = [
        line.startswith(("client", "warning", "data", "the run")) for line in text.splitlines()
    ]
    assert sum(starts) >= 5
    text += printed(print_summary, folder, width=4000)
    text += printed(print_comparison, compare_runs([folder, other]), width=4000)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "[/red]" in text or "[red]" not in evil
    assert "random_[red]" in text


def test_an_error_that_ends_a_command_is_one_line(capsys):
    fail(RuntimeError("client 2: \x1b]0;title\x07\r\nfednas: all is well\u202e"), debug=False)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err[:-1].isprintable()
