"""Whatever one client sends, the aggregate is bit-equal to the one without that client."""

import copy
import json
import math
import re
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.clientapp import ClientApp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednas_flwr.base.errors import ReplyError
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.models.metrics import BINS
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol import sum_requests
from fednas_flwr.protocol.messages import Header, Reply, encode_reply
from fednas_flwr.protocol.secure_sum.masks import PART_BYTES
from fednas_flwr.protocol.states import Layout, Packed, TrimmedMean, WeightedAverage, pack
from fednas_flwr.search.optimizer_step import make_adam, make_sgd
from fednas_flwr.server import reply_checks
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange, share_scales
from fednas_flwr.server.reply_checks import Limits, accept_reply
from fednas_flwr.settings.names import ACCOUNTANTS, MOST_SITES
from fednas_flwr.settings.optimizers import SGD, Adam

from ..asked import FORMS, decoded, smallest
from ..json_trees import json_trees
from ..refusals import raising, refuses
from .conftest import SEARCH, damaging, npy, set_json, set_metric, set_vector

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


def npy_of(descr, shape):
    return npy(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}")


@damaging
def set_record(content, name, **arrays):
    content[name] = ArrayRecord({dtype: Array(values) for dtype, values in arrays.items()})


@damaging
def many_metrics(content):
    content.metric_records["metrics"].update({str(i): 0.0 for i in range(1000)})


TO_DO = "if training has diverged, lower its learning rate or its weight decay"


refuse = raising(RuntimeError("out of memory"))


FLOATS = np.zeros(11, np.float32)
DAMAGES = {
    # header
    "round": (edit_json(header__round=2), "another request"),
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
    "training loss inf": (set_metric("train_loss", float("inf")), "lower the learning rate"),
    "loss negative": (set_metric("train_loss", -0.1), "train_loss=-0.1 is not from 0 to 1e+30"),
    "accuracy above 1": (set_metric("train_accuracy", 1.01), "1.01 is not from 0 to 1"),
    "a metric of another action": (set_metric("accuracy", 0.5), "accuracy is none of the metrics"),
    # num-examples
    "no metrics": (without("metrics"), "malformed"),
    "num-examples NaN": (set_metric("num-examples", float("nan")), "num-examples"),
    "num-examples tiny": (set_metric("num-examples", 1e-300), "num-examples"),
    "num-examples above what it has": (set_metric("num-examples", 101.0), "num-examples"),
    "num-examples a list": (set_metric("num-examples", [1.0]), "malformed"),
    "many metrics": (many_metrics(), "malformed"),
    "a metric with a long name": (set_metric("x" * 100, 1.0), "malformed"),
    "num-examples a huge integer": (set_metric("num-examples", 10**400), "malformed"),
    # states
    "missing state": (without("state.alphas"), "were asked for"),
    "further state": (set_record("state.buffers", float32=FLOATS[:1]), "were asked for"),
    "other names or shapes": (edit_json(digests__weights="0" * 16), "other names, shapes"),
    "no digest": (edit_json(digests={}), "other names, shapes"),
    "one element more": (set_vector("weights", FLOATS), "sizes"),
    "no vector": (set_record("state.weights"), "sizes"),
    "a vector more": (set_vector("weights", np.zeros(10), "float64"), "sizes"),
    "doubles named float32": (set_vector("weights", np.zeros(10)), "malformed"),
    "matrix": (set_vector("weights", np.zeros((2, 5), np.float32)), "malformed"),
    "big-endian": (set_vector("weights", np.zeros(10, ">f4")), "malformed"),
    # bytes
    "torn vector": (set_data(lambda data: data[:-4]), "malformed"),
    "longer vector": (set_data(lambda data: data + b"\0\0\0\0"), "malformed"),
    "no npy": (set_data(lambda data: b"\x80\x04K\x01." * 40), "malformed"),
    "npy of another version": (set_data(lambda data: data[:6] + b"\x07" + data[7:]), "malformed"),
    "objects": (set_data(lambda _: npy_of("|O", (10,))), "malformed"),
    "structure": (set_data(lambda _: npy_of([("x", "<U1")], (10,))), "malformed"),
    "npy header that is no literal": (set_data(lambda _: npy("(" * 9000)), "malformed"),
    "deep npy header": (set_data(lambda _: npy("-" * 9000 + "1")), "malformed"),
    "another serialisation": (set_data(lambda data: data, stype="torch.tensor"), "malformed"),
    # numbers
    "NaN in the first weight": (poison("weights", 0, np.nan), "weights is not finite"),
    "inf in the last weight": (poison("weights", -1, np.inf), "weights is not finite"),
    "inf - inf": (poison("weights", slice(0, 2), [np.inf, -np.inf]), "weights is not finite"),
    "finite, but an average would overflow": (poison("weights", 3, 3e38), "weights is not finite"),
    "weights of 1e16": (poison("weights", slice(None), 1e16), "weights has a norm of 3.16e+16"),
    "an alpha that no Adam reaches": (poison("alphas", 1, 100.0), "alphas has a norm of 100"),
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
        results.append([averaged(replies, own) for own in (WeightedAverage(), TrimmedMean(None))])
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


def test_a_client_far_from_most_in_what_it_declares_is_an_outlier():
    usual = {client: {"": 100.0, "train ": 60.0} for client in range(4)}
    assert reply_checks.outliers(usual, fewest=0.1, most=10) == {}
    few = reply_checks.outliers(usual | {1: {"": 100.0, "train ": 5.9}}, fewest=0.1, most=10)
    assert list(few) == [1]
    assert few[1].startswith("it declares 5.9 train records, where the median client has 60")
    assert list(reply_checks.outliers(usual | {2: {"": 1001.0}}, fewest=0.1, most=10)) == [2]
    edge = {1: {"": 10.0, "train ": 6.0}, 2: {"": 1000.0, "train ": 600.0}}
    assert reply_checks.outliers(usual | edge, fewest=0.1, most=10) == {}
    # whom to believe?
    assert reply_checks.outliers({0: {"": 1.0}, 1: {"": 1e9}}, fewest=0.1, most=10) == {}
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

        assert federation(damage={BAD: damage}).answering() == [0, 2]


ONES = [1] * BINS
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
EPSILON = {name: {"train": 1.5, "test": None} for name in ACCOUNTANTS}
SPLIT = {"train": 7, "validation": 0, "test": 0}
MOMENTS = {"count": 3, "mean": 0.5, "std": 0}
NO_EPSILONS = [
    *({}, [], None, {**EPSILON, "more": EPSILON["prv"]}, {"prv": EPSILON["prv"]}),
    *({**EPSILON, "prv": {"train": value, "test": None}} for value in (-1.0, math.inf)),
    *({**EPSILON, "rdp": {"train": 1.5}}, {**EPSILON, "gdp": None}),
    dict.fromkeys(ACCOUNTANTS, {"training": 1.0}),
]
NO_BUDGETS = [
    *({}, [], {"epsilon": 1.0}, {**BUDGET, "more": 1.0}),
    *({**BUDGET, "epsilon": value} for value in (0.0, -1.0, math.inf)),
    *({**BUDGET, "delta": value} for value in (0.0, 1.0)),
]
NO_PARTS = [[], {"0": "ab"}, {"00": "ab" * PART_BYTES}, {"-1": "ab" * PART_BYTES}]
NO_PARTS.append({str(site): "ab" * PART_BYTES for site in range(MOST_SITES + 1)})
NO_MOMENTS = [
    *([{**MOMENTS, "mean": value}] for value in (1e300, 10**400, math.nan)),
    *([{**MOMENTS, "std": value}] for value in (-1.0, 1e30, 1e300)),
    *([{**MOMENTS, "count": -1}], [{}]),
]
MANY = int(rq.MAX_EXAMPLES)
NO_HISTOGRAMS = [
    *([ONES], [ONES] * 3, [ONES, ONES[1:]], [ONES, [*ONES, 1]], [ONES, [1.0] * BINS]),
    *([ONES, [-1, *ONES[1:]]], [ONES, [MANY, *ONES[1:]]]),
]
NO_GAINS = [[0.0, 0.0, 0], [21.0, 9.0, 2], [0.0, 201.0, 2], [0.0, -1.0, 2], [0.0, 0.0], "", None]
PROPERTIES = {  # by name: right ones and wrong ones
    "client": ([0, 3], ["0"]),
    "tag": (["", "ward 3", "é", "x" * 200], ["x" * 201, "a\nb", "\x1b[2J"]),
    "input_shape": ([[], [3], [3, 224, 224]], [[2**29], [2**20, 2**20], [1] * 4, [10**400], [-1]]),
    "mean": ([[], [0.5, -3, 1e9]], [[1e30], [10**400], [math.inf], [math.nan]]),
    "std": ([[], [0.5, 3]], [[1e30], [0.0], [-1.0], [math.inf]]),
    "schema": ([[]], [[{"kind": "number"}]]),
    "hardware": (["cpu"], ["x" * 10**4]),
    "versions": ([{}, {"torch": "2"}], [{"a\n": "2"}, {"a": "2\n"}, {"a" * 201: "2"}]),
    "epsilon": ([EPSILON], NO_EPSILONS),
    "budget": ([BUDGET], NO_BUDGETS),
    "secure_noise": ([True, False], [0, 1, None, "true"]),
    "least_noise_multiplier": ([0.8, 1], [0.0, -1.0, 1e7, math.inf]),
    "unit": (["record", "person"], ["patient", None, []]),
    "spent": ([None, 0.0, 3.5, 1], [-1.0, math.inf, True, "1"]),
    "honest_sites": ([2, MOST_SITES], [1, MOST_SITES + 1, 2.0, True]),
    "awaits": (["ab" * 16], ["AB" * 16, "ab" * 15, "ab" * 16 + "\n", "g" * 32, None]),
    "context": (["ab" * 32], ["ab" * 16]),
    "signature": (["ab" * 64], ["ab" * 32]),
    "parts": ([{}, {"0": "ab" * PART_BYTES, "1": "cd" * PART_BYTES}], NO_PARTS),
    "covered_steps": ([{}, {"search": 2}], [{"search": value} for value in (10**400, -1)]),
    "moments": ([[], [MOMENTS], [{**MOMENTS, "mean": -1e29}]], NO_MOMENTS),
    "class_counts": ([[], [1, 0]], [[-1], [10**10]]),
    "class_names": ([[], ["a", "b"]], [["a\n"]]),
    "scores": ([{}, {"f1": 0.0, "auroc": 1}], [{"f1": 1.5}, {"f1": True}, {"f2": 0.5}, []]),
    "gain": ([[-20.0, 200.0, 2], [0.0, 0.0, 1]], NO_GAINS),
    "histogram": ([[ONES, [0] * BINS], [[MANY, *[0] * (BINS - 1)], ONES]], NO_HISTOGRAMS),
    "splits": ([SPLIT], [*({**SPLIT, "test": value} for value in (-1, 10**10)), {"train": 1}]),
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


@given(st.lists(st.floats(0.1, 1e9), min_size=3, max_size=8), st.floats(0.01, 0.99))
def test_no_share_is_above_the_largest_and_none_below_it_is_scaled(weights, largest):
    scales = share_scales(dict(enumerate(weights)), largest)
    held = [weight * scales.get(client, 1) for client, weight in enumerate(weights)]
    most = max(largest, 1 / len(weights))
    assert max(held) <= most * sum(held) * (1 + 1e-6)
    for client in scales:
        assert held[client] >= most * sum(held) * (1 - 1e-6)


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
    asked_all = Exchange("train.search", stage="evaluate", settings=SEARCH, also_left=True)
    asked_all = bad.cohort.ask(asked_all)
    refuses("client 1: 3 of its replies were refused", list, asked_all, error=QuorumError)
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
    given = {"sent": sent or {}, "examples": examples, "records": RECORDS if planned else {}}
    return reply_checks.honest_limits(exchange, settings, **given)


# the bounds, against what can be worst


@pytest.mark.parametrize(("batch", "sigma", "num_values"), [(32.0, 1.5, 50), (None, 0.0, 5000)])
def test_a_noised_sum_of_twice_the_declared_records_all_of_one_gradient(batch, sigma, num_values):
    """The norms of 2,000 draws, of records that all pull the same way."""
    generator = torch.Generator().manual_seed(1)
    release = plan(batch=batch, sigma=sigma)
    most = int(reply_checks.MORE_RECORDS * RECORDS["train"])
    records = torch.full((2000, most), release.rate(RECORDS))
    drawn = torch.bernoulli(records, generator=generator).sum(1, keepdim=True).double()
    noise = torch.randn(2000, num_values, generator=generator, dtype=torch.float64)
    noise *= sigma * release.max_grad_norm
    noise[:, :1] += drawn * release.max_grad_norm
    norms = noise.norm(dim=1)
    bound = reply_checks.largest_sum(release, RECORDS, num_values=num_values)
    assert norms.max() < bound < 4 * norms.mean()


def test_the_bound_of_a_sum_is_that_of_its_records_and_noise():
    noise = 1.5 * 0.5 * (math.sqrt(100) + math.sqrt(2 * reply_checks.TAIL))
    for batch, records in ((32.0, 64), (16.0, 32)):  # of twice as many as are declared
        drawn = records + math.sqrt(2 * records * reply_checks.TAIL) + reply_checks.TAIL
        bound = reply_checks.largest_sum(plan(batch=batch), RECORDS, num_values=100)
        assert bound == pytest.approx(0.5 * drawn + noise)


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


def take(local_steps=1, batch=None):
    return replace(smallest()["train.gradients"], local_steps=local_steps, batch_size=batch)


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
    batch = limits("train.weight_gradient", take(batch=32), sizes=sizes)
    assert (batch.examples, batch.norms) == (33, {"weights": 33 * 10 * reply_checks.GROWTH})
    assert limits("train.weight_gradient", take(batch=999), sizes=sizes).examples == 550


def training(clip_norm, amount):
    sgd = SGD(0.1, 0.0, 0.9, 0.0, clip_norm)
    return rq.Train(local=rq.LocalTraining({}, "train", amount, sgd, 0.0, 0.0))


def test_training_moves_no_farther_than_its_clipped_or_noised_steps():
    sizes, sent = {"weights": 100, "buffers": 3}, {"weights": 5.0}
    epochs, steps = rq.Amount(2, None, 50), rq.Amount(None, 22, None)
    clipped = limits("train.weights", training(1.0, epochs), sizes=sizes, sent=sent)
    moved = 1.25 * reply_checks.largest_move(22, SGD(0.1, 0.0, 0.9, 0.0, 1.0), 1.0, 5.0, 0.0)
    assert clipped.norms["weights"] == pytest.approx(moved, rel=1e-3)
    free = limits("train.weights", training(None, epochs), sizes=sizes, sent=sent)
    assert free.norms["weights"] == 1e6 * (10 + 5)
    noised = [plan()]
    private = limits("train.weights", training(None, steps), sizes=sizes, sent=sent, planned=noised)
    mean = reply_checks.largest_sum(noised[0], RECORDS, num_values=100) / 32
    moved = 1.25 * reply_checks.largest_move(22, SGD(0.1, 0.0, 0.9, 0.0, None), mean, 5.0, 0.0)
    assert private.norms["weights"] == pytest.approx(moved, rel=1e-3)
    both = limits("train.weights", training(0.01, steps), sizes=sizes, sent=sent, planned=noised)
    assert both.norms["weights"] < private.norms["weights"] / 10
    assert both.norms["buffers"] == 1e12 * math.sqrt(3)


def test_running_variances_of_deep_sums_are_honest():
    """Cells whose nodes add up what they skip multiply the scale by 4, the variance by 16."""
    normalised = torch.nn.BatchNorm1d(3).train()
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
    request = replace(smallest(weights=sgd)["train.candidate"], candidates=[[0], [1]])
    request = replace(request, local_steps=11, batch_size=50)
    same = limits("train.weights", training(1.0, rq.Amount(None, 22, 50)), sizes=sizes, sent=sent)
    assert limits("train.candidate", request, sizes=sizes, sent=sent).norms == same.norms


def test_of_a_pool_every_member_moves_as_far_as_it_may_alone():
    """Each member's gradient is clipped by itself, also where noise is added to all at once."""
    steps, sizes = rq.Amount(None, 3, None), {"weights": 100}
    for clip_norm, planned in ((1.0, []), (None, [plan()])):
        alone = training(clip_norm, steps)
        pool = replace(alone, local=replace(alone.local, network={"genotypes": 4 * [{}]}))
        given = {"sizes": sizes, "planned": planned}
        one, four = (limits("train.weights", asked, **given).norms for asked in (alone, pool))
        assert four["weights"] == pytest.approx(2 * one["weights"])


def test_a_search_moves_the_alphas_by_its_steps_of_adam():
    search = smallest(weights=STEP)["train.search"].local
    search = replace(search, amount=rq.Amount(None, 4, None), alphas=ALPHA_STEP)
    sizes = {"weights": 100, "alphas": 16}
    found = limits("train.search", rq.Search(local=search), sizes=sizes)
    assert found.norms["alphas"] == pytest.approx(4 * reply_checks.ADAM * 0.01 * 4)
    sent = {"moments": 2.0}
    with_moments = limits("train.search", rq.Search(local=search), sizes=sizes, sent=sent)
    assert with_moments.norms["alphas"] == 1e6 * 4


def test_a_probe_and_an_evaluation_have_no_norm_that_noise_could_break():
    probe = smallest()["train.probe"]
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
    assert not math.isfinite(reply_checks.distance({"float32": torch.tensor([math.nan])}, {}))


# --- Whatever a reply is made of: it is refused with ReplyError, or what passes is sound


HEADER = Header("run", "search", 3, 1, 1, "0123456789abcdef")
MOST = 100.0
TENSORS = {
    "weights": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(40)},
    "alphas": {"cell": torch.tensor([[-1.0, 0.5]])},
    "buffers": {"mean": torch.zeros(3), "batches": torch.tensor(7)},
}
LAYOUTS = {name: Layout.of(tensors) for name, tensors in TENSORS.items()}
SENT: dict[str, Packed] = {name: pack(tensors) for name, tensors in TENSORS.items()}
DIGESTS = {name: layout.digest for name, layout in LAYOUTS.items()}
GOOD = Reply(17.0, metrics={"train_loss": 1.5}, states=SENT, digests=DIGESTS)
ASKED = Exchange("train.search", stage="search", settings=SEARCH, states=SENT, layouts=LAYOUTS)

JSON = json_trees(st.text(max_size=20))
PATHS = [(), ("header",), *(("header", name) for name in (*vars(HEADER), "more"))]
PATHS += [("digests",), ("digests", "weights"), ("properties",), ("properties", "changed")]
PATHS.append(("properties", "changed", "weights"))
DTYPES = st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", "<c8", "|b1", "|u1", "<U2", "|O"])
NAMES = st.sampled_from(["float32", "int64", "float16", "int8", "object", ""])


def edited(text, path, value):
    """Return JSON values with another one at ``path``, where there is such a place."""
    if not path:
        return value
    if not isinstance(text, dict):
        return text
    return {**text, path[0]: edited(text.get(path[0]), path[1:], value)}


@damaging
def put_record(content, name, record):
    content[name] = record


@damaging
def edit_bytes(content, state, start, length, new):
    record = content.array_records[f"state.{state}"]
    data = record["float32"].data
    data = data[:start] + new + data[start + length :]
    record["float32"] = Array("float32", (46,), "numpy.ndarray", data)


@damaging
def announce(content, state, shape, descr):
    record = content.array_records[f"state.{state}"]
    record["float32"] = Array("float32", shape, "numpy.ndarray", npy_of(descr, shape) + b"\0" * 64)


STATES = st.sampled_from([*LAYOUTS, "other"])
SHAPES = st.sampled_from([(), (0,), (2,), (3,), (46,), (2, 23)])
VECTORS = st.builds(np.zeros, SHAPES, DTYPES.map(lambda dtype: "<f4" if dtype == "|O" else dtype))
ANNOUNCED = st.lists(st.integers(-1, 10**12), max_size=3).map(tuple)
RECORD_NAMES = ["header", "metrics", "state.weights", "state.other", "more"]
OTHER_RECORDS = [ConfigRecord({"json": "{}"}), MetricRecord({"num-examples": 1.0}), ArrayRecord({})]
OTHER_RECORDS.append(ArrayRecord({"float32": Array(np.zeros(2, np.float32))}))
ANY_DAMAGES = st.one_of(
    st.builds(set_json, st.text(max_size=40)),
    st.builds(set_metric, st.sampled_from(["num-examples", "loss", "x" * 65]), st.floats()),
    st.builds(set_vector, STATES, VECTORS, NAMES),
    st.builds(edit_bytes, STATES, st.integers(0, 330), st.integers(0, 330), st.binary(max_size=40)),
    st.builds(announce, STATES, ANNOUNCED, st.sampled_from(["<f4", "|O", "<f8", "|V0", "<U0"])),
    st.builds(put_record, st.sampled_from(RECORD_NAMES), st.sampled_from(OTHER_RECORDS)),
)


def message_with(content):
    InProcessGrid(ClientApp(), 1)  # Flower makes messages for a task only
    return Message(content, dst_node_id=1, message_type="train.search")


@settings(max_examples=200)
@given(
    edits=st.lists(st.tuples(st.sampled_from(PATHS), JSON), max_size=2),
    damages=st.lists(ANY_DAMAGES, max_size=2),
)
@example(edits=[], damages=[set_json("[" * 990 + "]" * 990)])
def test_a_reply_is_refused_or_sound(edits, damages):
    content = encode_reply(HEADER, GOOD)
    text = json.loads(str(content["header"]["json"]))
    for path, value in edits:
        text = edited(text, path, value)
    content["header"]["json"] = json.dumps(text)
    for damage in damages:
        with suppress(KeyError):  # of what another one has taken away
            damage(content)
    try:
        reply = accept_reply(message_with(content), ASKED, header=HEADER, limits=Limits(MOST))
    except ReplyError:
        assert damages or edits
        return
    assert 1 <= reply.num_examples <= MOST
    assert set(reply.states) == set(LAYOUTS)
    for name, layout in LAYOUTS.items():
        assert {d: v.numel() for d, v in reply.states[name].items()} == layout.sizes
        for dtype, vector in reply.states[name].items():
            assert str(vector.dtype) == f"torch.{dtype}"
            assert torch.isfinite(vector * MOST).all()
    if not damages:
        assert reply.num_examples == GOOD.num_examples
        for name, packed in GOOD.states.items():
            for dtype, vector in packed.items():
                assert torch.equal(reply.states[name][dtype], vector)


SAID = st.dictionaries(st.sampled_from(sorted(FORMS)), JSON)


@given(SAID, st.sampled_from([*sum_requests.PROPERTIES.items()]))
def test_properties_are_refused_or_pass_and_nothing_else(said, asked):
    action, (form, _) = asked
    try:
        properties = rq.decode_properties(action, json.loads(json.dumps(said)))
    except ReplyError:
        return
    assert set(properties) == set(said) <= set(get_type_hints(form))
    assert type(properties.get("client", 0)) is int


@pytest.mark.parametrize("descr", ["<f4", "<f8", "|V1000"])
@pytest.mark.parametrize("shape", [(10**9,), (2**62,), (10**6, 10**6)])
def test_memory_is_that_of_what_was_sent_not_of_what_it_announces(descr, shape):
    content = encode_reply(HEADER, GOOD)
    announce("weights", shape, descr)(content)
    message = message_with(content)
    tracemalloc.start()
    try:
        refuses("malformed", accept_reply, message, ASKED, header=HEADER, error=ReplyError)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
