"""How decided the edges of made cells are, by hand, and what a report says of it."""

import re
import statistics

import pytest

from fednas_flwr.report import cell_pictures
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.templates import sentence
from fednas_flwr.report.terminal import print_summary
from fednas_flwr.runs.events import EventLog
from fednas_flwr.runs.numbers import read_run

from .conftest import cell_of, printed

OPS = ["none", "skip", "conv"]
PAIRS = [(0, 1), (0, 2), (1, 2)]


def snapshot(number, rows, ops=("conv", "conv", "none")):
    told = {"round": number, "ops": OPS, "alphas": {"cell": rows}}
    return told | {"cells": {"cell": cell_of(PAIRS, ops)}}


def test_leads_and_spreads_by_hand():
    """Of 7 rounds the last 5 count; an edge leads, one jumps, one hardly moves."""
    jumps = [9.0, 9.0, 0.3, -0.3, 0.3, -0.3, 0.2]
    snapshots = [
        snapshot(n, [[0.0, 0.1, 1.0 + 0.01 * n], [0.0, 0.0, jump], [0.003, 0.0, -5.0]])
        for n, jump in enumerate(jumps)
    ]
    grows, jumping, still = cell_pictures.derived_edges(snapshots)
    assert (grows.op, grows.next_op, grows.label) == ("conv", "skip", "input → 1")
    spreads = (0.01 * statistics.stdev(range(5)), statistics.stdev(jumps[-5:]))
    assert (grows.lead, grows.spread) == pytest.approx((0.96, spreads[0]))
    assert jumping.next_op == "none"  # the first of equals
    assert (jumping.lead, jumping.spread) == pytest.approx((0.2, spreads[1]))
    assert (still.op, still.next_op, still.spread) == ("none", "skip", 0.0)
    # .003 is no lead, however still it stands
    assert [e.is_decided for e in (grows, jumping, still)] == [True, False, False]
    assert sentence("decided", [grows, jumping, still], cell_pictures).startswith(
        "Decided: 1 of 3 edges."
    )
    assert "2 of 3 edges open" in sentence("undecided", [grows, jumping, still])
    assert "1 of 3 edges open" in sentence("undecided", [grows, grows, still])
    assert sentence("undecided", [grows, grows]) == ""


def test_an_op_that_was_taken_in_place_of_the_largest_is_behind():
    """As where the largest alphas made a degenerate cell."""
    rows = [[0.0, 2.0, 1.0]] * 3
    edge = cell_pictures.derived_edges(
        [snapshot(n, rows, ops=("conv", "skip", "skip")) for n in (1, 2)]
    )[0]
    assert (edge.op, edge.next_op, edge.lead) == ("conv", "skip", -1.0)
    assert not edge.is_decided


def test_a_cell_that_keeps_some_edges_has_no_none_to_compare_with():
    """DARTS: 5 candidate edges of two nodes, of which 4 stay, named by their nodes."""
    kept = {"normal": cell_of([(0, 2), (1, 2), (0, 3), (2, 3)], ["conv"] * 4)}
    event = {"ops": OPS, "cells": kept}
    event |= {"alphas": {"normal": [[9.0, 0.1 * row, 1.0] for row in range(5)]}}
    found = cell_pictures.derived_edges([event | {"round": n} for n in (1, 2)])
    assert [edge.label for edge in found] == ["c(k−2) → 0", "c(k−1) → 0", "c(k−2) → 1", "0 → 1"]
    assert [edge.next_op for edge in found] == ["skip"] * 4
    assert [edge.lead for edge in found] == pytest.approx([1.0, 0.9, 0.8, 0.6])


def test_one_snapshot_decides_nothing_since_it_has_no_spread():
    found = cell_pictures.derived_edges([snapshot(1, [[0.0, 1.0, 2.0]] * 3)])
    assert cell_pictures.decided_text(found) == "0 of 3"
    assert "3 of 3 edges open" in sentence("undecided", found)
    assert [(edge.spread, edge.is_decided) for edge in found] == [(None, False)] * 3


def test_there_is_nothing_to_say_without_snapshots():
    assert cell_pictures.derived_edges([]) == []
    assert cell_pictures.decided_text([]) == "–"
    assert sentence("decided", [], cell_pictures) == sentence("undecided", []) == ""


@pytest.mark.parametrize(("lead", "warns"), [(0.5, False), (0.001, True)])
def test_the_report_warns_of_a_cell_that_is_hardly_decided(lead, warns, tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        for number in (1, 2, 3):
            log.emit("alphas", **snapshot(number, [[0.0, 0.0, lead]] * 2 + [[lead, 0.0, 0.0]]))
    page = write_report(tmp_path).read_text()
    assert f"Decided: {0 if warns else 3} of 3 edges" in page
    assert ("The search has left 3 of 3 edges open" in page) == warns
    shown = printed(print_summary, tmp_path)
    assert re.search(rf"edges decided +│ +{0 if warns else 3} of 3", shown)


def test_a_real_searchs_alphas_can_be_judged(finished_run):
    """Cells of both kinds; what is derived leads, since nothing degenerate was replaced."""
    space = ["search_space=darts_small", "search_space.channels=4", "retrain.num_cells=3"]
    run = read_run(finished_run("algorithm=fed_darts", "stages=[search]", *space).folder)
    found = cell_pictures.derived_edges(run.alphas())
    assert [edge.kind for edge in found] == ["normal"] * 8 + ["reduction"] * 8
    assert all(edge.lead > 0 for edge in found)
    assert not any("none" in (edge.op, edge.next_op) for edge in found)
    assert len({(edge.kind, edge.label) for edge in found}) == 16
