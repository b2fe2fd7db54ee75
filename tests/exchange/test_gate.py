"""Whatever one client sends, the aggregate is bit-equal to the one without that client."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error

from fednas_flwr.strategies.base import average_replies

BAD = 1


def edit_json(**changes):
    def damage(content):
        record = content.config_records["header"]
        text = json.loads(record["json"])
        for key, value in changes.items():
            group, _, name = key.partition("__")
            if name:
                text[group][name] = value
            else:
                text[group] = value
        record["json"] = json.dumps(text)
        return content

    return damage


def set_json(value):
    def damage(content):
        content.config_records["header"]["json"] = value
        return content

    return damage


def without(name):
    def damage(content):
        del content[name]
        return content

    return damage


def set_metric(name, value):
    def damage(content):
        content.metric_records["metrics"][name] = value
        return content

    return damage


def set_vector(state, values, dtype="float32"):
    def damage(content):
        content.array_records[f"state.{state}"][dtype] = Array(np.asarray(values))
        return content

    return damage


def poison(state, index, value):
    def damage(content):
        vector = content.array_records[f"state.{state}"]["float32"].numpy().copy()
        vector[index] = value
        content.array_records[f"state.{state}"]["float32"] = Array(vector)
        return content

    return damage


def set_data(edit, stype="numpy.ndarray"):
    def damage(content):
        record = content.array_records["state.weights"]
        array = record["float32"]
        record["float32"] = Array("float32", (10,), stype, edit(array.data))
        return content

    return damage


def npy(header: str) -> bytes:
    body = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def add_state(name, values):
    def damage(content):
        content[name] = ArrayRecord({"float32": Array(values)})
        return content

    return damage


def no_dtype(content):
    content["state.weights"] = ArrayRecord({})
    return content


def refuse(_):
    raise RuntimeError("out of memory")


DAMAGES = {
    # header
    "run": (edit_json(header__run="other"), "another request"),
    "stage": (edit_json(header__stage="retrain"), "another request"),
    "round": (edit_json(header__round=2), "another request"),
    "phase": (edit_json(header__phase=2), "another request"),
    "client": (edit_json(header__client=0), "another request"),
    "nonce": (edit_json(header__nonce="0" * 16), "another request"),
    "header with a field more": (edit_json(header__extra=1), "malformed"),
    "header of another type": (edit_json(header=[]), "malformed"),
    "no header": (without("header"), "malformed"),
    "torn JSON": (set_json('{"header": '), "malformed"),
    "JSON of another type": (set_json("[1, 2]"), "malformed"),
    "no text": (set_json(7), "malformed"),
    "deep JSON": (set_json("[" * 200_000), "malformed"),
    "digests of another type": (edit_json(digests=3), "malformed"),
    # num-examples
    "no metrics": (without("metrics"), "malformed"),
    "num-examples NaN": (set_metric("num-examples", float("nan")), "num-examples"),
    "num-examples inf": (set_metric("num-examples", float("inf")), "num-examples"),
    "num-examples 0": (set_metric("num-examples", 0.0), "num-examples"),
    "num-examples negative": (set_metric("num-examples", -5.0), "num-examples"),
    "num-examples tiny": (set_metric("num-examples", 1e-300), "num-examples"),
    "num-examples above what it has": (set_metric("num-examples", 101.0), "num-examples"),
    "num-examples a list": (set_metric("num-examples", [1.0]), "malformed"),
    "num-examples a huge integer": (set_metric("num-examples", 10**400), "malformed"),
    # states
    "missing state": (without("state.alphas"), "were asked for"),
    "further state": (add_state("state.buffers", np.zeros(1, np.float32)), "were asked for"),
    "other names or shapes": (edit_json(digests__weights="0" * 16), "other names, shapes"),
    "no digest": (edit_json(digests={}), "other names, shapes"),
    "one element more": (set_vector("weights", np.zeros(11, np.float32)), "sizes"),
    "one element less": (set_vector("alphas", np.zeros(3, np.float32)), "sizes"),
    "no vector": (no_dtype, "sizes"),
    "a vector more": (set_vector("weights", np.zeros(10), "float64"), "sizes"),
    "doubles named float32": (set_vector("weights", np.zeros(10)), "malformed"),
    "matrix": (set_vector("weights", np.zeros((2, 5), np.float32)), "malformed"),
    "big-endian": (set_vector("weights", np.zeros(10, ">f4")), "malformed"),
    # bytes
    "torn vector": (set_data(lambda data: data[:-4]), "malformed"),
    "torn within an element": (set_data(lambda data: data[:-3]), "malformed"),
    "longer vector": (set_data(lambda data: data + b"\0\0\0\0"), "malformed"),
    "no bytes": (set_data(lambda data: b""), "malformed"),
    "no npy": (set_data(lambda data: b"\x80\x04K\x01." * 40), "malformed"),
    "npy of another version": (set_data(lambda data: data[:6] + b"\x07" + data[7:]), "malformed"),
    "objects": (
        set_data(lambda _: npy("{'descr': '|O', 'fortran_order': False, 'shape': (10,), }")),
        "malformed",
    ),
    "npy header that is no literal": (set_data(lambda _: npy("(" * 9000)), "malformed"),
    "deep npy header": (set_data(lambda _: npy("-" * 9000 + "1")), "malformed"),
    "another serialisation": (set_data(lambda data: data, stype="torch.tensor"), "malformed"),
    # numbers
    "NaN in the first weight": (poison("weights", 0, np.nan), "weights is not finite"),
    "inf in the last weight": (poison("weights", -1, np.inf), "weights is not finite"),
    "-inf": (poison("weights", 4, -np.inf), "weights is not finite"),
    "inf - inf": (poison("weights", slice(0, 2), [np.inf, -np.inf]), "weights is not finite"),
    "finite, but an average would overflow": (poison("weights", 3, 3e38), "weights is not finite"),
    "NaN in an alpha": (poison("alphas", 2, np.nan), "alphas is not finite"),
    # errors
    "raises": (refuse, "RuntimeError: out of memory"),
    "error with a reason": (lambda _: Error(2, "policy: budget spent"), "policy: budget spent"),
    "error without one": (lambda _: Error(7), "Flower error code 7"),
}


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_a_bad_reply_leaves_no_trace(name, federation):
    damage, reason = DAMAGES[name]
    bad, absent = (federation(damage={BAD: d}) for d in (damage, refuse))
    results = []
    for setting in (bad, absent):
        setting.courier.connect(setting.grid)
        replies = list(setting.ask())
        assert [client for client, _ in replies] == [0, 2]
        results.append(average_replies(iter(replies)))
    (states, metrics), (expected_states, expected_metrics) = results
    assert metrics == expected_metrics
    for state, packed in expected_states.items():
        assert torch.equal(states[state]["float32"], packed["float32"])
    (event,) = bad.events
    assert event.pop("reason").find(reason) >= 0, bad.events
    assert event == {
        "event": "client_failed",
        "stage": "search",
        "round": 1,
        "verb": "train.search",
        "client": BAD,
    }


def test_what_the_tests_above_damage_is_accepted_when_whole(federation):
    whole = federation()
    whole.courier.connect(whole.grid)
    replies = dict(whole.ask())
    assert list(replies) == [0, 1, 2]
    assert whole.events == []
    for client, reply in replies.items():
        sent = whole.reply_of(client)
        assert reply.num_examples == sent.num_examples
        assert torch.equal(reply.states["weights"]["float32"], sent.states["weights"]["float32"])


def test_an_old_reply_is_not_taken_twice(federation):
    kept = []

    def replay(content):
        kept.append(copy.deepcopy(content))
        return kept[0]

    replaying = federation(damage={BAD: replay})
    replaying.courier.connect(replaying.grid)
    assert [client for client, _ in replaying.ask(1)] == [0, 1, 2]
    assert [client for client, _ in replaying.ask(1)] == [0, 2]  # the same round, asked again
    assert [client for client, _ in replaying.ask(2)] == [0, 2]
    assert ["another request" in event["reason"] for event in replaying.events] == [True, True]


def test_whatever_is_accepted_has_a_finite_average(federation):
    large = federation(damage={BAD: set_vector("weights", np.full(10, 5e18, np.float32))})
    large.courier.connect(large.grid)
    replies = list(large.ask())
    assert [client for client, _ in replies] == [0, 1, 2]
    means, _ = average_replies((c, replace(r, num_examples=1e9)) for c, r in replies)
    assert torch.isfinite(means["weights"]["float32"]).all()
