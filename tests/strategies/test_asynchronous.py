"""Rounds that end with the first replies, against arithmetic by hand and a queue by hand."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr import compose, run
from fednas_flwr.builders.configuration import check_combinations
from fednas_flwr.builders.strategies import make_retraining
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.asynchronous import FirstReplies, Late, moved_on
from fednas_flwr.exchange.courier import QuorumError
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.federation.grids import InProcessGrid
from fednas_flwr.reporting.runs import read_run
from fednas_flwr.search.settings import Asynchronous

CLIENTS = (
    *("clients=3", "partition=quantity", "partition.fractions=[0.5,0.3,0.2]"),
    *("retrain.batch_size=16", "rounds=3"),
)
SHAPES = {"input_shape": [3, 8, 8], "num_classes": 3}
ROUNDS = 5


def terms(buffer: int, delays: list[float] | None = None, staleness: float = 0.5) -> Asynchronous:
    return Asynchronous(buffer, staleness, delays)


def retraining(compose_config, federate, asynchronous: Asynchronous | None):
    config = compose_config("algorithm=random_search", *CLIENTS)
    federation = federate(config)
    config = replace(config, asynchronous=asynchronous)
    federation.strategy, _ = make_retraining(
        config,
        {"name": "plain_cnn", **SHAPES},
        federation.courier,
        federation.checkpoints,
    )
    return federation


def assert_same(one, other) -> None:
    for name, packed in one.items():
        for dtype, vector in packed.items():
            assert torch.equal(vector, other[name][dtype]), (name, dtype)


def test_rounds_that_wait_for_all_are_those_without_the_setting(compose_config, federate):
    found = []
    for asynchronous in (None, terms(3), terms(3, [2.0, 1.0, 3.0])):
        federation = retraining(compose_config, federate, asynchronous)
        federation.strategy.start(federation.grid, num_rounds=2)
        found.append(federation.strategy.states)
    assert_same(found[0], found[1])
    for name, packed in found[0].items():  # in another order
        for dtype, vector in packed.items():
            torch.testing.assert_close(found[2][name][dtype], vector, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["fed_darts", "fdnas"])
def test_searches_too(compose_config, federate, algorithm):
    space = ["search_space=mbconv_small"] if algorithm == "fdnas" else []
    config = compose_config(f"algorithm={algorithm}", *space, "clients=2", "rounds=1")
    found = []
    for asynchronous in (None, terms(2)):
        federation = federate(replace(config, asynchronous=asynchronous))
        federation.strategy.start(federation.grid, num_rounds=1)
        found.append(federation.strategy.states)
    assert_same(*found)


def by_hand(buffer: int, delays: list[float], rounds: int) -> list[dict[int, int]]:
    """Return, of each round, how stale the replies are that end it, by client."""
    queue: list[tuple[float, int, int]] = []  # when, client, round in which it began
    clock, idle, found = 0.0, set(range(len(delays))), []
    for number in range(1, rounds + 1):
        for client in sorted(idle):
            heapq.heappush(queue, (clock + delays[client], client, number))
        idle, ended = set(), {}
        while len(ended) < buffer:
            clock, client, begun = heapq.heappop(queue)
            ended[client] = number - begun
            idle.add(client)
        found.append(ended)
    return found


@pytest.mark.parametrize("delays", [[1.0, 1.5, 3.2], [1.0, 10.0, 10.5]])
def test_replies_come_by_the_delays_and_count_by_their_staleness(compose_config, federate, delays):
    federation = retraining(compose_config, federate, terms(2, delays))
    strategy, events = federation.strategy, federation.events
    seen: list[list[tuple[Late, dict]]] = []
    ask = strategy.first.ask

    def recorded(*arguments, **named):
        seen.append([])
        for client, late in ask(*arguments, **named):
            seen[-1].append((late, strategy.states))
            yield client, late

    strategy.first.ask = recorded
    first = {n: {d: v.clone() for d, v in p.items()} for n, p in strategy.states.items()}
    strategy.start(federation.grid, num_rounds=ROUNDS)
    rounds = [event for event in events if event["event"] == "round"]
    told = [
        {int(client): metrics["staleness"] for client, metrics in event["clients"].items()}
        for event in rounds
    ]
    assert told == by_hand(2, delays, ROUNDS)
    assert max(max(of_round.values()) for of_round in told) >= 1
    present = first["weights"]["float32"].double().numpy()
    for replies in seen:
        weights = [late.reply.num_examples for late, _ in replies]
        moved = [
            present
            + (late.reply.states["weights"]["float32"] - late.sent["weights"]["float32"])
            .double()
            .numpy()
            / np.sqrt(1 + late.staleness)
            for late, _ in replies
        ]
        present = np.average(moved, axis=0, weights=weights)
    np.testing.assert_allclose(
        strategy.states["weights"]["float32"].numpy(), present, rtol=1e-4, atol=1e-6
    )
    again = retraining(compose_config, federate, terms(2, delays))
    again.strategy.start(again.grid, num_rounds=ROUNDS)
    assert_same(strategy.states, again.strategy.states)


def test_late_statistics_stay_above_zero_and_counters_are_the_clients() -> None:
    def packed(value: float, number: int) -> dict[str, torch.Tensor]:
        return {"float32": torch.tensor([value]), "int64": torch.tensor([number])}

    states = {"weights": {"float32": torch.tensor([1.0])}, "buffers": packed(0.1, 4)}
    sent = {"weights": {"float32": torch.tensor([5.0])}, "buffers": packed(9.0, 2)}
    own = {"weights": {"float32": torch.tensor([7.0])}, "buffers": packed(0.2, 7)}
    late = Late(Reply(num_examples=1, states=own), sent, staleness=3)
    moved = moved_on(late, states, 0.5)
    assert moved["weights"]["float32"].item() == pytest.approx(1 + 2 / 2)
    assert moved["buffers"]["float32"].item() == pytest.approx(0.15)
    assert moved["buffers"]["int64"].item() == 7
    assert moved_on(replace(late, staleness=0), states, 0.5) is own
    assert moved_on(late, states, 0.0)["weights"]["float32"].item() == 3.0


class AllAtOnce(InProcessGrid):
    """Gives all replies at once, each of them twice."""

    def pull_messages(self, message_ids):
        replies = [m for i in message_ids for m in super(AllAtOnce, self).pull_messages([i])]
        return [reply for reply in replies for _ in range(2)]


class Silent(InProcessGrid):
    """Has no reply of the last client."""

    def pull_messages(self, message_ids):
        last = max(self._contexts)
        kept = [i for i in message_ids if i in self._messages]
        answering = [i for i in kept if self._messages[i].metadata.dst_node_id != last]
        connecting = [
            i for i in kept if self._messages[i].metadata.message_type.startswith("query.")
        ]
        return super().pull_messages(connecting or answering)


def test_replies_that_come_together_are_all_taken(compose_config, federate):
    federation = retraining(compose_config, federate, terms(2))
    events = federation.events
    federation.grid.__class__ = AllAtOnce
    federation.strategy.start(federation.grid, num_rounds=3)
    rounds = [sorted(event["clients"]) for event in events if event["event"] == "round"]
    assert rounds == [["0", "1"], ["0", "2"], ["0", "1"]]


def test_a_client_that_never_answers_is_told_of_and_stops_nobody(compose_config, federate):
    federation = retraining(compose_config, federate, terms(2))
    courier, events = federation.courier, federation.events
    courier.deadline_s = 1e6
    federation.grid.__class__ = Silent
    federation.strategy.start(federation.grid, num_rounds=3)
    rounds = [sorted(event["clients"]) for event in events if event["event"] == "round"]
    assert rounds == [["0", "1"]] * 3
    first = federation.strategy.first = FirstReplies(courier, terms(3), "retrain")
    courier.deadline_s = 0.2
    with pytest.raises(QuorumError, match=r"client 2: no reply within 0.2 s .* 2 of the 3 replies"):
        federation.strategy.start(federation.grid, num_rounds=4)
    assert events[-1]["event"] == "client_failed"
    assert not first._flights


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=fnas"], "with algorithm=fnas: it is for fed_darts, fednas, fdnas, zero_cost "),
        (["retrain.evaluate_every=1"], "with retrain.evaluate_every=1: it would wait for clients"),
        (["aggregate=median"], "aggregate=median with asynchronous.buffer=2: expected 3 or more"),
        (["privacy=dp"], "with privacy=dp: clients commit to a known number"),
        (["secure_sum=true"], "with secure_sum=true"),
        (["clients=9", "clients_per_round=4"], "with clients_per_round"),
        (["momentum=averaged"], "with momentum=averaged: moments of other models"),
        (["retrain.exchange=gradients"], "with retrain.exchange=gradients"),
        (["clients=1"], "with clients=1: asynchronous.buffer=2 is out of range"),
        (["clients=4"], "asynchronous.delays of 3 clients: expected one number for each"),
    ],
)
def test_what_needs_all_replies_is_refused(overrides, words):
    setting = "asynchronous={buffer: 2, staleness: 0.5, delays: [1, 2, 3]}"
    with pytest.raises(ConfigError, match=words):
        compose(setting, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["aggregate=trimmed_mean", "trim=2"], "of the 3 replies that asynchronous.buffer=3 lets"),
        (["aggregate=krum", "malicious=1"], "needs 5 replies, and asynchronous.buffer=3 lets"),
    ],
)
def test_robust_averages_are_of_the_replies_that_a_round_waits_for(overrides, words):
    common = ("algorithm=fedavg", "algorithm.network=plain_cnn", "clients=9", *overrides)
    stages = "stages=[retrain,evaluate,export]"
    setting = "asynchronous={buffer: 3, staleness: 0.5, delays: null}"
    assert compose(*common, stages).clients == 9
    with pytest.raises(ConfigError, match=words):
        compose(*common, stages, setting)


def test_a_heavy_client_is_held_to_its_share_of_the_replies_that_end_a_round(
    compose_config, federate
):
    """By what it declares: it has .4 of all, but .67 of the first three."""
    sizes = ["clients=4", "partition=quantity", "partition.fractions=[0.4,0.4,0.1,0.1]"]
    found = []
    for largest in (1.0, 0.5):
        config = compose_config("algorithm=random_search", *sizes, "rounds=3")
        federation = federate(config)
        courier = federation.courier
        courier.largest_share = largest
        asynchronous = terms(3, [1.0, 50.0, 1.0, 1.0])
        strategy, _ = make_retraining(
            replace(config, asynchronous=asynchronous),
            {"name": "plain_cnn", **SHAPES},
            courier,
            federation.checkpoints,
        )
        weights: dict[int, float] = {}
        found.append(weights)
        ask = strategy.first.ask

        def recorded(*arguments, ask=ask, weights=weights, **named):
            for client, late in ask(*arguments, **named):
                weights[client] = late.reply.num_examples
                yield client, late

        strategy.first.ask = recorded
        strategy.start(federation.grid, num_rounds=2)
        told = [event["message"] for event in federation.events if event["event"] == "warning"]
    free, held = found
    assert set(free) == {0, 2, 3}
    declared = courier.examples
    scale = (declared[2] + declared[3]) / declared[0]
    assert scale < 0.7
    assert held == {0: pytest.approx(free[0] * scale), 2: free[2], 3: free[3]}
    (message,) = told
    assert "client 0 may weigh" in message


def test_retraining_after_a_search_that_asks_nobody(compose_config, tmp_path):
    config = compose_config(
        *("algorithm=zero_cost", "algorithm.draws=3", "rounds=1", "clients=3"),
        f"run_dir={tmp_path / 'run'}",
    )
    check_combinations(config := replace(config, asynchronous=terms(2, [1.0, 2.0, 5.0])))
    rounds = read_run(run(config).folder).rounds("retrain")
    assert [sorted(event["clients"]) for event in rounds] == [["0", "1"], ["0", "1"]]


def test_a_whole_run_is_reported(compose_config, tmp_path):
    config = compose_config("clients=3", f"run_dir={tmp_path / 'run'}")
    result = run(replace(config, asynchronous=terms(2, [1.0, 2.0, 5.0])))
    assert result.genotype is not None
    rounds = read_run(result.folder).rounds("search")
    assert all(len(event["clients"]) == 2 for event in rounds)
    assert (result.folder / "report.html").is_file()
