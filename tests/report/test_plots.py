import math
from pathlib import Path

import plotly.graph_objects as go
import pytest

from fednas_flwr.base.shares import wilson
from fednas_flwr.report import plots
from fednas_flwr.report.templates import percent
from fednas_flwr.runs.numbers import Run

from .conftest import cell_of


def _valid(figure):
    """Plotly's own check of every property."""
    assert figure is not None
    return go.Figure(figure)


def test_curves_draw_what_was_measured_with_a_gap_where_it_was_not():
    series = {"train": [1.0, 0.5, 1 / 3], "validation": [0.5, None, 0.5], "late": [None, None, 1]}
    figure = _valid(plots.curves([1, 2, 3], series, "loss"))
    assert [trace.name for trace in figure.data] == ["train", "validation"]
    assert list(figure.data[0].y) == [1.0, 0.5, pytest.approx(1 / 3, rel=1e-4)]
    assert list(figure.data[1].y) == [0.5, None, 0.5]
    assert plots.curves([1, 2, 3], {"share": [None] * 3}, "share") is None
    assert plots.curves([1], {"train": [1.0]}, "loss") is None  # one dot is no curve


def test_the_partition_has_a_row_per_class_and_a_column_per_client():
    counts = [[1, 2], [3, 0], [5, 6]]
    event = {"class_names": ["a" * 30, "a" * 30], "counts": counts, "clients": [0, 1, 2]}
    figure = _valid(plots.partition(event))
    heat = figure.data[0]
    assert [list(row) for row in heat.z] == [[1, 3, 5], [2, 0, 6]]
    assert [list(row) for row in heat.text] == [["1", "3", "5"], ["2", "", "6"]]
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 6)
    assert len(set(heat.y)) == 2  # equal names would fall on one row
    for no_picture in ({"counts": None}, {"class_names": ["days"]}):  # privacy; a number to predict
        assert plots.partition(event | no_picture) is None


def test_a_large_partition_keeps_a_bounded_height():
    event = {"class_names": [f"class {i}" for i in range(100)], "clients": list(range(100))}
    assert 400 < _valid(plots.partition(event | {"counts": [[1] * 100] * 100})).layout.height < 1000


def _accuracies(evaluated, *, private=False):
    config = {"privacy": {"name": "dp" if private else "none"}}
    return plots.client_accuracy(Run(Path(), config, [{"event": "evaluated", **evaluated}]))


def test_client_accuracy_has_bars_mean_and_the_server():
    clients = [{"client": c, "accuracy": a, "num_examples": 7} for c, a in enumerate([0.5, 0.7])]
    clients.append({"client": 2, "accuracy": None, "num_examples": 0})
    (bars,) = _valid(_accuracies({"clients": clients, "central": {"accuracy": 0.65}})).data
    assert bars.y == ("client 0", "client 1", "mean of the clients", "server's test set")
    assert list(bars.x) == pytest.approx([0.5, 0.7, 0.6, 0.65])
    low, high = wilson(0.5, 7)
    assert (bars.error_x.arrayminus[0], bars.error_x.array[0]) == (0.5 - low, high - 0.5)
    assert bars.customdata[0] == f"{percent(low)} to {percent(high)}"
    assert _accuracies({"clients": []}) is None
    assert _accuracies({"clients": clients[:1]}) is None  # one bar compares nothing


EDGES = [(14, "c(k−2) → 0", "2 → 3"), (6, "input → 1", "2 → output"), (4, "edge 0", "edge 3")]


@pytest.mark.parametrize(("edges", "first", "last"), EDGES)
def test_edges_are_named_by_target_then_source(edges, first, last):
    labels = plots.edge_labels(edges)
    assert (len(labels), labels[0], labels[-1]) == (edges, first, last)


def test_alphas_are_shares_of_the_last_round():
    edges = {"cell": cell_of([(0, 1), (0, 2), (1, 2)], ["skip"] * 3)}
    event = {"event": "alphas", "ops": ["none", "skip"], "cells": edges}
    alphas = {n: {"cell": [[0.0, 0.01 * n]] * 3} for n in (1, 500)}
    events = [event | {"round": n, "alphas": rows} for n, rows in alphas.items()]
    figure = _valid(plots.alphas(Run(Path(), {}, events))["cell"])
    assert figure.data[0].z[0][1] == pytest.approx(math.exp(5) / (1 + math.exp(5)), abs=1e-3)
    assert figure.data[1].x == ("skip",) * 3
    assert figure.data[1].y == ("input → 1", "input → output", "1 → output")
    assert plots.alphas(Run(Path(), {}, [])) == {}


def test_noised_accuracies_stay_inside_the_picture():
    clients = [{"client": 0, "accuracy": -0.1}, {"client": 1, "accuracy": 1.2, "num_examples": 7}]
    figure = _valid(_accuracies({"clients": [*clients, {"client": 2}]}, private=True))
    assert list(figure.layout.xaxis.range) == [-0.1, 1.2]
    assert not any(figure.data[0].error_x.array)  # of noised counts no interval is known
    close = [{"client": c, "accuracy": a} for c, a in enumerate((0.93, 0.96))]
    for central, start in ((None, 0.8), ({"accuracy": 0.47}, 0.4), ({"accuracy": 0.04}, 0)):
        shown = _valid(_accuracies({"clients": close, "central": central}, private=True))
        assert list(shown.layout.xaxis.range) == pytest.approx([start, 1])
    assert _accuracies({"clients": [{"client": 2}]}) is None
