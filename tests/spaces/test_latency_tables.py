"""Latency tables: what is measured once, what a file keeps, what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from fednas_flwr.spaces import latency_tables
from fednas_flwr.spaces.latency_tables import MeasuredLayer, from_json, summarise, to_json
from fednas_flwr.spaces.mbconv import Layer

from ..refusals import refuses

SMALL = Layer("conv", (2, 4, 4), (2, 4, 4), 1, 1, 1)
LARGE = Layer("conv", (64, 32, 32), (64, 32, 32), 1, 7, 1)
MEASURED = {"machine": "a machine", "device": "cpu", "clock": "process_time", "threads": 1}
MEASURED |= {"batch_size": 2, "norm": "batch", "torch": "2.11"}
LAYERS = [MeasuredLayer(*SMALL, 0.25, 0.125), MeasuredLayer(*LARGE, 7.5, 0.0)]
TABLE = latency_tables.LatencyTable(**MEASURED, layers=LAYERS)


def test_duplicates_are_measured_once_and_every_layer_apart_from_the_others(monkeypatch):
    """By a clock that goes on by the size of the kernel in every forward."""
    made, now = [], [0.0]

    def timer():
        return now[0]

    class Slow(torch.nn.Identity):
        def forward(self, x):
            now[0] += made[self.number].kernel
            return x

    def remember(layer):
        made.append(layer)
        module = Slow()
        module.number = len(made) - 1
        return module

    under = latency_tables.Conditions(torch.device("cpu"), threads=2, batch_size=4, passes=5)
    assert latency_tables._clock(under).__name__ == "timer"  # two threads: wall time
    assert latency_tables._clock(replace(under, threads=1)).__name__ == "process_time"
    monkeypatch.setattr(latency_tables, "_clock", lambda *_: timer)
    threads = torch.get_num_threads()
    layers, networks = [SMALL, LARGE, SMALL, LARGE, SMALL], [(torch.nn.Flatten(), (2, 3))]
    given = {"norm": "group", "networks": networks}
    table, timings = latency_tables.measure_latency(layers, remember, under, **given)
    assert len(timings) == 1
    assert made == [SMALL, LARGE] == list(table.timings)
    assert torch.get_num_threads() == threads
    assert (table.threads, table.batch_size, table.norm, table.clock) == (2, 4, "group", "timer")
    assert (table.latency_ms(LARGE), table.latency_ms(SMALL)) == (7000.0, 1000.0)


def test_median_and_spread_are_those_of_the_quartiles():
    assert summarise([5.0, 1.0, 100.0, 2.0, 3.0]) == latency_tables.Timing(3.0, 5.0 - 2.0)


def test_a_table_survives_its_file_and_lists_a_layer_per_line():
    text = to_json(TABLE)
    assert from_json(text) == TABLE
    assert sum('"op"' in line for line in text.splitlines()) == 2
    assert from_json(text).latency_ms(("conv", (2, 4, 4), (2, 4, 4), 1, 1, 1)) == 0.25


def test_a_missing_layer_is_named():
    words = r"a machine lacks the layer op conv.*kernel 5.*measure"
    refuses(words, TABLE.latency_ms, SMALL._replace(kernel=5))


def changed(**fields):
    return json.dumps(json.loads(to_json(TABLE)) | fields)


def changed_layer(**fields):
    document = json.loads(to_json(TABLE))
    document["layers"][0] |= fields
    return json.dumps(document)


NO_TABLES = [
    ("{", "table.json is not valid JSON"),
    ("[]", "format must be 'fednas-latency'"),
    (changed(format="other"), "format must be"),
    (changed(version=2), "version must be 1, got 2: measure anew"),
    (changed(layers=[{}]), "layers.0..op is missing"),
    (changed(layers=json.loads(to_json(TABLE))["layers"] * 2), "a layer appears twice"),
    (changed_layer(median_ms=0), "median_ms=0.0 is out of range: expected above 0, at most 1"),
    (changed(machine="x" * 201), "table.json.machine=x.* is out of range"),
    (changed_layer(kernel=-1), "kernel=-1 is out of range"),
    (changed_layer(input_shape=3), "input_shape=3 has the wrong type"),
]


@pytest.mark.parametrize(("text", "message"), NO_TABLES)
def test_what_is_no_table_is_refused(text, message):
    refuses(message, from_json, text, origin="table.json")
