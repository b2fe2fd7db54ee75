"""FDNAS against local loops and a weighted average; the sparse exchange against the dense one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Message

from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.protocol.messages import Header, Reply, encode_reply
from fednas_flwr.protocol.states import Layout, fill_unchanged, pack, take_part
from fednas_flwr.search.proxyless import (
    alpha_gradient,
    draw_paths,
    gate_gradient,
    rescale,
    uniform_alphas,
)
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.server.reply_checks import accept_reply
from fednas_flwr.spaces.costs import space_costs

from ..asked import smallest

SMALL = [
    *("algorithm=fdnas", "search_space=mbconv_small", "retrain=mbconv", "clients=2"),
    *("search_space.width=0.25", "search_space.norm=group", "search_space.candidates=fdnas"),
    *("partition=quantity", "partition.fractions=[0.75,0.25]", "algorithm.batch_size=16"),
    *("algorithm.local_epochs=2", "algorithm.warm_up_rounds=1", "algorithm.alphas.lr=0.1"),
]
ROUNDS = 3


@pytest.fixture(scope="module")
def dense(compose_config, federate):
    return searched(compose_config, federate)


def searched(compose_config, federate, *overrides):
    federation = federate(compose_config(*SMALL, *overrides))
    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    federation.rounds = [e for e in federation.events if e["event"] == "round"]
    assert not [e for e in federation.events if e["event"] == "client_failed"]
    return federation


def local_epochs(supernet, client, generator, algorithm, *, warm_up):
    """Two passes of ProxylessNAS, written out with torch's own backward."""
    weights, alphas = list(supernet.weights().values()), supernet.alphas()["blocks"]
    sgd = torch.optim.SGD(
        weights,
        lr=algorithm.weights.lr,
        momentum=algorithm.weights.momentum,
        weight_decay=algorithm.weights.weight_decay,
        nesterov=True,
    )
    adam = torch.optim.Adam([alphas], lr=algorithm.alphas.lr, betas=(0.0, 0.999))
    supernet.train()

    def batches(split):
        while True:
            yield from client.epoch(split, batch_size=16, generator=generator)

    for _ in range(2):
        validation = batches(client.data.validation)
        for x, y in client.epoch(client.data.train, batch_size=16, generator=generator):
            if not warm_up:
                batch = next(validation)
                paths = draw_paths(alphas, mode="two", generator=generator)
                gates, _ = gate_gradient(supernet, batch, paths)
                alphas.grad = alpha_gradient(gates, alphas, paths)
                old = alphas.detach().clone()
                adam.step()
                with torch.no_grad():
                    alphas.copy_(rescale(alphas, old, paths))
            drawn = uniform_alphas(alphas.detach()) if warm_up else alphas
            path = draw_paths(drawn, mode="one", generator=generator).tolist()
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(supernet.body(x, paths=path), y).backward()
            sgd.step()


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_round_is_local_epochs_and_a_weighted_average(warm_up, compose_config, federate):
    """One round: a second one would start from other last digits, which group norm amplifies."""
    config = compose_config(*SMALL, f"algorithm.warm_up_rounds={int(warm_up)}")
    federation, algorithm = federate(config), config.algorithm
    federation.strategy.start(federation.grid, num_rounds=1)
    with seeded(config.seed, "supernet"):
        supernet = supernet_space(config, federation.data[0]).supernet()
    state = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    counts = [len(client.data.train) for client in federation.clients]
    assert counts[0] > 2 * counts[1]
    states = []
    for client in federation.clients:
        supernet.load_state_dict(state)
        generator = make_generator(config.seed, "search", 1, client.index, "search")
        local_epochs(supernet, client, generator, algorithm, warm_up=warm_up)
        states.append({n: t.clone().double().numpy() for n, t in supernet.state_dict().items()})
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    for name, initial in state.items():
        mean = torch.as_tensor(np.average([s[name] for s in states], axis=0, weights=counts))
        actual = arrays[name if name.startswith("alphas.") else f"weights.{name}"]
        torch.testing.assert_close(actual, mean.to(initial.dtype), rtol=1e-5, atol=1e-6)


def test_alphas_move_after_the_warm_up_only(dense):
    first, second, third = (event["metrics"] for event in dense.rounds)
    assert "validation_loss" not in first
    assert "validation_loss" in second
    assert first["alpha_entropy"] > second["alpha_entropy"] > third["alpha_entropy"]
    assert first["alpha_entropy"] == pytest.approx(np.log(6), abs=1e-4)  # 1e-3 * randn


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_sparse_exchange_gives_the_same_bits_for_fewer_bytes(
    norm, dense, compose_config, federate
):
    if norm == "batch":
        dense = searched(compose_config, federate, "search_space.norm=batch")
    few = ["algorithm.sparse=true", f"search_space.norm={norm}"]
    sparse = searched(compose_config, federate, *few)
    for state, packed in dense.strategy.states.items():
        for dtype, vector in packed.items():
            assert torch.equal(vector, sparse.strategy.states[state][dtype]), state
    for one, other in zip(dense.rounds, sparse.rounds, strict=True):
        assert one["metrics"] == other["metrics"]
        assert other["bytes_sent"] == one["bytes_sent"]
        assert other["bytes_received"] < 0.9 * one["bytes_received"]


def test_a_part_is_what_has_changed_and_fills_in_to_the_whole():
    sent = {"a": torch.zeros(2, 3), "b": torch.ones(4), "n": torch.tensor(3)}
    new = sent | {"b": torch.tensor([1.0, 1.0, 2.0, 1.0])}
    layout = Layout.of(sent)
    assert layout.marks(["b"]) == "010"
    assert layout.marked("010") == {"b"}
    part = take_part(pack(new), layout, ["b"])
    assert {dtype: vector.tolist() for dtype, vector in part.items()} == {"float32": [1, 1, 2, 1]}
    whole = fill_unchanged(part, pack(sent), layout, ["b"])
    assert all(torch.equal(whole[dtype], vector) for dtype, vector in pack(new).items())
    nothing = take_part(pack(sent), layout, layout.marked("000"))
    assert nothing == {}
    same = fill_unchanged(nothing, pack(sent), layout, [])
    assert all(torch.equal(same[dtype], vector) for dtype, vector in pack(sent).items())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["search_space=nasbench201_small"], "samples paths of blocks; set search_space=mbconv"),
        (["algorithm.alphas.weight_decay=1e-3"], "ops that are not sampled must keep"),
        (["privacy=dp", "search_space.norm=batch"], "set search_space.norm=group"),
    ],
)
def test_what_does_not_fit_is_refused(compose_config, overrides, sentence):
    small = SMALL
    if overrides[0].startswith("search_space="):
        small = ["algorithm=fdnas", "clients=2"]
    with pytest.raises(ConfigError, match=sentence):
        compose_config(*small, *overrides)


HARDWARE = (
    "{table: null, unit: multiply_adds, target: %s, loss: additive, scale: 1.0, exponent: 1.0}"
)


def test_a_target_that_no_network_has_is_refused(compose_config, federate):
    with pytest.raises(ConfigError, match=r"target=1e\+12 multiply_adds cannot be reached: .* to"):
        federate(compose_config(*SMALL, f"algorithm.hardware={HARDWARE % '1e12'}"))


@pytest.mark.run
def test_cost_pulls_the_alphas(compose_config, federate):
    few = ["algorithm.local_epochs=1", "algorithm.warm_up_rounds=0", "algorithm.alphas.lr=0.3"]
    costs = []
    for scale in ("1e-6", "100.0"):
        hardware = (HARDWARE % "7e4").replace("scale: 1.0", f"scale: {scale}")
        federation = searched(compose_config, federate, *few, f"algorithm.hardware={hardware}")
        strategy, space = federation.strategy, federation.strategy.space
        costs.append(space_costs(space, None).of_path(space.path(strategy.derive())))
    assert costs[1] < costs[0]


def test_hostile_sparse_replies_are_refused():
    """Whatever the text of changed tensors says, nothing but whole, finite states is accepted."""

    layout = Layout.of({"a": torch.zeros(3), "b": torch.zeros(2)})
    sent = {"weights": {"float32": torch.arange(5.0)}}
    header = Header("run", "search", 1, 1, 0, "nonce")
    part = {"weights": {"float32": torch.tensor([7.0, 8.0])}}
    digest = layout.part(layout.marked("01")).digest

    def accepted(changed, states=part, digest=digest):
        properties = {} if changed is None else {"changed": changed}
        reply = Reply(1, states=states, digests={"weights": digest}, properties=properties)
        request = Message(encode_reply(header, reply), 1, "train")
        message = Message(encode_reply(header, reply), reply_to=request)
        return accept_reply(
            message,
            Exchange(
                "train.search",
                stage="search",
                settings=replace(smallest()["train.search"], sparse=True),
                states=sent,
                layouts={"weights": layout},
            ),
            header=header,
        )

    assert accepted({"weights": "01"}).states["weights"]["float32"].tolist() == [0, 1, 2, 7, 8]
    assert sent["weights"]["float32"].tolist() == [0, 1, 2, 3, 4]
    for changed in (None, {}, {"weights": "011"}, {"weights": "0x"}, {"weights": 1}, "01"):
        with pytest.raises(ReplyError, match="changed"):
            accepted(changed)
    for changed in ("00", "10", "11"):
        with pytest.raises(ReplyError, match="names, shapes or dtypes|sizes"):
            accepted({"weights": changed})
    with pytest.raises(ReplyError, match="sizes"):
        accepted({"weights": "10"}, digest=layout.part(layout.marked("10")).digest)
    wild = {"weights": {"float32": torch.tensor([7.0, float("inf")])}}
    with pytest.raises(ReplyError, match="not finite"):
        accepted({"weights": "01"}, states=wild)
