"""Latency tables that a run's clients measure: asked once, checked, kept, compared."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.pipeline.later_settings import cost_of
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.spaces.costs import space_costs
from fednas_flwr.spaces.latency_tables import from_json, machine_name, median_table, to_json

from ..refusals import refuses
from .test_hostile_properties import variants

COST = "{table: null, unit: ms, target: %s, loss: additive, scale: 1.0, exponent: 1.0}"
FDNAS = ["algorithm=fdnas", "search_space=mbconv_small", "retrain=mbconv", "clients=3"]
FDNAS += ["search_space.width=0.25", "algorithm.batch_size=16", "algorithm.local_epochs=1"]
FDNAS += ["algorithm.warm_up_rounds=0", "rounds=1", "stages=[search]"]


@pytest.fixture(scope="module")
def run(run_inline):
    """``run(target, ...)``: a search inline; its folder, events and error."""

    def ran(target, *overrides, **how):
        return run_inline(*FDNAS, f"algorithm.hardware={COST % target}", *overrides, **how)

    return ran


@pytest.fixture(scope="module")
def refused(run):
    """A run whose clients have measured, and whose target no network reaches."""
    return run(1e6, fails=True)


@pytest.fixture(scope="module")
def reachable(refused):
    """The middle of the range that the refusal tells."""
    assert isinstance(refused.error, ConfigError)
    assert not refused.named("round")
    found = re.search(r"cannot be reached: .* cost ([\d.]+) to ([\d.]+) ms", str(refused.error))
    return sum(map(float, found.groups())) / 2


@pytest.fixture(scope="module")
def whole(run, refused, reachable):
    """A run whose clients answer with that table: another one could have another range."""
    text = (refused.folder / "latency.json").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ANSWERS, "query.latency", lambda *_: Reply(1, properties={"latency": text}))
        return run(reachable)


def test_a_target_in_ms_is_held_against_tables_of_the_clients(whole, reachable):
    table = from_json((whole.folder / "latency.json").read_text())
    assert (table.machine, table.batch_size) == (machine_name(torch.device("cpu")), 1)
    cost = read_run(whole.folder).last("derived")["cost"]  # a resumed run has measured again
    assert (cost["unit"], cost["target"], cost["machine"]) == ("ms", reachable, table.machine)
    assert cost["predicted"] > 0 < cost["measured"]
    for file in ("report.html", "MODEL_CARD.md"):
        assert f"measured {cost['measured']:.3g} ms on" in (whole.folder / file).read_text()


def test_a_resumed_run_does_not_ask_again(whole, run, monkeypatch):
    before = (whole.folder / "latency.json").read_text()
    monkeypatch.delitem(ANSWERS, "query.latency")
    run(None, resume=whole.folder)
    assert (whole.folder / "latency.json").read_text() == before


def test_a_hostile_table_is_dropped_and_counts_for_the_quorum(whole, run, reachable, monkeypatch):
    text = (whole.folder / "latency.json").read_text()

    def answers(client, request, asked):
        wrong = client.index == 1
        return Reply(1, properties={"latency": text.replace("0.", "-0.") if wrong else text})

    monkeypatch.setitem(ANSWERS, "query.latency", answers)
    found = run(reachable, "runtime.quorum=0.6")
    assert (found.folder / "latency.json").read_text() == text
    failed = found.the("client_failed")
    assert (failed["client"], failed["action"]) == (1, "query.latency")
    assert "says latency=" in failed["reason"]
    assert len(failed["reason"]) < 200
    alone = run(reachable, "runtime.quorum=1.0", fails=True)
    assert str(alone.error).startswith("client 1: says latency=")
    assert "(query.latency: 2 of 3 clients answered, 3 are needed)" in str(alone.error)
    assert not alone.named("round")


def test_medians_are_by_layer_over_the_layers_that_all_have(whole):
    table = from_json((whole.folder / "latency.json").read_text())
    first, *others = table.timings

    def scaled(factor, name, without=()):
        layers = [
            replace(layer, median_ms=factor * layer.median_ms)
            for layer, key in zip(table.layers, table.timings, strict=True)
            if key not in without
        ]
        return replace(table, machine=name, layers=layers)

    merged = median_table([scaled(1, "a"), scaled(9, "b", [first]), scaled(2, "a")])
    assert list(merged.timings) == others
    assert merged.machine == "a, b"
    for key in others:
        assert merged.latency_ms(key) == 2 * table.latency_ms(key)


def test_whatever_passes_as_a_table_leaves_a_median_that_computes(whole):
    """One of three says it, in place of each field of the table and of a layer."""
    text = (whole.folder / "latency.json").read_text()
    document, honest = json.loads(text), from_json(text)
    space = supernet_space(whole.config, make_data(whole.config)[0])
    first, *others = document["layers"]
    tables = [{**document, "layers": [own, *others]} for own in variants(first)]
    tables += list(variants({key: value for key, value in document.items() if key != "layers"}))
    passed = 0
    for said in tables:
        whole_said = {"layers": document["layers"], **said} if isinstance(said, dict) else said
        try:
            table = from_json(json.dumps(whole_said))
            space_costs(space, table)
        except ConfigError:
            continue
        passed += 1
        median = median_table([table, honest, honest])
        assert from_json(to_json(median)).timings == honest.timings
        assert median.threads == honest.threads
        for two in ([table, honest], [honest, table]):  # of whom nobody can tell who is right
            assert math.isfinite(space_costs(space, from_json(to_json(median_table(two)))).highest)
    assert passed > 10


def test_without_a_target_there_is_no_cost_and_no_question(compose_config, whole):
    assert cost_of(compose_config(*FDNAS), None, None) is None
    wrong = COST.replace("null", "x").replace("ms", "multiply_adds")
    refuses("a table is for ms only", compose_config, *FDNAS, f"algorithm.hardware={wrong % 1}")
