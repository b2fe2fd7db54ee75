"""One hostile client among three: it is named and left out, and the run goes on to a sound network.

Whole runs, inline; the hostile client is the real one, with its answers changed on their way out.
"""

import json
from dataclasses import replace

import pytest
import torch

from fednas_flwr.algorithms.fdnas import group_name
from fednas_flwr.client import answer as entrance
from fednas_flwr.models.networks import load
from fednas_flwr.privacy.actions import ACTIONS

from ..refusals import refuses
from .test_groups import CFDNAS

BAD = 1
PRIVATE = [
    *("privacy=dp", "search_space.norm=group", "retrain.norm=group", "rounds=1"),
    *("privacy.local_steps=1", "privacy.retrain.local_steps=1", "retrain.rounds=1"),
    *("retrain.weights.clip_norm=null", "retrain.batch_size=8", "privacy.epsilon=50"),
]
EXACT = ["algorithm=fedavg", "stages=[retrain,evaluate,export]", "retrain.rounds=2"]
SEARCHES = {
    "train.weight_gradient": ["algorithm=dp_fnas", "algorithm.batch_size=8", *PRIVATE],
    "train.search": ["algorithm=fed_darts", "algorithm.weights.clip_norm=null", *PRIVATE],
    "train.weights": ["algorithm=fedavg", "stages=[retrain,evaluate,export]", *PRIVATE],
}


@pytest.fixture
def lying(monkeypatch):
    """``lying(action, change)``: ``change`` is made to client 1's replies to ``action``."""
    answers = dict(entrance.ANSWERS)

    def lie(action, change):
        def answer(client, request, asked):
            reply = answers[action](client, request, asked)
            return change(reply) if client.index == BAD else reply

        monkeypatch.setitem(entrance.ANSWERS, action, answer)
        monkeypatch.setattr(entrance, "check_fields", lambda *_: None)

    return lie


def telling(**properties):
    return lambda reply: replace(reply, properties={**reply.properties, **properties})


def filled(value):
    def change(reply):
        states = {
            name: {d: torch.full_like(v, value) for d, v in packed.items()}
            for name, packed in reply.states.items()
        }
        return replace(reply, states=states)

    return change


def failures(run):
    """Return who failed and why, but for client 2 that has no test records."""
    failed = run.failed
    return [(e["client"], e["reason"]) for e in failed if "split is empty" not in e["reason"]]


def assert_sound(run):
    network = load(run.folder).network
    assert all(torch.isfinite(tensor).all() for tensor in network.state_dict().values())
    exported = run.the("exported")
    assert exported["onnx_max_difference"] < 1e-3


# --- what is sent


@pytest.mark.parametrize(
    ("action", "value", "overrides"),
    [
        ("train.weight_gradient", 1e3, SEARCHES["train.weight_gradient"]),
        ("train.search", 1e16, SEARCHES["train.search"]),
        ("train.weights", 10, SEARCHES["train.weights"]),
        ("train.weights", 1e3, EXACT),
    ],
)
def test_values_that_no_client_can_have_spoil_nothing(action, value, overrides, lying, run_inline):
    lying(action, filled(value))
    run = run_inline(*overrides)
    assert failures(run)
    assert {client for client, _ in failures(run)} == {BAD}
    assert "where an honest client's is at most" in failures(run)[0][1]
    assert_sound(run)


def test_a_negative_variance_spoils_nothing(lying, run_inline):
    def change(reply):
        buffers = filled(-1.0)(reply).states["buffers"]
        return replace(reply, states={**reply.states, "buffers": buffers})

    lying("train.weights", change)
    run = run_inline(*EXACT)
    assert {client for client, _ in failures(run)} == {BAD}
    assert "running_var" in failures(run)[0][1]
    assert_sound(run)


# --- what is declared


def schedule_of(run):
    event = run.the("privacy")
    return event["schedule"], [told["client"] for told in event["clients"]]


def test_a_client_that_declares_one_record_raises_nobodys_noise(lying, run_inline):
    overrides = [*SEARCHES["train.weights"], "stages=[retrain]", "privacy.epsilon=4"]
    overrides += ["retrain.batch_size=2"]
    two = run_inline(*overrides, "clients=3")
    lying("query.describe", telling(splits={"train": 1, "validation": 1, "test": 1}))
    run = run_inline(*overrides)
    (failure,) = failures(run)
    assert failure[0] == BAD
    assert f"client {BAD}: it declares 1 train records, where the median client has" in failure[1]
    schedule, clients = schedule_of(run)
    assert clients == [0, 2]
    noise = [planned["noise_multiplier"] for planned in schedule]
    assert noise == pytest.approx([p["noise_multiplier"] for p in schedule_of(two)[0]], rel=0.2)
    lenient = run_inline(*overrides, "privacy.fewest_records=0", "runtime.quorum=0.3")
    assert schedule_of(lenient)[0][0]["noise_multiplier"] > 1.5 * noise[0]


def test_a_client_that_declares_a_billion_records_is_left_out(lying, run_inline):
    lying("query.describe", lambda reply: replace(reply, num_examples=1e9))
    run = run_inline(*EXACT)
    (failure,) = failures(run)
    assert failure[0] == BAD
    assert "declares 1e+09 records" in failure[1]
    assert_sound(run)


@pytest.mark.parametrize(
    "properties",
    [
        {"tag": ["a"]},  # at the guard
        {"tag": "../../etc"},  # where groups are made
    ],
)
def test_a_tag_that_names_no_group_leaves_a_client_out(properties, lying, run_inline):
    lying("query.describe", telling(**properties))
    run = run_inline(*CFDNAS, "algorithm.inherit=false stages=[search] algorithm.group_rounds=1")
    (failure,) = failures(run)
    assert failure[0] == BAD
    groups = json.loads((run.folder / "groups.json").read_text())
    assert groups == {"a": [3], "b": [0, 2, 4]}
    assert sorted(path.name for path in (run.folder / "groups").iterdir()) == ["a", "b"]


def test_the_metrics_of_every_action_are_its_own():
    named = {name for action in ACTIONS.values() for name in action.metrics}
    assert all(name.endswith(("loss", "accuracy")) for name in named)
    for action in ACTIONS.values():  # what is released with privacy may be told without
        assert action.releases & named <= action.metrics


@pytest.mark.parametrize(
    "label", ["../x", "", ".hidden", "a" * 65, "a/b", "a\nb", "\U00010400" * 64, ["a"], None]
)
def test_only_what_names_a_folder_names_a_group(label):
    refuses("", group_name, {"tag": label}, BAD, "tag")
    assert group_name({"tag": "ward 3.b-C_4"}, BAD, "tag") == "ward 3.b-C_4"
