"""Whatever one client sends, the aggregate is bit-equal to the one without that client."""

import copy
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fednas_flwr.base.errors import ReplyError
from fednas_flwr.models.metrics import BINS
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.secure_sum.masks import PART_BYTES
from fednas_flwr.protocol.states import TrimmedMean, WeightedAverage
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.optimizer_step import make_adam, make_sgd
from fednas_flwr.server import reply_checks
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange, share_scales
from fednas_flwr.settings.names import ACCOUNTANTS, MOST_SITES
from fednas_flwr.settings.optimizers import SGD, Adam

from ..asked import decoded
from ..refusals import refuses
from .conftest import SEARCH, client_reply, damaging, npy, set_json, set_metric, set_vector

BAD = 1


def averaged(replies, average):
    for _, reply in replies:
        average.add(reply.states, weight=reply.num_examples)
    return average.result()


@damaging
def edit_json(content, **changes):
    record = content.config_records["header"]
    text = json.loads(record["json"])
    for key, value in changes.items():
        *groups, name = key.split("__")
        (text[groups[0]] if groups else text)[name] = value
    record["json"] = json.dumps(text)


@damaging
def without(content, name):
    del content[name]


@damaging
def poison(content, state, index, value):
    record = content.array_records[f"state.{state}"]
    vector = record["float32"].numpy().copy()
    vector[index] = value
    record["float32"] = Array(vector)


@damaging
def set_data(content, edit, stype="numpy.ndarray"):
    record = content.array_records["state.weights"]
    record["float32"] = Array("float32", (10,), stype, edit(record["float32"].data))


@damaging
def set_record(content, name, **arrays):
    content[name] = ArrayRecord({dtype: Array(values) for dtype, values in arrays.items()})


@damaging
def many_metrics(content):
    content.metric_records["metrics"].update({str(i): 0.0 for i in range(1000)})


TO_DO = "if training has diverged, lower its learning rate or its weight decay"


def median():
    return TrimmedMean(None)


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
    "much JSON": (set_json(" " * 2**22 + "{}"), "malformed"),
    "deep JSON": (set_json("[" * 200_000), "malformed"),
    "digests of another type": (edit_json(digests=3), "malformed"),
    # metrics
    "accuracy NaN": (set_metric("train_accuracy", float("nan")), "train_accuracy=nan is not fin"),
    "training loss NaN": (set_metric("train_loss", float("nan")), "train_loss=nan is not finite"),
    "training loss inf": (set_metric("train_loss", float("inf")), "lower the learning rate"),
    "accuracy inf": (set_metric("accuracy", float("inf")), "accuracy=inf is not finite"),
    "loss negative": (set_metric("train_loss", -0.1), "train_loss=-0.1 is not from 0 to 1e+30"),
    "accuracy negative": (set_metric("train_accuracy", -0.01), "-0.01 is not from 0 to 1"),
    "accuracy above 1": (set_metric("train_accuracy", 1.01), "1.01 is not from 0 to 1"),
    "a metric of another action": (set_metric("accuracy", 0.5), "accuracy is none of the metrics"),
    "a metric of the server": (set_metric("central_accuracy", 1.0), "none of the metrics asked"),
    "a metric that is no metric": (set_metric("client", 0.0), "client is none of the metrics"),
    # num-examples
    "no metrics": (without("metrics"), "malformed"),
    "num-examples NaN": (set_metric("num-examples", float("nan")), "num-examples"),
    "num-examples inf": (set_metric("num-examples", float("inf")), "num-examples"),
    "num-examples 0": (set_metric("num-examples", 0.0), "num-examples"),
    "num-examples negative": (set_metric("num-examples", -5.0), "num-examples"),
    "num-examples tiny": (set_metric("num-examples", 1e-300), "num-examples"),
    "num-examples above what it has": (set_metric("num-examples", 101.0), "num-examples"),
    "num-examples a list": (set_metric("num-examples", [1.0]), "malformed"),
    "many metrics": (many_metrics(), "malformed"),
    "a metric with a long name": (set_metric("x" * 100, 1.0), "malformed"),
    "num-examples a huge integer": (set_metric("num-examples", 10**400), "malformed"),
    # states
    "missing state": (without("state.alphas"), "were asked for"),
    "further state": (
        set_record("state.buffers", float32=np.zeros(1, np.float32)),
        "were asked for",
    ),
    "other names or shapes": (edit_json(digests__weights="0" * 16), "other names, shapes"),
    "no digest": (edit_json(digests={}), "other names, shapes"),
    "one element more": (set_vector("weights", np.zeros(11, np.float32)), "sizes"),
    "one element less": (set_vector("alphas", np.zeros(3, np.float32)), "sizes"),
    "no vector": (set_record("state.weights"), "sizes"),
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
    "structure": (
        set_data(
            lambda _: npy("{'descr': [('x', '<U1')], 'fortran_order': False, 'shape': (10,)}")
        ),
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
    "weights of 1e16": (poison("weights", slice(None), 1e16), "weights has a norm of 3.16e+16"),
    "an alpha that no Adam reaches": (poison("alphas", 1, 100.0), "alphas has a norm of 100"),
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
        replies = list(setting.ask())
        assert [client for client, _ in replies] == [0, 2]
        results.append([averaged(replies, make()) for make in (WeightedAverage, median)])
    for states, expected in zip(*results, strict=True):
        for state, packed in expected.items():
            assert torch.equal(states[state]["float32"], packed["float32"])
    (event,) = bad.events
    told = event.pop("reason")
    assert reason in told
    if reason.startswith(("weights ", "alphas ")):
        assert told.endswith(f"; {TO_DO}")
    place = {"stage": "search", "round": 1, "action": "train.search", "client": BAD}
    assert event == {"event": "client_failed", **place}


def test_what_the_tests_above_damage_is_accepted_when_whole(federation):
    whole = federation()
    replies = dict(whole.ask())
    assert list(replies) == [0, 1, 2]
    assert whole.events == []
    for client, reply in replies.items():
        sent = client_reply(client)
        assert reply.num_examples == sent.num_examples
        assert torch.equal(reply.states["weights"]["float32"], sent.states["weights"]["float32"])


def test_an_old_reply_is_not_taken_twice(federation):
    kept = []

    def replay(content):
        kept.append(copy.deepcopy(content))
        return kept[0]

    replaying = federation(damage={BAD: replay})
    assert replaying.answering(1) == [0, 1, 2]
    assert replaying.answering(1) == [0, 2]  # the same round, asked again
    assert replaying.answering(2) == [0, 2]
    assert ["another request" in event["reason"] for event in replaying.events] == [True, True]


def test_whatever_is_accepted_has_a_finite_average(federation):
    large = federation(damage={BAD: set_vector("weights", np.full(10, 9e5, np.float32))})
    replies = list(large.ask())
    assert [client for client, _ in replies] == [0, 1, 2]
    means = averaged([(c, replace(r, num_examples=1e9)) for c, r in replies], WeightedAverage())
    assert torch.isfinite(means["weights"]["float32"]).all()


def test_a_client_far_from_most_in_what_it_declares_is_an_outlier():
    usual = {client: {"": 100.0, "train ": 60.0} for client in range(4)}
    assert reply_checks.outliers(usual, fewest=0.1, most=10) == {}
    few = reply_checks.outliers(usual | {1: {"": 100.0, "train ": 5.9}}, fewest=0.1, most=10)
    assert list(few) == [1]
    assert few[1].startswith("it declares 5.9 train records, where the median client has 60")
    assert list(reply_checks.outliers(usual | {2: {"": 1001.0}}, fewest=0.1, most=10)) == [2]
    edge = {1: {"": 10.0, "train ": 6.0}, 2: {"": 1000.0, "train ": 600.0}}
    assert reply_checks.outliers(usual | edge, fewest=0.1, most=10) == {}
    assert (
        reply_checks.outliers({0: {"": 1.0}, 1: {"": 1e9}}, fewest=0.1, most=10) == {}
    )  # whom to believe?
    none = {client: {"test ": 0.0} for client in range(4)} | {3: {"test ": 2.0}}
    assert reply_checks.outliers(none, fewest=0, most=10) == {}  # few have a test record


def test_json_as_deep_as_can_be_read_is_refused_by_a_sentence(federation):
    """What says so must not go as deep again, as the repr of a nested list would."""
    for depth in range(860, 1000, 4):
        nested: list = []
        for _ in range(depth):
            nested = [nested]
        with pytest.raises(ReplyError, match="says tag=.* has the wrong type: expected text"):
            decoded("tag", nested)

        def damage(content, depth=depth):
            record = content.config_records["header"]
            deep = "[" * depth + "]" * depth
            record["json"] = re.sub(r'"round": \d+', f'"round": {deep}', record["json"])
            return content

        setting = federation(damage={BAD: damage})
        assert setting.answering() == [0, 2]


ONES = [1] * BINS
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
EPSILON = {name: {"train": 1.5, "test": None} for name in ACCOUNTANTS}
SPLIT = {"train": 7, "validation": 0, "test": 0}
MOMENTS = {"count": 3, "mean": 0.5, "std": 0}
PROPERTIES = {  # by name: right ones and wrong ones
    "client": ([0, 3], [None, True, 1.0, "0"]),
    "tag": (["", "ward 3", "é", "x" * 200], [7, "x" * 201, "a\nb", "\x1b[2J", None]),
    "input_shape": (
        [[], [3], [3, 224, 224]],
        [[2**29], [2**20, 2**20], [1, 1, 1, 1], [10**400], [-1], 3],
    ),
    "mean": (
        [[], [0.5, -3, 1e9]],
        [None, [1e30], [10**400], [None], [math.inf], [math.nan], ["1"], [True], {}],
    ),
    "std": ([[], [0.5, 3]], [None, [1e30], [0.0], [-1.0], [math.inf], ["1"], 1.0]),
    "versions": (
        [{}, {"torch": "2"}],
        [[], {"torch": 2}, {"a\n": "2"}, {"a": "2\n"}, {"a" * 201: "2"}],
    ),
    "epsilon": (
        [EPSILON],
        [
            *({}, [], None, {**EPSILON, "more": EPSILON["prv"]}, {"prv": EPSILON["prv"]}),
            *(
                {**EPSILON, "prv": {"train": value, "test": None}}
                for value in (-1.0, math.inf, math.nan, 10**400, "1", True)
            ),
            *({**EPSILON, "rdp": {"train": 1.5}}, {**EPSILON, "gdp": None}),
            dict.fromkeys(ACCOUNTANTS, {"training": 1.0}),
        ],
    ),
    "budget": (
        [BUDGET],
        [
            *({}, [], {"epsilon": 1.0}, {**BUDGET, "more": 1.0}),
            *({**BUDGET, "epsilon": value} for value in (0.0, -1.0, math.inf)),
            *({**BUDGET, "delta": value} for value in (0.0, 1.0, 1, "1")),
        ],
    ),
    "secure_noise": ([True, False], [0, 1, None, "true"]),
    "least_noise_multiplier": ([0.8, 1], [0.0, -1.0, 1e7, math.inf, True, "1", None]),
    "unit": (["record", "person"], ["patient", None, []]),
    "spent": ([None, 0.0, 3.5, 1], [-1.0, math.inf, True, "1"]),
    "honest_sites": ([2, MOST_SITES], [1, MOST_SITES + 1, 2.0, True]),
    "awaits": (["ab" * 16], ["AB" * 16, "ab" * 15, "ab" * 16 + "\n", "g" * 32, None]),
    "context": (["ab" * 32], ["ab" * 16]),
    "signature": (["ab" * 64], ["ab" * 32]),
    "parts": (
        [{}, {"0": "ab" * PART_BYTES, "1": "cd" * PART_BYTES}],
        [
            *([], {"0": "ab"}, {"00": "ab" * PART_BYTES}, {"-1": "ab" * PART_BYTES}),
            {str(site): "ab" * PART_BYTES for site in range(MOST_SITES + 1)},
        ],
    ),
    "covered_steps": (
        [{}, {"search": 2}],
        [{"search": value} for value in (10**400, -1, True, 1.0, "2")] + [[], None, 3],
    ),
    "moments": (
        [[], [MOMENTS], [{**MOMENTS, "mean": -1e29}]],
        [
            *([{**MOMENTS, "mean": value}] for value in (1e300, 10**400, math.nan, "1", None)),
            *([{**MOMENTS, "std": value}] for value in (-1.0, 1e30, 1e300)),
            *([{**MOMENTS, "count": -1}], [{}], MOMENTS, None),
        ],
    ),
    "class_counts": ([[], [1, 0]], [[-1], [10**10], [1.0], [True], "", None]),
    "class_names": ([[], ["a", "b"]], [["a\n"], [1], "ab", None]),
    "scores": ([{}, {"f1": 0.0, "auroc": 1}], [{"f1": 1.5}, {"f1": True}, {"f2": 0.5}, []]),
    "gain": (
        [[-20.0, 200.0, 2], [0.0, 0.0, 1]],
        [[0.0, 0.0, 0], [21.0, 9.0, 2], [0.0, 201.0, 2], [0.0, -1.0, 2], [0.0, 0.0], "", None],
    ),
    "histogram": (
        [[ONES, [0] * BINS], [[int(reply_checks.MAX_EXAMPLES), *[0] * (BINS - 1)], ONES]],
        [
            *([ONES], [ONES] * 3, [ONES, ONES[1:]], [ONES, [*ONES, 1]], [ONES, [1.0] * BINS]),
            *([ONES, [-1, *ONES[1:]]], [ONES, [int(reply_checks.MAX_EXAMPLES), *ONES[1:]]]),
            *({"0": ONES, "1": ONES}, "", None),
        ],
    ),
    "splits": (
        [SPLIT],
        [*({**SPLIT, "test": value} for value in (-1, 1.0, True, 10**10)), {"train": 1}, []],
    ),
}


MALFORMED = "has the wrong type|is out of range|is unknown|must be a group"


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_have_the_form_of_their_name(name):
    right, wrong = PROPERTIES[name]
    for value in right:
        assert decoded(name, value) == value or name == "moments"
    for value in wrong:
        words = rf"(?s)says .*{name}\b.*({MALFORMED})|say its {name}\b"
        refuses(words, decoded, name, value, error=ReplyError)


@pytest.mark.parametrize("action", ["query.describe", "query.latency", "query.open_masks"])
def test_a_property_that_is_missing_or_of_another_action_is_named(action):
    with pytest.raises(ReplyError, match="does not say its (client|latency|parts)"):
        rq.decode_properties(action, {})
    with pytest.raises(ReplyError, match="says setting=kept is unknown"):
        rq.decode_properties(action, {"kept": True})


def test_no_client_of_three_or_more_has_more_than_the_largest_share():
    assert share_scales({0: 10, 1: 20, 2: 970}, 0.5) == {2: pytest.approx(30 / 970)}
    assert share_scales({0: 10, 1: 20, 2: 970}, 0.8) == {2: pytest.approx(120 / 970)}
    for examples, largest in (({0: 10, 1: 20, 2: 30}, 0.5), ({0: 1, 1: 99}, 0.5), ({0: 1}, 0.5)):
        assert share_scales(examples, largest) == {}
    assert share_scales({0: 1, 1: 1, 2: 1000}, 1.0) == {}


@pytest.mark.parametrize(("largest", "weight"), [(1.0, 17.0), (0.5, 17.0 * 200 / 900)])
def test_a_heavy_client_is_held_to_the_largest_share_and_named_once(largest, weight, federation):
    heavy = federation(largest_share=largest)
    heavy.cohort._max_examples[BAD] = 900
    for _ in range(2):
        replies = dict(heavy.ask())
        weights = [replies[client].num_examples for client in range(3)]
        assert weights == [10.0, pytest.approx(weight), 24.0]
    messages = [event["message"] for event in heavy.events]
    assert len(messages) == (largest < 1)
    assert all("client 1 may weigh 900 of 1100 examples" in message for message in messages)


def test_a_sum_of_gradients_is_scaled_with_its_weight():
    states = {"weights": {"float32": torch.ones(2)}, "buffers": {"float32": torch.ones(1)}}
    held = Reply(8.0, states=states).weighing(0.25, summed=("weights",))
    assert held.num_examples == 2
    assert held.states["weights"]["float32"].tolist() == [0.25, 0.25]
    assert held.states["buffers"]["float32"].tolist() == [1.0]


def test_a_reply_of_another_run_or_site_is_refused(federation):
    """Client 1 answers with what an honest client of another run, and client 0, has sent."""
    stolen = []
    other = federation(damage={BAD: lambda content: stolen.append(content) or content})
    list(other.ask())

    def from_site_0(content):
        stolen.append(content)
        return content

    damage = {0: from_site_0, BAD: lambda _: copy.deepcopy(stolen.pop())}
    foreign = federation(damage=damage, quorum_share=0.3)
    assert foreign.answering() == [0, 2]  # site 0's reply to this exchange
    stolen[:] = stolen[:1]
    foreign.grid._client_app = federation(
        damage={BAD: lambda _: copy.deepcopy(stolen[0])}
    ).grid._client_app
    assert foreign.answering() == [0, 2]  # client 1's of the other run
    assert ["another request" in event["reason"] for event in foreign.events] == [True, True]


def test_three_strikes_and_a_client_is_asked_no_more(federation):
    asked = []

    def hostile(content):
        asked.append(1)
        return set_json("[")(content)

    bad = federation(damage={BAD: hostile})
    for server_round in range(1, 6):
        assert bad.answering(server_round) == [0, 2]
    assert len(asked) == 3
    assert bad.cohort.clients == [0, 2]
    assert [event["event"] for event in bad.events] == ["client_failed"] * 2 + ["client_left"]
    assert [event.get("expelled", False) for event in bad.events] == [False, False, True]
    assert bad.events[-1]["reason"].startswith("3 of its replies were refused, the last one for: ")
    asked_all = bad.cohort.ask(
        Exchange("train.search", stage="evaluate", settings=SEARCH, also_left=True)
    )
    with pytest.raises(QuorumError, match="client 1: 3 of its replies were refused"):
        list(asked_all)  # of the honest ones no layout is asked for, so all are refused
    assert len(asked) == 3


def test_a_client_that_errs_is_asked_again(federation):
    failing = federation(damage={BAD: refuse})
    for server_round in range(1, 6):
        assert failing.answering(server_round) == [0, 2]
    assert failing.cohort.clients == [0, 1, 2]
    assert len(failing.events) == 5


def test_a_client_that_answers_again_is_back(federation):
    rounds = iter([True, True, False, False, True, False])
    lame = federation(damage={BAD: lambda content: refuse(0) if next(rounds) else content})
    for server_round in range(1, 7):
        list(lame.ask(server_round))
    told = [(event["event"], event["round"]) for event in lame.events]
    failed = [("client_failed", number) for number in (1, 2, 5)]
    assert told == [*failed[:2], ("client_back", 3), failed[2], ("client_back", 6)]


def test_what_a_client_says_in_an_error_is_cut_short_and_commands_no_terminal(federation):
    loud = federation(damage={BAD: lambda _: Error(2, "\x1b[2J\n" + "x" * 10**6)})
    list(loud.ask())
    (event,) = loud.events
    assert event["reason"] == "\\x1b[2J " + "x" * 495


# --- what honest clients send is within the limits, and these are not far beyond


RECORDS = {"train": 400, "validation": 100, "test": 50}
STEP = SGD(lr=0.1, min_lr=0.0, momentum=0.9, weight_decay=1e-3, clip_norm=None)
ALPHA_STEP = Adam(lr=0.01, weight_decay=1e-3)


def plan(kind="weights", action="train.weights", *, batch=32.0, sigma=1.5, norm=0.5, splits=None):
    splits = splits or {"alphas": ("validation",)}.get(kind, ("train",))
    return PlannedRelease("search", action, kind, splits, batch, 10, norm, sigma)


def limits(action, settings, *, sizes, sent=None, examples=550.0, planned=()):
    exchange = SimpleNamespace(
        action=action,
        layouts={name: SimpleNamespace(sizes={"float32": size}) for name, size in sizes.items()},
        planned={release.kind: release for release in planned},
    )
    return reply_checks.honest_limits(
        exchange, settings, sent=sent or {}, examples=examples, records=RECORDS if planned else {}
    )


# the bounds, against what can be worst


@pytest.mark.parametrize(("batch", "sigma", "num_values"), [(32.0, 1.5, 50), (None, 0.0, 5000)])
def test_a_noised_sum_of_twice_the_declared_records_all_of_one_gradient(batch, sigma, num_values):
    """The norms of 2,000 draws, of records that all pull the same way."""
    generator = torch.Generator().manual_seed(1)
    release = plan(batch=batch, sigma=sigma)
    records = torch.full(
        (2000, int(reply_checks.MORE_RECORDS * RECORDS["train"])), release.rate(RECORDS)
    )
    drawn = torch.bernoulli(records, generator=generator).sum(1, keepdim=True).double()
    noise = torch.randn(2000, num_values, generator=generator, dtype=torch.float64)
    noise *= sigma * release.max_grad_norm
    noise[:, :1] += drawn * release.max_grad_norm
    norms = noise.norm(dim=1)
    bound = reply_checks.largest_sum(release, RECORDS, num_values=num_values)
    assert norms.max() < bound < 4 * norms.mean()


def test_more_records_steps_noise_or_values_allow_more():
    least = reply_checks.largest_sum(plan(), RECORDS, num_values=100)
    assert reply_checks.largest_sum(plan(batch=None), RECORDS, num_values=100) > least
    assert reply_checks.largest_sum(plan(sigma=2.0), RECORDS, num_values=100) > least
    assert reply_checks.largest_sum(plan(), RECORDS, num_values=101) > least
    twice = reply_checks.largest_sum(plan(norm=1.0), RECORDS, num_values=100)
    assert twice == pytest.approx(2 * least)
    noise = 1.5 * 0.5 * (math.sqrt(100) + math.sqrt(2 * reply_checks.TAIL))
    batch = 64 + math.sqrt(2 * 64 * reply_checks.TAIL) + reply_checks.TAIL
    assert least == pytest.approx(0.5 * batch + noise)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("velocity", [0.0, 3.0])
def test_steps_along_one_gradient_after_another_of_the_same_direction(nesterov, velocity):
    weights = torch.full((4,), 0.5, requires_grad=True)
    before = weights.detach().clone()
    optimizer = make_sgd([weights], STEP, nesterov=nesterov)
    if velocity:
        optimizer.state[weights]["momentum_buffer"] = torch.full((4,), velocity / 2)
    for _ in range(30):
        weights.grad = torch.full((4,), 1.0)  # of norm 2
        optimizer.step()
    moved = float((weights.detach() - before).norm())
    bound = reply_checks.largest_move(30, STEP, 2.0, float(before.norm()), velocity)
    assert moved <= bound < 1.5 * moved


@given(
    st.lists(st.sampled_from([0.0, 1e-8, 1.0, -1.0, 1e4, -1e8]), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.5]),
)
def test_adam_moves_an_alpha_by_less_than_its_share_of_the_limit(gradients, beta):
    alpha = torch.zeros(1, requires_grad=True)
    optimizer = make_adam([alpha], ALPHA_STEP, beta=beta)
    for gradient in gradients:
        before = alpha.item()
        alpha.grad = torch.tensor([gradient])
        optimizer.step()
        assert abs(alpha.item() - before) <= reply_checks.ADAM / 2 * ALPHA_STEP.lr


# what each action may return


def take(**changes):
    return rq.TakeGradients(
        step=0,
        local_steps=changes.pop("local_steps", 1),
        local_lrs={},
        batch_size=changes.pop("batch", None),
        order=1,
        inner_lr=0.1,
    )


def test_gradients_of_private_clients_are_bounded_sums_over_the_expected_batch():
    both = [plan(action="train.gradients"), plan("alphas", "train.gradients", batch=16.0)]
    sizes = {"weights": 1000, "alphas": 10}
    one = limits("train.gradients", take(), sizes=sizes, planned=both)
    assert one.examples == pytest.approx(32)
    for release, scale in zip(both, (1.0, 2.0), strict=True):  # alphas for the weights' batch
        bound = scale * reply_checks.largest_sum(release, RECORDS, num_values=sizes[release.kind])
        assert bound < one.norms[release.kind] < 1.5 * bound
    three = limits("train.gradients", take(local_steps=3), sizes=sizes, planned=both)
    assert three.norms["weights"] == pytest.approx(3 * one.norms["weights"])


def test_gradients_without_privacy_stand_for_no_more_than_a_batch():
    sizes = {"weights": 100}
    assert limits("train.weight_gradient", take(), sizes=sizes).examples == 550
    assert limits("train.weight_gradient", take(batch=32), sizes=sizes).examples == 33
    assert limits("train.weight_gradient", take(batch=999), sizes=sizes).examples == 550


def training(clip_norm, amount):
    sgd = SGD(0.1, 0.0, 0.9, 0.0, clip_norm)
    return rq.Train(local=rq.LocalTraining({}, "train", amount, sgd, 0.0, 0.0))


def test_training_moves_no_farther_than_its_clipped_or_noised_steps():
    sizes, sent = {"weights": 100, "buffers": 3}, {"weights": 5.0}
    epochs, steps = rq.Amount(2, None, 50), rq.Amount(None, 22, None)
    clipped = limits("train.weights", training(1.0, epochs), sizes=sizes, sent=sent)
    assert clipped.norms["weights"] == pytest.approx(
        1.25 * reply_checks.largest_move(22, SGD(0.1, 0.0, 0.9, 0.0, 1.0), 1.0, 5.0, 0.0), rel=1e-3
    )
    free = limits("train.weights", training(None, epochs), sizes=sizes, sent=sent)
    assert free.norms["weights"] == 1e6 * (10 + 5)
    noised = [plan()]
    private = limits("train.weights", training(None, steps), sizes=sizes, sent=sent, planned=noised)
    mean = reply_checks.largest_sum(noised[0], RECORDS, num_values=100) / 32
    sgd = SGD(0.1, 0.0, 0.9, 0.0, None)
    moved = 1.25 * reply_checks.largest_move(22, sgd, mean, 5.0, 0.0)
    assert private.norms["weights"] == pytest.approx(moved, rel=1e-3)
    both = limits("train.weights", training(0.01, steps), sizes=sizes, sent=sent, planned=noised)
    assert both.norms["weights"] < private.norms["weights"] / 10
    assert both.norms["buffers"] == 1e12 * math.sqrt(3)


def test_running_variances_of_deep_sums_are_honest():
    """Cells whose nodes add up what they skip multiply the scale by 4, the variance by 16."""
    normalised = nn.BatchNorm1d(3).train()
    x = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 4.0]])
    for _ in range(8):
        x = x + x + (x + x)
    normalised(x)
    moved = reply_checks.distance({"float32": normalised.running_var}, {"float32": torch.zeros(3)})
    allowed = limits("train.weights", training(1.0, rq.Amount(1, None, 2)), sizes={"buffers": 3})
    assert 1e6 * math.sqrt(3) < moved < allowed.norms["buffers"]


def test_candidates_move_the_weights_as_the_same_steps_of_training_do():
    sgd = SGD(0.1, 0.0, 0.9, 0.0, 1.0)
    sizes, sent = {"weights": 100}, {"weights": 5.0}
    request = rq.TrainCandidates(
        candidates=[[0], [1]], step=0, local_steps=11, batch_size=50, weights=sgd, dp_aware=None
    )
    found = limits("train.candidate", request, sizes=sizes, sent=sent)
    same = limits("train.weights", training(1.0, rq.Amount(None, 22, 50)), sizes=sizes, sent=sent)
    assert found.norms == same.norms


def test_of_a_pool_every_member_moves_as_far_as_it_may_alone():
    """Each member's gradient is clipped by itself, also where noise is added to all at once."""
    steps, sizes = rq.Amount(None, 3, None), {"weights": 100}
    for clip_norm, planned in ((1.0, []), (None, [plan()])):
        alone = training(clip_norm, steps)
        pool = replace(alone, local=replace(alone.local, network={"genotypes": 4 * [{}]}))
        one, four = (
            limits("train.weights", asked, sizes=sizes, planned=planned).norms["weights"]
            for asked in (alone, pool)
        )
        assert four == pytest.approx(2 * one)


def test_a_search_moves_the_alphas_by_its_steps_of_adam():
    rule = Alternating("first_order")
    search = rq.LocalSearch(rq.Amount(None, 4, None), STEP, ALPHA_STEP, alternating=rule)
    sizes = {"weights": 100, "alphas": 16}
    found = limits("train.search", rq.Search(local=search), sizes=sizes)
    assert found.norms["alphas"] == pytest.approx(4 * reply_checks.ADAM * 0.01 * 4)
    sent = {"moments": 2.0}
    with_moments = limits("train.search", rq.Search(local=search), sizes=sizes, sent=sent)
    assert with_moments.norms["alphas"] == 1e6 * 4


def test_a_probe_and_an_evaluation_have_no_norm_that_noise_could_break():
    probe = rq.Probe(
        search=None,
        training=training(None, rq.Amount(None, 1, None)).local,
        trials=[rq.Trial(STEP, ALPHA_STEP, 0.0)],
        loss_bound=1.0,
    )
    rewards = plan("rewards", "train.probe", batch=None, sigma=1e6, splits=("validation",))
    found = limits("train.probe", probe, sizes={"rewards": 1}, planned=[rewards])
    assert found.norms == {"rewards": math.inf}
    tested = rq.Evaluate(network={}, split="test")
    exact = limits("evaluate.model", tested, sizes={})
    assert exact.metric_range("accuracy") == (0, 1)
    assert exact.metric_range("loss") == (0, reply_checks.LARGEST_LOSS)
    metrics = plan("metrics", "evaluate.model", batch=None, sigma=4.0, splits=("test",))
    noised = limits("evaluate.model", tested, sizes={}, planned=[metrics])
    noise = 4 * math.sqrt(2) / 50 * math.sqrt(2 * reply_checks.TAIL)
    assert noised.noise == pytest.approx(noise)
    assert noised.metric_range("accuracy") == pytest.approx((-noise, 2 + noise))
    low, high = noised.metric_range("loss")
    assert low < -noise < 2 * math.log(1e6) < high < 1e3


def test_a_distance_is_that_of_the_floats_and_not_finite_where_one_is_not():
    state = {"float32": torch.tensor([3.0, 0.0]), "int64": torch.tensor([7])}
    sent = {"float32": torch.tensor([0.0, 4.0]), "int64": torch.tensor([0])}
    assert reply_checks.distance(state, {}) == 3
    assert reply_checks.distance(state, sent) == 5
    assert reply_checks.distance(state, {}) == 3
    assert not math.isfinite(reply_checks.distance({"float32": torch.tensor([math.nan])}, {}))
