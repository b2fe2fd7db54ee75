"""DPNAS' rounds against local training, a weighted average, and accuracies counted by hand."""

from dataclasses import replace

import pytest
import torch

from fednas_flwr.data.loaders import step_batch
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.protocol.states import unpack
from fednas_flwr.search.candidate import Candidate

from ..asked import filled, spied
from ..rows import seldom
from .plain import accuracy_of, average, copied, make_sgd, step

pytestmark = pytest.mark.usefixtures("one_cell")
DPNAS = ["algorithm=dpnas", "search_space=dp_cells", "retrain=dp_cells", "clients=2", "rounds=3"]
DPNAS += ["search_space.widths=[4]", "search_space.head=8", "algorithm.batch_size=16"]
DPNAS += ["partition=quantity", "partition.fractions=[0.75,0.25]", "algorithm.warm_up_rounds=1"]
DPNAS += ["algorithm.trained_candidates=3", "algorithm.local_steps=2", "algorithm.weights.lr=0.5"]
DPNAS += ["algorithm.rewarded_candidates=4", "algorithm.final_candidates=5", "dataset.flip=false"]
DPNAS += ["algorithm.dp_aware=null", "dataset.crop_padding=0"]


@pytest.fixture(scope="module")
def searched(compose_config, federate):
    """A whole search; what was asked, and weights and sampler after each round (0: before)."""
    federation = federate(compose_config(*DPNAS))
    strategy = federation.strategy
    asked, run_round = spied(federation), strategy.run_round

    def state():
        tensors = (strategy.named_arrays().to_torch_state_dict(), strategy.sampler.tensors())
        return [{name: tensor.clone() for name, tensor in named.items()} for named in tensors]

    def remembered(server_round, num_rounds):
        metrics = run_round(server_round, num_rounds)
        federation.rounds.append(state())
        return metrics

    federation.rounds, strategy.run_round = [state()], remembered
    strategy.start(federation.grid, num_rounds=3)
    federation.asked = [(exchange.action, exchange.settings.candidates) for exchange, _ in asked]
    assert not federation.failed
    return federation


def supernet_after(federation, server_round):
    supernet = supernet_space(federation.config, federation.data[0]).supernet()
    weights = federation.rounds[server_round][0]
    with torch.no_grad():
        for name, weight in supernet.weights().items():
            weight.copy_(weights[f"weights.{name}"])
    return supernet


@pytest.mark.parametrize("server_round", [1, 2])
def test_a_round_is_steps_on_each_candidate_and_a_weighted_average(server_round, searched):
    """Plain SGD with momentum, on the batches that follow those of the round before."""
    config = searched.config
    trained = [paths for action, paths in searched.asked if action == "train.candidate"]
    settings = config.algorithm.weights.at_round(server_round, 3)
    counts = [len(client.data.train) for client in searched.clients]
    assert counts[0] > 2 * counts[1]
    states = []
    for client in searched.clients:
        supernet, train = supernet_after(searched, server_round - 1).train(), client.data.train
        sgd = make_sgd(supernet.weights().values(), settings)
        purpose = ("batches", "train", client.index)
        for number in range(6):
            place = {"step": 6 * (server_round - 1) + number, "seed": config.seed}
            rows = step_batch(len(train), batch_size=16, **place, purpose=purpose)
            x, y = train.batch(rows, "cpu")
            logits = supernet.body(x, path=trained[server_round - 1][number // 2])
            step(sgd, torch.nn.functional.cross_entropy(logits, y))
        states.append(copied(supernet.weights()))
    before, after = (searched.rounds[server_round - i][0] for i in (1, 0))
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    for name, mean in average(states, counts).items():
        torch.testing.assert_close(after[f"weights.{name}"], mean.float(), rtol=1e-4, atol=1e-5)


def test_rewards_are_accuracies_on_all_validation_records_and_the_best_is_found(searched):
    rewarded = searched.named("rewarded")
    assert [(e["round"], len(e["paths"])) for e in rewarded] == [(2, 4), (3, 4), (3, 5)]
    measured = [paths for action, paths in searched.asked if action == "evaluate.candidates"]
    for event, asked in zip(rewarded, measured, strict=True):
        assert event["paths"] == asked
        assert event["noise"] == 0
        supernet = supernet_after(searched, event["round"]).eval()
        for path, reward in zip(event["paths"], event["rewards"], strict=True):
            assert reward == pytest.approx(accuracy_of(Candidate(supernet, path), searched.clients))
    best = max(rewarded[-1]["rewards"])
    assert searched.strategy.values["reward"] == best
    path = searched.strategy.space.path(searched.strategy.derive())
    assert rewarded[-1]["rewards"][rewarded[-1]["paths"].index(path)] == best
    assert len({tuple(path) for _, paths in searched.asked for path in paths}) > 10


def test_the_controller_learns_after_the_warm_up_only(searched):
    samplers = [sampler for _, sampler in searched.rounds]
    names = [name for name in samplers[0] if name.startswith("policy.")]
    rounds = zip(samplers[:-1], samplers[1:], strict=True)
    moved = [any(not torch.equal(old[n], new[n]) for n in names) for old, new in rounds]
    assert moved == [False, True, True]
    actions = [action for action, _ in searched.asked]
    train, measure = "train.candidate", "evaluate.candidates"
    assert actions == [train, train, measure, train, measure, measure]


@pytest.mark.parametrize("aggregate", ["mean", seldom("median")])
def test_a_liar_claims_all_right_at_most_and_no_median_hears_it(aggregate, search):
    short = ["rounds=1", "algorithm.warm_up_rounds=0", f"aggregate={aggregate}"]
    short += ["clients=3", "partition.fractions=[0.4,0.3,0.3]"]

    def lying(exchange, client, reply):
        reply = replace(reply, num_examples=100)
        if (exchange.action, client) != ("evaluate.candidates", 0):
            return reply
        return filled(reply, 1e3, ["rewards"])

    federation = search(*DPNAS, *short, change=lying)
    rewarded = [event["rewards"] for event in federation.named("rewarded")]
    measured = [
        [reply.states["rewards"]["float32"] for reply in replies.values()]
        for exchange, replies in federation.asked
        if exchange.action == "evaluate.candidates"
    ]
    assert len(rewarded) == len(measured) == 2
    for found, (_, *others) in zip(rewarded, measured, strict=True):
        held = torch.stack([torch.ones_like(others[0]), *others])
        expected = held.mean(0) if aggregate == "mean" else held.median(0).values
        torch.testing.assert_close(torch.tensor(found), expected)


@pytest.mark.parametrize("name", ["controller", "random"])
def test_no_degenerate_candidate_is_trained_measured_or_found(name, compose_config, federate):
    """From samplers that like ops without weights, of whose own draws many are degenerate."""
    strategy = federate(compose_config(*DPNAS, f"algorithm.sampler={name}")).strategy
    sampler, space = strategy.sampler, strategy.space
    generator = torch.Generator().manual_seed(0)
    if name == "controller":
        with torch.no_grad():
            for decoder in sampler.policy.decoders:
                decoder.bias[:4] += 3  # none, the pools and the skip connection
        plain = [space.genotype(path) for path in sampler.draw(300, generator)]
        assert sum(space.is_degenerate(genotype) for genotype in plain) > 20
    else:
        sampler.choices = (4,) * 14 + (10,)  # the last edge alone may have weights
    for _ in range(3):
        paths = sampler.sample(60, generator)
        assert not any(space.is_degenerate(space.genotype(path)) for path in paths)
        sampler.learn(paths, [0.5] * len(paths))


@pytest.mark.parametrize("momentum", [seldom("reset"), "averaged"])
def test_messages_carry_paths_and_give_what_whole_states_do(momentum, compose_config, federate):
    """To the last bit; whole states are averaged for the paths, and all else stays as it was."""
    config = compose_config(*DPNAS, f"training.momentum={momentum}")

    def searched(*, whole):
        federation = federate(config)
        strategy = federation.strategy
        ask, train = strategy.ask, strategy.train

        def told(action, settings, **given):
            if whole:
                settings = replace(settings, sparse=False)
                states = strategy.states if action == "train.candidate" else strategy.model
                given |= {"states": states}
                if action == "train.candidate":
                    given["layouts"] = strategy.layouts
            return ask(action, settings, **given)

        def restored(action, settings, *, only):
            """Average whole states, and keep of them what the paths have."""
            before = {name: dict(packed) for name, packed in strategy.states.items()}
            average, metrics = strategy.average(told(action, settings))
            for state, packed in average.items():
                layout = strategy.layouts[state]
                kept = unpack(before[state], layout)
                for name, tensor in unpack(packed, layout).items():
                    if name not in only[state]:
                        tensor.copy_(kept[name])
            strategy.move(average)
            return metrics

        strategy.ask = told
        strategy.train = restored if whole else train
        strategy.start(federation.grid, num_rounds=2)
        assert not federation.failed
        return federation

    sparse, dense = searched(whole=False), searched(whole=True)
    found = sparse.strategy.named_arrays().to_torch_state_dict()
    for name, tensor in dense.strategy.named_arrays().to_torch_state_dict().items():
        assert torch.equal(found[name], tensor)
    rewards = [[e["rewards"] for e in f.named("rewarded")] for f in (sparse, dense)]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 2
    rounds = [f.named("round") for f in (sparse, dense)]
    assert [e["metrics"] for e in rounds[0]] == [e["metrics"] for e in rounds[1]]
    for narrow, wide in zip(*rounds, strict=True):
        for key in ("bytes_sent", "bytes_received"):
            assert narrow[key] < 0.9 * wide[key]
