"""Progress of a run on the terminal, and the short table at its end.

`ProgressDisplay` is a listener of an `EventLog`: bars that move on a terminal, plain lines in a
file or a pipe. `print_summary` prints the final table from the run folder.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from fednas_flwr.base.foreign import terminal
from fednas_flwr.report.score_tables import STAGES, TEST_SEED, leaderboard_table, reached, scores
from fednas_flwr.report.templates import DASH, count, duration, paragraphs, percent, score, sentence
from fednas_flwr.runs.events import Event, names_by_client, with_names
from fednas_flwr.runs.numbers import Run, read_run
from fednas_flwr.settings.names import CLIENT

RECENT_ROUNDS = 10
MANY_ROUNDS = 100
SECONDS_BETWEEN_LINES = 5.0
STYLES = {  # styles of events that a macro of page/sentences.j2 shows
    **dict.fromkeys(("group_stage", "data", "partition", "client_back", "told"), ""),
    **dict.fromkeys(("personalised", "handed_over"), ""),
    **dict.fromkeys(("client_left", "approval_awaited", "warning"), "yellow"),
    **dict.fromkeys(("client_failed", "run_finished"), "red"),
}
PIPE_WIDTH = 200  # characters in a line that goes to a file or a pipe


def table_console() -> Console:
    """Return a console on standard output, as wide as its terminal, or wide for file and pipe."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, markup=False)


def print_table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: bool = False,
    sum_rows: int = 0,
    console: Console | None = None,
) -> None:
    """Print a table whose cells are plain text, without markup.

    Args:
        title: Title above the table.
        head: Titles of the columns.
        rows: Cells by row.
        numbers: True if all columns but the first are numbers.
        sum_rows: Number of last rows that a line separates from the others.
        console: Console to print to; standard output by default.
    """
    table = Table(title=title, show_header=any(head))
    names, *lines = [[*map(terminal, row)] for row in (head, *rows)]
    for place, (name, width) in enumerate(zip(names, _widths(names, lines), strict=True)):
        is_number = numbers and place > 0
        justify: JustifyMethod = "right" if is_number else "left"
        most = width if is_number else None
        table.add_column(Text(name), justify=justify, overflow="fold", max_width=most)
    for place, row in enumerate(lines, 1):
        table.add_row(*map(Text, row), end_section=place == len(lines) - sum_rows)
    (console or table_console()).print(table)


def _widths(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[int]:
    """Return the width of each column with which no cell and no word of its head is broken."""
    columns = zip(head, *rows, strict=True)
    return [max(map(cell_len, (*name.split(), *cells, ""))) for name, *cells in columns]


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print text as one line without markup, since a client's message may hold brackets."""
    console.print(Text(terminal(line), style=style), soft_wrap=True, highlight=False)


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Display of stage, round, loss, accuracy and time left; a listener for `EventLog`.

    On a terminal every stage has a moving bar. Elsewhere every round is one line; in a stage of
    more than 100 rounds, one line about every 5 s, and always the last. Both print warnings,
    failures of clients, clients that leave and the guarantee of a private run; a failure that
    repeats (same client, action, reason) is printed only once.

    Use it as a context manager, so that the terminal is restored in any case.

    Args:
        console: Console to print to; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Show nothing yet; the display begins with the first stage."""
        self._console = console or Console()
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[position]}"),
            TextColumn("{task.fields[metrics]}", style="cyan"),
            _TimeLeft(),
            console=self._console,
            refresh_per_second=5,
            disable=not self._console.is_terminal,
        )
        self._seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._last_line = -math.inf
        self._failures: set[tuple[object, ...]] = set()
        self._is_private = False
        self._names: dict[int, str] = {}

    def __call__(self, event: Event) -> None:
        """Show one event by the method ``_on_<kind>``; others need not be seen by a person."""
        kind = event["event"]
        self._names = self._names or names_by_client(event)
        event = with_names(event, self._names)
        getattr(self, f"_on_{kind}", lambda _: None)(event)
        failure = (event.get("client"), event.get("action"), event.get("reason"))
        if kind in STYLES and not (kind == "client_failed" and failure in self._failures):
            for line in paragraphs(f"on_{kind}", event):
                self._say(line, style=STYLES[kind])
        if kind == "client_failed":
            self._failures.add(failure)

    def __exit__(self, *_: object) -> None:
        """Restore the terminal; the last state of the bars stays on it."""
        self._bars.stop()

    def _say(self, line: str, style: str = "") -> None:
        print_line(self._console, line, style)

    def _on_run_finished(self, event: Event) -> None:
        self._bars.stop()

    def _on_privacy(self, event: Event) -> None:
        self._is_private = True
        self._say(f"privacy: (epsilon, delta) at most {sentence('overall_text', event)}")
        for line in paragraphs("coverage", event):
            self._say(line, style="yellow" if "leaves" in line else "")
        if warning := sentence("test_seed", event):
            self._say(f"warning: {warning}", style="red")

    def _on_stage_started(self, event: Event) -> None:
        self._seconds.clear()
        self._last_line = -math.inf
        if self._bars.disable:
            self._say(sentence("stage_started", event))
        self._bars.start()
        empty: dict[str, Any] = {"position": "", "metrics": "", "ends_at": None}
        self._bars.add_task(event["stage"], total=event["rounds"], **empty)

    def _on_round(self, event: Event) -> None:
        self._seconds.append(event["seconds"])
        number, rounds = event["round"], event["rounds"]
        left = (rounds - number) * sum(self._seconds) / len(self._seconds)
        position = f"{number}/{rounds}"
        metrics = "  ".join(paragraphs("measured", event["metrics"], self._is_private))
        shown: dict[str, Any] = {"position": position, "metrics": metrics}
        for bar in self._bars.tasks[-1:]:
            self._bars.update(bar.id, completed=number, ends_at=time.monotonic() + left, **shown)
        waited = event["elapsed"] - self._last_line >= SECONDS_BETWEEN_LINES
        if self._bars.disable and (rounds <= MANY_ROUNDS or waited or number == rounds):
            self._last_line = event["elapsed"]
            parts = [f"{event['stage']} {position}", metrics, f"{event['seconds']:.2f} s"]
            parts += [f"{duration(left)} left"] if number < rounds else []
            self._say("  ".join(part for part in parts if part))

    def _on_beside(self, event: Event) -> None:
        """Show the progress of the networks that are trained beside the run's own."""
        left, text = event["left"], event.get("text")
        ends_at = None if left is None else time.monotonic() + left
        for bar in self._bars.tasks[-1:]:
            shown: dict[str, Any] = {"position": event["position"]} if text else {}
            self._bars.update(bar.id, total=1, completed=event["share"], ends_at=ends_at, **shown)
        if text:
            ends = f"  {duration(left)} left" if left else ""
            self._say(f"{event['stage']} {event['position']}  {text}{ends}")

    def _on_stage_finished(self, event: Event) -> None:
        used = duration(event["seconds"])
        if self._bars.disable:
            self._say(f"{event['stage']}: finished in {used}")
        for bar in self._bars.tasks[-1:]:
            total, position = bar.total or 1, bar.fields["position"] or used
            whole: dict[str, Any] = {"total": total, "completed": total}
            self._bars.update(bar.id, position=position, ends_at=None, **whole)


def print_summary(run_folder: Path, console: Console | None = None) -> None:
    """Print the short table at the end of a run, and the path of its report if there is one.

    Args:
        run_folder: A run folder with at least events.jsonl.
        console: Console to print to; standard output by default.
    """
    console = console or table_console()
    run = read_run(run_folder)
    stages = run.stage_seconds()
    quality = [*scores(run), *group_accuracies(run)]
    rows = [
        *quality,
        *reached(run, ["num_parameters", "multiply_adds"]),
        *((f"time of {name}", duration(stages[name])) for name in stages if name in STAGES),
        ("client failures", count(len(run.failures()))),
        ("clients that left", count(len(run.departures()) or None)),
    ]
    if event := run.privacy:
        sampling = "none" if sentence("unit", event) == CLIENT else "Poisson"
        rows += [
            ("(epsilon, delta)", sentence("overall_text", event)),
            ("accountant, sampling", f"PRV, {sampling}"),
            ("warning", TEST_SEED if sentence("test_seed", event) else DASH),
        ]
    rows = [row for row in rows if row[1] != DASH]
    rest = len(rows) - len(quality)
    print_table(f"run {run.status}", ["", ""], rows, numbers=True, sum_rows=rest, console=console)
    if board := leaderboard_table(run):
        title, head, lines = board
        ends = accumulate(width + len("│  ") for width in _widths(head, lines))
        fits = max(2, sum(end < console.width for end in ends))
        shown = [line[:fits] for line in lines]
        print_table(title, head[:fits], shown, numbers=True, console=console)
        if left_out := ", ".join(name or "why some are left out" for name in head[fits:]):
            print_line(console, f"In the report, as this terminal is narrow: {left_out}.", "dim")
    named = names_by_client(run.last("partition"))
    for text in ("verdict", "attention", "left_out", *(["clients_differ"] if named else [])):
        if said := sentence(text, run):
            print_line(console, said)
    if run.reason:
        print_line(console, run.reason, "red")
    report = run_folder / "report.html"
    if report.exists():
        print_line(console, f"report: {report}")


class _TimeLeft(ProgressColumn):
    """Column that counts down between rounds, so that a long round does not look stuck."""

    def render(self, task: Task) -> Text:
        ends_at = task.fields["ends_at"]
        if ends_at is None or task.finished:
            return Text("")
        return Text(f"{duration(max(0.0, ends_at - time.monotonic()))} left", style="dim")


def group_accuracies(run: Run) -> list[tuple[str, str]]:
    """Return each group's test accuracy, or its failure; for predicted numbers, R squared.

    It is that of the group's clients if the server does not test.
    """
    rows, text = [], score if run.is_regression else percent
    names = ("central_r2",) if run.is_regression else ("central_accuracy", "client_accuracy")
    for name, event in run.groups().items():
        found = (event["results"][metric] for metric in names)
        value = next((value for value in found if value is not None), None)
        rows.append((f"group {name}", text(value) if event["reason"] is None else "failed"))
    return rows
