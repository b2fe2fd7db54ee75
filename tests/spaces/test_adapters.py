"""Adapters in a frozen network: what is trained and travels, and what the ops compute."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fednas_flwr import load
from fednas_flwr.api import run
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.pretrained import forget_frozen
from fednas_flwr.client.making import make_client
from fednas_flwr.data.prepared import make_data
from fednas_flwr.protocol.states import network_states
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.search.data_free_scores import SCORES, measure
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.spaces.adapters import OPS, AdapterSpace
from fednas_flwr.spaces.genotype import Edge, Genotype

TINY, CELL = "test_efficientnet", "cell"


SETTINGS = {"input_shape": (3, 8, 8), "num_classes": 3, "norm": "group", "backbone": TINY}
SETTINGS |= {"image_size": 32, "mean": [0.2, 0.3, 0.4], "std": [0.5, 0.6, 0.7]}


@pytest.fixture
def space(weights):
    return AdapterSpace(**SETTINGS, weights=str(weights))


@pytest.fixture
def genotype(space):
    return space.random_genotype(torch.Generator().manual_seed(0))


def images(number=4):
    return torch.randn(number, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def shaken(network):
    """Return the network with values where zeros stood."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return network


def test_the_first_network_is_the_frozen_one(space, genotype):
    network = space.network(genotype)
    assert not network(images()).any()
    with torch.no_grad():
        network.classifier.weight.normal_()
    std, mean = (torch.tensor(values)[:, None, None] for values in (space.std, space.mean))
    features = space.frozen()(images() * std + mean)
    torch.testing.assert_close(network(images()), network.classifier(features))


def test_adapters_and_classifier_alone_are_trained_and_travel(space):
    supernet = space.supernet()
    states = network_states(supernet)
    assert not states["buffers"]
    assert all(name.split(".")[1] in ("adapters", "classifier") for name in states["weights"])
    frozen = space.frozen()
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    shaken(supernet.train())
    supernet(images()).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in supernet.parameters())
    assert not frozen.training
    assert all(torch.equal(before[name], t) for name, t in frozen.state_dict().items())


def test_a_supernet_weighs_the_ops_of_each_stage(space):
    body = shaken(space.body()).eval()
    genotype = space.random_genotype(torch.Generator().manual_seed(3))
    path = space.path(genotype)
    derived = space.network(genotype).eval()
    own = dict(body.named_parameters())
    for name, parameter in derived.named_parameters():
        parameter.data.copy_(own[name])
    one_hot = torch.nn.functional.one_hot(torch.tensor(path), len(OPS)).float()
    torch.testing.assert_close(body(images(), {CELL: one_hot}), derived(images()))
    other = torch.rand(4, *one_hot.shape, generator=torch.Generator().manual_seed(2))
    alone = [body(images()[i : i + 1], {CELL: other[i]}) for i in range(4)]
    together = body(images(), {CELL: other})
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert (alone[0] - derived(images()[:1])).abs().max() > 1e-3


def test_a_low_rank_op_is_linear_and_a_bottleneck_is_not(space):
    for column, name in enumerate(OPS[1:], 1):
        op = shaken(space.body()).adapters[0].op(column)
        x = torch.randn(2, op[0].in_features, 3, 3, generator=torch.Generator().manual_seed(0))
        assert op[0].out_features == int(name.rpartition("_")[2])
        assert torch.allclose(op(-x), -op(x), atol=1e-5) == name.startswith("low_rank")
        torch.testing.assert_close(op(x.flatten(2).mT), op(x).flatten(2).mT)


def test_a_state_dict_holds_the_frozen_tensors(space, genotype):
    network = shaken(space.network(genotype)).eval()
    state = network.state_dict()
    empty = AdapterSpace(**SETTINGS, weights=None).network(genotype).eval()
    assert not torch.equal(empty(images()), network(images()))
    empty.load_state_dict(state)
    assert torch.equal(empty(images()), network(images()))
    with pytest.raises(RuntimeError, match="conv_stem"):
        empty.load_state_dict({k: v for k, v in state.items() if "conv_stem" not in k})


def test_genotypes_of_the_space(space):
    generator = torch.Generator().manual_seed(0)
    stages = len(space.frozen().stages())
    for _ in range(20):
        genotype = space.random_genotype(generator)
        assert len(space.path(genotype)) == stages
        assert any(edge.op != "none" for edge in genotype.cells[CELL])
        lead = torch.zeros(stages, len(space.ops))
        lead[range(stages), space.path(genotype)] = 3.0
        assert space.derive({CELL: lead}) == genotype


def test_data_free_scores_leave_the_frozen_network_as_it_is(space):
    ops = ["none"] * (len(space.edges) - 1) + ["low_rank_4"]  # nothing trained before the last
    cell = tuple(Edge(op, *ends) for op, ends in zip(ops, space.edges, strict=True))
    before = {name: tensor.clone() for name, tensor in space.frozen().state_dict().items()}
    values = measure(space, Genotype("adapters", {CELL: cell}), SCORES, seed=0)
    assert math.isfinite(values["expressivity"])
    assert math.isfinite(values["learning"])
    after = space.frozen().state_dict()
    assert all(torch.equal(before[n], t) and before[n].dtype == t.dtype for n, t in after.items())


def chosen(weights):
    named = (f"search_space.backbone={TINY}", f"search_space.weights={weights}")
    place = ("search_space=adapters", "search_space.image_size=32", "retrain.norm=group")
    return [*place, *named, "retrain.channels=null", "retrain.num_cells=null"]


def composed(*overrides):
    return parse_config(compose_tree(overrides))


@pytest.mark.run
@pytest.mark.parametrize("algorithm", ["fed_darts", "random_search", "dp_fnas", "zero_cost"])
def test_a_search_sends_adapters_and_delivers_the_whole(tmp_path, weights, made_data, algorithm):
    gone = tmp_path / "gone.safetensors"
    gone.write_bytes(weights.read_bytes())
    data = ("dataset=npz", f"dataset.root={made_data}", f"dataset.cache={tmp_path / 'c'}")
    sizes = ("rounds=1", "retrain.rounds=1", "clients=2", f"run_dir={tmp_path / 'run'}")
    private = ["privacy=dp", "privacy.epsilon=90"] if algorithm == "dp_fnas" else []
    result = run(composed(*data, f"algorithm={algorithm}", *private, *chosen(gone), *sizes))
    rounds = read_run(result.folder).of_kind("round")
    whole = sum(tensor.numel() for tensor in load_file(gone).values()) * 4
    assert rounds
    assert all(event["bytes_sent"] < whole / 2 for event in rounds)
    gone.unlink()
    forget_frozen()
    found = load(result.folder).predict(np.full((2, 3, 8, 8), 200, dtype=np.uint8))
    assert found.probabilities.shape == (2, 3)


def test_real_sites_take_no_files_from_a_server(weights, made_data):
    with pytest.raises(ConfigError, match="a server must not name files of a site"):
        composed(*chosen(weights), "runtime=deployment", "runtime.superlink=site")
    config = composed("dataset=npz", f"dataset.root={made_data}", "clients=1")
    site = {"data-path": str(made_data)}
    client = make_client(config, 0, data=make_data(config), networks={}, site=site)
    with pytest.raises(ConfigError, match="a server must not name files of a site"):
        client.make_network({"name": "derived", "weights": str(weights)})
