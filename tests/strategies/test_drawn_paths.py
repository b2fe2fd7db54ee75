"""GDAS with one path per round, of all clients or of each: messages, averages, and what stays."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fednas_flwr import compose
from fednas_flwr.builders.networks import supernet_space
from fednas_flwr.clients.answer import answer
from fednas_flwr.data.loaders import epoch_batches
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.messages import Header, Request, decode_reply, decode_request
from fednas_flwr.exchange.states import MOMENTS, pack, unpack
from fednas_flwr.randomness import derive_seed, make_generator, seeded
from fednas_flwr.search.gumbel import GumbelPath
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search_spaces.nasbench201 import NASBench201Space

ROUNDS = 2
MODES = ["round", "client"]
GDAS = [
    *("algorithm=fed_darts", "algorithm.beta_decay=0", "algorithm.batch_size=16"),
    "algorithm.temperatures={first: 4.0, last: 1.0}",
    "algorithm.weights={lr: 0.02, min_lr: 0.004, momentum: 0.9, weight_decay: 3e-4, clip_norm: 5}",
    "algorithm.alphas={lr: 0.02, weight_decay: 1.0e-3}",
    *("dataset.crop_padding=0", "dataset.flip=false"),
]
UNEQUAL = ["clients=3", "partition=quantity", "partition.fractions=[0.5,0.3,0.2]"]
OPS = {"nor_conv_1x1": 2, "nor_conv_3x3": 3}  # those with tensors: their columns


def recorded(federation, num_rounds=ROUNDS):
    """Run; keep each search's request and reply as they travelled, and the states by round."""
    answered, strategy = federation.grid.answer, federation.strategy
    run_round, federation.told = strategy.run_round, []
    federation.after = [whole(strategy)]

    def telling(message):
        reply = answered(message)
        if message.metadata.message_type == "train.search":
            request = decode_request("train.search", message.content)
            federation.told.append((request, decode_reply(reply.content)[1]))
        return reply

    def remembered(server_round, rounds):
        metrics = run_round(server_round, rounds)
        federation.after.append(whole(strategy))
        return metrics

    federation.grid.answer, strategy.run_round = telling, remembered
    strategy.start(federation.grid, num_rounds=num_rounds)
    assert not [e for e in federation.events if e["event"] == "client_failed"]
    return federation


def whole(strategy):
    """Return a copy of the global model's tensors by state and name."""
    return {
        state: {n: t.clone() for n, t in unpack(packed, strategy.layouts[state]).items()}
        for state, packed in strategy.states.items()
    }


def drawn(alphas, seed, *drawn_for):
    """Return the column of each edge's op, of the first noise drawn here whose cell trains."""
    generator = make_generator(derive_seed(seed, "path", *drawn_for), "gumbel")
    while True:
        noise_EO = -torch.empty(6, 5).exponential_(generator=generator).log()
        columns = (alphas + noise_EO).argmax(-1).tolist()
        if not NASBench201Space.is_degenerate(NASBench201Space.genotype(columns)):
            return columns


def on_path(name, columns):
    """Return whether a path computes with a tensor, by its name."""
    parts = name.split(".")
    if "edges" not in parts:
        return True
    op = parts[parts.index("ops") + 1]
    return columns[int(parts[parts.index("edges") + 1])] == OPS[op]


def expected_names(states, columns):
    """Return the names of the tensors that messages about a path carry, by state, in order."""
    kept = {s: [n for n in tensors if on_path(n, columns)] for s, tensors in states.items()}
    return kept | {"alphas": list(states["alphas"])}


def columns_of(federation, mode, request):
    """Return the columns of the path that a request should be about."""
    server_round, client = request.header.round, request.header.client
    alphas = federation.after[server_round - 1]["alphas"]["cell"]
    place = (server_round,) if mode == "round" else (server_round, client)
    return drawn(alphas, federation.config.seed, *place)


@pytest.fixture(scope="module", params=MODES)
def searched(request, compose_config, federate):
    """A search with batch norm, whose statistics are buffers, and with moments that travel."""
    settings = (f"algorithm.path_per={request.param}", "momentum=averaged")
    config = compose_config(*GDAS, *UNEQUAL, *settings)
    federation = recorded(federate(config))
    federation.mode = request.param
    return federation


def test_messages_carry_the_paths_tensors_and_all_alphas_only(searched):
    assert len(searched.told) == 3 * ROUNDS
    paths = set()
    for request, reply in searched.told:
        before = searched.after[request.header.round - 1]
        columns = columns_of(searched, searched.mode, request)
        paths.add(tuple(columns))
        names = expected_names(before, columns)
        assert set(request.states) == set(reply.states) == {"weights", "alphas", "buffers", MOMENTS}
        for state, kept in names.items():
            sent = pack({name: before[state][name] for name in kept})
            assert len(kept) < len(before[state]) or state == "alphas"
            assert request.states[state].keys() == reply.states[state].keys() == sent.keys()
            for dtype, vector in sent.items():
                assert torch.equal(request.states[state][dtype], vector), state
                assert reply.states[state][dtype].numel() == vector.numel(), state
    assert len(paths) > (1 if searched.mode == "round" else ROUNDS)


def test_traffic_is_smaller_than_that_of_whole_states(searched, compose_config, federate):
    config = compose_config(*GDAS, *UNEQUAL, "momentum=averaged", "algorithm.path_per=step")
    dense = recorded(federate(config))
    narrow, wide = ([e for e in f.events if e["event"] == "round"] for f in (searched, dense))
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours["bytes_dense"] == theirs["bytes_dense"]
        for key in ("bytes_sent", "bytes_received"):
            assert ours[key] < 0.8 * theirs[key]
        tensors = 4 * sum(
            vector.numel() * (2 if dtype == "int64" else 1)
            for request, reply in searched.told
            if request.header.round == ours["round"]
            for states in (request.states, reply.states)
            for packed in states.values()
            for dtype, vector in packed.items()
        )
        taken = ours["bytes_sent"] + ours["bytes_received"]
        assert tensors <= taken <= tensors + 10_000  # arrays have headers


def test_each_tensor_is_the_mean_of_those_who_had_it_and_all_others_stay_to_the_bit(searched):
    counts = [len(client.data.train) for client in searched.clients]
    had_by = set()
    for server_round in range(1, ROUNDS + 1):
        before, after = searched.after[server_round - 1], searched.after[server_round]
        values = {}
        for request, reply in searched.told:
            if request.header.round != server_round:
                continue
            assert reply.num_examples == counts[request.header.client]
            columns = columns_of(searched, searched.mode, request)
            for state, names in expected_names(before, columns).items():
                places = dict.fromkeys(reply.states[state], 0)
                for name in names:
                    like = before[state][name]
                    dtype = str(like.dtype).removeprefix("torch.")
                    start, places[dtype] = places[dtype], places[dtype] + like.numel()
                    own = reply.states[state][dtype][start : places[dtype]].view(like.shape)
                    found = values.setdefault((state, name), ([], []))
                    found[0].append(own.double().numpy())
                    found[1].append(reply.num_examples)
        for state, tensors in before.items():
            for name, old in tensors.items():
                had = values.get((state, name))
                had_by.add(0 if had is None else len(had[1]))
                if had is None:
                    assert torch.equal(after[state][name], old), name
                    continue
                mean = np.average(had[0], axis=0, weights=had[1])
                mean = mean if old.dtype.is_floating_point else np.round(mean)
                np.testing.assert_allclose(after[state][name], mean, rtol=1e-5, atol=1e-6)
    assert had_by >= {0, 3}
    assert bool(had_by & {1, 2}) == (searched.mode == "client")


def local_search(supernet, sgd, adam, client, config, *, path_seed, server_round):
    """Alternate on one path that keeps its noise, with torch's optimisers; in place."""
    first, last = config.algorithm.temperatures.first, config.algorithm.temperatures.last
    temperature = first if server_round == 1 else last
    supernet.train()
    path = GumbelPath(
        supernet, temperature=temperature, generator=make_generator(path_seed, "gumbel")
    )
    generator = make_generator(config.seed, "search", server_round, client.index, "search")

    def passes(split, number):
        for _ in range(number):
            for indices in epoch_batches(len(split), batch_size=16, generator=generator):
                yield split.batch(indices, "cpu")

    validation = passes(client.data.validation, 1000)
    for x, y in passes(client.data.train, 1):
        held_x, held_y = next(validation)
        adam.zero_grad()
        F.cross_entropy(path(held_x), held_y).backward()
        adam.step()
        sgd.zero_grad()  # to None: what is not drawn neither moves nor decays
        F.cross_entropy(path(x), y).backward()
        torch.nn.utils.clip_grad_norm_(list(path.weights().values()), 5.0)
        sgd.step()
    return path.columns["cell"]


def optimisers(supernet, lr):
    sgd = torch.optim.SGD(supernet.weights().values(), lr=lr, momentum=0.9, weight_decay=3e-4)
    alphas = supernet.alphas().values()
    return sgd, torch.optim.Adam(alphas, lr=0.02, betas=(0.5, 0.999), weight_decay=1e-3)


def rate(server_round):
    return 0.004 + 0.016 * (1 + math.cos(math.pi * (server_round - 1) / ROUNDS)) / 2


@pytest.mark.parametrize("mode", MODES)
def test_rounds_equal_gumbel_paths_on_whole_states_averaged_by_hand(mode, compose_config, federate):
    settings = (f"algorithm.path_per={mode}", "search_space.norm=group")
    config = compose_config(*GDAS, *UNEQUAL, *settings)
    federation = federate(config)
    with seeded(config.seed, "supernet"):
        supernet = supernet_space(config, federation.data[0]).supernet()
    state = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    first = {name: tensor.clone() for name, tensor in state.items()}
    for server_round in range(1, ROUNDS + 1):
        trained = []
        for client in federation.clients:
            supernet.load_state_dict(state)
            place = (server_round,) if mode == "round" else (server_round, client.index)
            columns = local_search(
                *(supernet, *optimisers(supernet, rate(server_round)), client, config),
                path_seed=derive_seed(config.seed, "path", *place),
                server_round=server_round,
            )
            assert columns == drawn(state["alphas.cell"], config.seed, *place)
            own = {n: t.clone().double().numpy() for n, t in supernet.state_dict().items()}
            trained.append((len(client.data.train), columns, own))
        for name, tensor in state.items():
            had = [(n, own[name]) for n, columns, own in trained if on_path(name, columns)]
            if had:
                counts, values = zip(*had, strict=True)
                mean = np.average(values, axis=0, weights=counts)
                state[name] = torch.as_tensor(mean).to(tensor.dtype)

    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    moved = 0
    for name, expected in state.items():
        actual = arrays[name if name.startswith("alphas.") else f"weights.{name}"]
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
        moved += not torch.equal(actual, first[name])
    assert 20 < moved < len(state) + (mode == "client")
    assert (arrays["alphas.cell"] - first["alphas.cell"]).abs().max() > 0.03


def test_moments_of_a_path_go_on_where_they_were_when_it_is_drawn_again(compose_config, federate):
    """One client, whose optimisers are kept from round to round: SGD's momentum, Adam's moments."""
    settings = ("clients=1", "algorithm.path_per=round", "search_space.norm=group")
    config = compose_config(*GDAS, *settings, "momentum=averaged")
    federation = federate(config)
    with seeded(config.seed, "supernet"):
        supernet = supernet_space(config, federation.data[0]).supernet()
    sgd, adam = optimisers(supernet, rate(1))
    paths = []
    for server_round in range(1, ROUNDS + 1):
        sgd.param_groups[0]["lr"] = rate(server_round)
        paths.append(
            local_search(
                *(supernet, sgd, adam, federation.clients[0], config),
                path_seed=derive_seed(config.seed, "path", server_round),
                server_round=server_round,
            )
        )
    assert paths[0] != paths[1]
    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    for name, expected in supernet.state_dict().items():
        actual = arrays[name if name.startswith("alphas.") else f"weights.{name}"]
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    for name, weight in supernet.weights().items():
        kept = sgd.state.get(weight, {}).get("momentum_buffer")
        kept = torch.zeros_like(weight) if kept is None else kept
        actual = arrays[f"{MOMENTS}.weights.momentum_buffer.{name}"]
        torch.testing.assert_close(actual, kept, rtol=0, atol=1e-4)


def seeds_of(federation):
    """Return the seed of the path of every request, by round and client."""
    return {
        (request.header.round, request.header.client): request.settings.local.alternating.path_seed
        for request, _ in federation.told
    }


def test_a_path_depends_on_seed_round_and_client_only(compose_config, federate):
    """Not on how many clients there are, their records, or which way of averaging they have."""
    found = {}
    for mode in MODES:
        runs = [
            recorded(federate(compose_config(*GDAS, *others, f"algorithm.path_per={mode}")))
            for others in (UNEQUAL, ["clients=2", "algorithm.alphas.lr=0"], [*UNEQUAL, "seed=7"])
        ]
        one, fewer, other_seed = (seeds_of(run) for run in runs)
        assert None not in one.values()
        assert all(one[place] == seed for place, seed in fewer.items())
        assert not set(one.values()) & set(other_seed.values())
        found[mode] = one
    by_round = [{found["round"][r, client] for client in range(3)} for r in (1, 2)]
    assert [len(seeds) for seeds in by_round] == [1, 1]
    assert by_round[0] != by_round[1]
    assert len(set(found["client"].values())) == 6


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_search_draws_the_same_paths(mode, compose_config, federate, tmp_path):
    config = compose_config(*GDAS, *UNEQUAL, f"algorithm.path_per={mode}", "momentum=averaged")
    undisturbed = recorded(federate(config), num_rounds=3)
    stopped = federate(config, checkpoints=tmp_path)
    run_round = stopped.strategy.run_round

    def ends(server_round, num_rounds):
        if server_round == 3:
            raise KeyboardInterrupt
        return run_round(server_round, num_rounds)

    stopped.strategy.run_round = ends
    with pytest.raises(KeyboardInterrupt):
        stopped.strategy.start(stopped.grid, num_rounds=3)
    resumed = recorded(federate(config, checkpoints=tmp_path), num_rounds=3)
    assert {request.header.round for request, _ in resumed.told} == {3}
    assert seeds_of(resumed).items() <= seeds_of(undisturbed).items()
    for state, packed in undisturbed.strategy.states.items():
        for dtype, vector in packed.items():
            assert torch.equal(vector, resumed.strategy.states[state][dtype]), state


def alphas_of(run):
    """Return the alphas after the last round of a run that has failed nowhere."""
    assert run.error is None
    assert not [e for e in run.events if e["event"] == "client_failed"]
    return torch.tensor([e["alphas"]["cell"] for e in run.events if e["event"] == "alphas"][-1])


def test_a_round_has_one_path_so_that_secure_sums_and_medians_are_of_like_tensors(run_inline):
    given = (*GDAS, "algorithm.path_per=round", "search_space.norm=group", "stages=[search]")
    clients = ("clients=4", "partition=quantity", "runtime.largest_share=1")
    secure = ("secure_sum=true", "secure_terms={least_sites: 3, colluding: 1}")
    plain, summed = (alphas_of(run_inline(*given, *clients, *more)) for more in ((), secure))
    torch.testing.assert_close(plain, summed, rtol=1e-3, atol=1e-4)
    robust = alphas_of(run_inline(*given, *clients, "aggregate=median", "wire=int8"))
    assert 0 < (robust - plain).abs().max() < 0.2


def test_paths_of_clients_travel_rounded_and_to_those_who_are_asked(run_inline):
    given = (*GDAS, "algorithm.path_per=client", "search_space.norm=group", "stages=[search]")
    plain, rounded = (
        alphas_of(run_inline(*given, "clients=3", f"wire={wire}")) for wire in ("float32", "int8")
    )
    assert 0 < (rounded - plain).abs().max() < 0.02
    alphas_of(run_inline(*given, "clients=4", "clients_per_round=2", "over_selection=0.5"))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["algorithm.path_per=client", "aggregate=median", "clients=3"],
            "aggregate=median: each t",
        ),
        (["algorithm.path_per=client", "secure_sum=true", "clients=4"], "which have no sum"),
        (["algorithm.path_per=client", "momentum=server"], "momentum=server: the velocity"),
        (["algorithm.path_per=round", "momentum=server"], "momentum=server: the velocity"),
        (
            ["algorithm.path_per=round", "privacy=dp", "privacy.unit=client", "secure_sum=true"],
            "privacy=dp: what is released is an update of all",
        ),
        (["algorithm.path_per=rounds"], "algorithm.path_per=rounds is unknown"),
    ],
)
def test_what_paths_cannot_be_combined_with_is_refused(more, sentence, compose_config):
    with pytest.raises(ConfigError, match=sentence):
        compose_config(*GDAS, *more)


def test_what_has_a_path_is_not_asked_where_none_is_drawn():
    with pytest.raises(ConfigError, match="path_per=round has no effect with algorithm.temperatu"):
        compose("algorithm=fed_darts", "algorithm.path_per=round")


def test_a_request_for_a_path_says_by_what_it_is_drawn(compose_config, federate):
    with pytest.raises(ConfigError, match="path_seed=3 without a temperature"):
        Alternating("first_order", path_seed=3)
    with pytest.raises(ConfigError, match="path_seed=-1 is out of range"):
        Alternating("first_order", temperature=1.0, path_seed=-1)
    config = compose_config(*GDAS, *UNEQUAL, "algorithm.path_per=round")
    federation = recorded(federate(config), num_rounds=1)
    request, _ = federation.told[0]
    header = Header("test", "search", 1, 1, 0, "nonce")
    states = {name: packed for name, packed in request.states.items() if name != "alphas"}
    with pytest.raises(ConfigError, match="path_seed needs the alphas"):
        answer(federation.clients[0], Request("train.search", header, request.settings, states))
