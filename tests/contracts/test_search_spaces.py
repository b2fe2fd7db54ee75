"""What every search space owes to the code that searches, derives and retrains with it."""

import dataclasses

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.models.networks import FIXED_NETWORKS
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.settings.names import SKIPS
from fednas_flwr.settings.optimizers import NORMED_NETWORKS
from fednas_flwr.spaces import dp_cells
from fednas_flwr.spaces.genotype import from_json, to_json
from fednas_flwr.spaces.operations import SkipNetwork

from ..reference_engine import by_ops
from ..refusals import refuses
from ..rows import seldom
from ..small_spaces import CLASSES, SPACES, WITH_ZERO, alphas_of

IMAGE_SPACES = ("darts", "nasbench201", "mbconv", "dp_cells", "dp_cells_darts")
CELLS = ("darts", "nasbench201", "mlp")  # spaces of repeated cells
CELL_SIZES = ("channels", "num_cells")
IMAGES = [((3, 8, 8), "batch"), ((1, 7, 7), "group"), ((3, 9, 6), "batch"), ((1, 1, 1), "group")]
INPUTS = [(name, *case) for name in IMAGE_SPACES for case in IMAGES]
INPUTS += [("mlp", *case) for case in [((30,), "batch"), ((1,), "group"), ((9,), "group")]]


@pytest.fixture(params=sorted(SPACES))
def space(request):
    return SPACES[request.param]


def examples(shape, batch=3, dtype=torch.float32):
    return torch.randn(batch, *shape, generator=make_generator(0, "examples"), dtype=dtype)


def make_supernet(space):
    with seeded(1, "supernet"):
        return space.supernet()


def make_network(space, seed=0):
    genotype = space.random_genotype(make_generator(seed, "genotype"))
    with seeded(seed, "network"):
        return space.network(genotype)


@pytest.mark.parametrize(("name", "shape", "norm"), INPUTS)
def test_any_input_size_gives_logits_and_every_parameter_a_gradient(name, shape, norm):
    space = dataclasses.replace(SPACES[name], input_shape=shape, norm=norm)
    for network in (make_network(space), make_supernet(space)):
        logits = network(examples(shape))
        assert logits.shape == (3, CLASSES)
        logits.square().sum().backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None or not hasattr(network, "alphas"), name
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_every_single_alpha_gets_a_gradient(space):
    supernet = make_supernet(space)
    F.cross_entropy(supernet(examples(space.input_shape)), torch.arange(3)).backward()
    for alphas in supernet.alphas().values():
        assert (alphas.grad != 0).all()


def test_a_linear_skip_adds_a_linear_models_logits(space):
    x = examples(space.input_shape, dtype=torch.float64)
    both = [dataclasses.replace(space, skip=skip) for skip in SKIPS]
    supernets = [make_supernet(each).double().eval() for each in both]
    pairs = [supernets, [make_network(each).double().eval() for each in both]]
    for plain, skipping in pairs:
        skip = next(module for module in skipping.modules() if isinstance(module, SkipNetwork)).skip
        assert not skip.weight.any()
        assert not skip.bias.any()
        torch.testing.assert_close(skipping(x), plain(x), rtol=0, atol=0)
        with torch.no_grad():
            skip.weight.normal_(generator=make_generator(3, "skip"))
            skip.bias.normal_(generator=make_generator(4, "skip"))
        expected = plain(x) + F.linear(x.flatten(1), skip.weight, skip.bias)
        torch.testing.assert_close(skipping(x), expected, rtol=1e-10, atol=1e-10)
        assert set(dict(skipping.named_parameters())) > set(dict(plain.named_parameters()))


def test_group_norm_keeps_examples_apart(space):
    x = examples(space.input_shape, dtype=torch.float64)
    space = dataclasses.replace(space, norm="group")
    for network in (make_supernet(space).double(), make_network(space).double()):
        torch.testing.assert_close(network(x)[:1], network(x[:1]), rtol=1e-10, atol=1e-10)


def test_state_dict_is_alphas_and_body_in_a_stable_order(space):
    supernet = make_supernet(space)
    state = supernet.state_dict()
    kinds = {f"alphas.{kind}" for kind in space.cell_kinds}
    assert {name for name in state if name.startswith("alphas.")} == kinds
    for kind, edges in space.cell_kinds.items():
        assert supernet.alphas()[kind].shape == (edges, len(space.ops))
        assert torch.equal(state[f"alphas.{kind}"], supernet.alphas()[kind])
    parameters = dict(supernet.named_parameters())
    assert list(parameters) == list(dict(make_supernet(space).named_parameters()))
    assert set(supernet.weights()) == set(parameters) - kinds
    assert all(parameters[name] is weight for name, weight in supernet.weights().items())


def test_initialisation_depends_on_the_seed_alone(space):
    first, second = make_supernet(space).state_dict(), make_supernet(space).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with seeded(2, "supernet"):
        other = space.supernet()
    for kind, alphas in other.alphas().items():
        assert not torch.equal(alphas, first[f"alphas.{kind}"])
        assert 0 < alphas.abs().max() < 1e-2
    one, two = make_network(space).state_dict(), make_network(space).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_functional_call_replaces_weights_and_alphas(space):
    supernet, other = make_supernet(space), space.supernet().eval()
    x = examples(space.input_shape)
    supernet(x)  # moves the statistics of batch norm
    state = dict(supernet.eval().state_dict())
    for kind, alphas in alphas_of(space, seed=2).items():
        state[f"alphas.{kind}"] = alphas.requires_grad_()
    called = functional_call(supernet, state, (x,))
    given = {kind: state[f"alphas.{kind}"].softmax(-1) for kind in space.cell_kinds}
    assert torch.equal(called, supernet(x, given))
    assert not torch.allclose(called, supernet(x))
    alphas = [state[f"alphas.{kind}"] for kind in space.cell_kinds]
    assert all((gradient != 0).any() for gradient in torch.autograd.grad(called.sum(), alphas))
    other.load_state_dict(state)
    assert torch.equal(called, other(x))


def test_gradient_of_the_per_example_leaf_equals_a_loop_over_examples(space):
    supernet = make_supernet(dataclasses.replace(space, norm="group")).double()
    x = examples(space.input_shape, dtype=torch.float64)
    y = torch.tensor([0, 2, 4])
    weights = {kind: a.double().softmax(-1) for kind, a in alphas_of(space, seed=2).items()}
    leaf = {kind: w.expand(3, -1, -1).clone().requires_grad_() for kind, w in weights.items()}
    logits = supernet(x, leaf)
    torch.testing.assert_close(logits, supernet(x, weights), rtol=0, atol=1e-12)
    F.cross_entropy(logits, y, reduction="sum").backward()
    for example in range(3):
        single = {kind: w.clone().requires_grad_() for kind, w in weights.items()}
        loss = F.cross_entropy(supernet(x[example : example + 1], single), y[example : example + 1])
        loss.backward()
        for kind in weights:
            assert leaf[kind].grad[example].abs().max() > 0
            found = leaf[kind].grad[example]
            torch.testing.assert_close(found, single[kind].grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind_of_network", ["supernet", "network"])
def test_no_module_changes_its_input(space, kind_of_network):
    network = make_network(space) if kind_of_network == "network" else by_ops(make_supernet(space))
    seen = []

    def remember(module, inputs):
        seen.append((inputs[0], inputs[0].detach().clone()))

    for module in network.modules():
        if not isinstance(module, torch.nn.ModuleList):
            module.register_forward_pre_hook(remember)
    network(examples(space.input_shape)).sum().backward()
    assert len(seen) > 15
    assert all(torch.equal(tensor, before) for tensor, before in seen)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_supernet_leaves_its_input_and_op_weights_alone(space, norm):
    supernet = make_supernet(dataclasses.replace(space, norm=norm))
    x = examples(space.input_shape)
    weights = {kind: alphas.detach().softmax(-1) for kind, alphas in supernet.alphas().items()}
    before = [tensor.clone() for tensor in (x, *weights.values(), *supernet.weights().values())]
    supernet(x, weights).sum().backward()
    after = (x, *weights.values(), *supernet.weights().values())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_derive_is_deterministic_and_ties_go_to_the_lowest_index(space):
    flat = {kind: torch.zeros(edges, len(space.ops)) for kind, edges in space.cell_kinds.items()}
    genotype = space.derive(flat)
    assert genotype == space.derive(flat)
    own = {"darts": "max_pool_3x3", "mlp": "skip_connect", "mbconv": "mbconv2_3x3"}
    lowest = own.get(space.name, "none")
    ops = [edge.op for edges in genotype.cells.values() for edge in edges]
    # Where all of the lowest were degenerate, one edge has the lowest op with weights.
    repaired = 0 if space.name == "mbconv" else 1
    assert ops.count(lowest) == len(ops) - repaired


def test_derive_refuses_wrong_alphas(space):
    alphas = alphas_of(space, seed=2)
    kind = next(iter(alphas))
    refuses("expected alphas for", space.derive, {}, error=ValueError)
    short = {**alphas, kind: alphas[kind][1:]}
    refuses("expected alphas of shape", space.derive, short, error=ValueError)
    alphas[kind][0, 0] = float("nan")
    refuses("not all finite", space.derive, alphas, error=ValueError)


def test_random_genotypes_are_valid_varied_and_set_by_the_generator(space):
    def draw(seed):
        generator = make_generator(seed, "random")
        return [space.random_genotype(generator) for _ in range(40)]

    genotypes = draw(0)
    for genotype in genotypes:
        space.check(genotype)
    assert genotypes == draw(0)
    assert genotypes != draw(1)
    ops = {e.op for g in genotypes for edges in g.cells.values() for e in edges}
    assert ops | {"none"} == set(space.ops) | {"none"}


def test_genotype_survives_json(space):
    for seed in range(5):
        genotype = space.random_genotype(make_generator(seed, "json"))
        genotype = genotype if seed else space.derive(alphas_of(space, seed=2))
        again = from_json(to_json(genotype))
        assert again == genotype
        space.check(again)


def test_check_refuses_what_is_not_of_the_space(space):
    genotype = space.random_genotype(make_generator(0, "check"))
    kind, edges = next(iter(genotype.cells.items()))

    def altered(new_edges):
        return dataclasses.replace(genotype, cells={**genotype.cells, kind: tuple(new_edges)})

    unknown = dataclasses.replace(edges[0], op="conv_9x9")
    for message, bad in {
        "space is 'other'": dataclasses.replace(genotype, space="other"),
        "has the cells": dataclasses.replace(genotype, cells={}),
        "unknown op 'conv_9x9'": altered([unknown, *edges[1:]]),
        "got .*": altered(edges[:-1]),
        "got no edges": altered([]),
        "order": altered(reversed(edges)),
    }.items():
        refuses(message, space.check, bad)
        refuses(message, space.network, bad)


NEEDS = "needs (images|tables)"
IMPOSSIBLE = [
    *((name, {"input_shape": (3, 8)}, rf"{NEEDS} .* shape \(3, 8\)") for name in SPACES),
    *((name, {"input_shape": (0,)}, NEEDS) for name in SPACES),
    *((name, {"num_classes": 0}, "num_classes=0 is out of range") for name in SPACES),
    *((name, {"norm": "grup"}, r"norm=grup is unknown.*nearest: group") for name in SPACES),
    *((name, {"skip": "square"}, "^skip=square") for name in SPACES),
    *((name, {size: 0}, f"{size}=0 is out of") for name in CELLS for size in CELL_SIZES),
    ("darts", {"num_cells": 2}, "num_cells=2 is out of range: expected 3 or more"),
    ("mlp", {"channels": 7}, "channels=7 is out of range: expected 8 or more"),
    ("dp_cells", {"widths": (8, 8)}, r"search_space\.widths=\[8, 8\] must be 3 numbers"),
    ("dp_cells", {"widths": (8, 0, 8)}, "each at least 1"),
    ("dp_cells", {"head": 0}, "head=0 is out of range"),
    ("dp_cells", {"activation": "selo"}, r"search_space\.activation=selo is unknown.*est: selu"),
    ("mbconv", {"width": 0.0}, r"width=0.0 is out of range"),
    ("mbconv", {"candidates": ("mbconv6_3x3", "zero")}, "two different ops other than zero"),
    ("mbconv", {"candidates": ("mbconv6_3x3",) * 3}, "each named once"),
    ("mbconv", {"candidates": ("mbconv7_3x3", "zero")}, "candidate=mbconv7_3x3 is unknown"),
    ("mbconv", {"input_shape": (30,)}, r"images .* \(30,\); of a table take search_space=mlp"),
]


@pytest.mark.parametrize(("name", "change", "message"), IMPOSSIBLE)
def test_impossible_spaces_are_refused(name, change, message):
    refuses(message, dataclasses.replace, SPACES[name], **change)


@pytest.mark.parametrize("name", [name for name in SPACES if name != "darts"])
def test_auxiliary_heads_are_refused(name):
    genotype = SPACES[name].random_genotype(make_generator(0, "genotype"))
    refuses("no auxiliary head", SPACES[name].network, genotype, auxiliary=True)


@pytest.mark.parametrize("seed", [0, seldom(1), seldom(2)])
@pytest.mark.parametrize("name", ["mbconv", "dp_cells", "dp_cells_darts"])
def test_a_path_is_the_derived_network_with_its_weights(name, seed, monkeypatch):
    """Names agree, so a path's weights load into the derived network; outputs are equal."""
    monkeypatch.setattr(dp_cells, "TRAINING_GROUPS", dp_cells.SEARCH_GROUPS)
    space = WITH_ZERO if name == "mbconv" else SPACES[name]
    supernet, genotype = make_supernet(space), space.random_genotype(make_generator(seed, "path"))
    network, path = space.network(genotype), space.path(genotype)
    network.load_state_dict({n: supernet.body.state_dict()[n] for n in network.state_dict()})
    x, own = examples(space.input_shape), {"path": path}
    if name == "mbconv":
        own = {"paths": [[op] for op in path]}
    else:
        weights = [n.removeprefix("body.") for n in Candidate(supernet, path).weights()]
        assert weights == list(dict(network.named_parameters()))
    assert torch.equal(supernet.body(x, **own), network(x))
    one_hot = F.one_hot(torch.tensor(path), len(space.ops)).float()
    torch.testing.assert_close(supernet(x, dict.fromkeys(space.cell_kinds, one_hot)), network(x))


@pytest.mark.parametrize("name", ["nasbench201", "dp_cells", "dp_cells_darts"])
def test_nothing_but_none_gives_logits_that_ignore_the_image(name):
    """It builds and trains, too: the classifier's bias has a gradient."""
    space = SPACES[name]
    network = space.network(space.genotype([space.ops.index("none")] * space.cell_kinds["cell"]))
    logits = network(examples(space.input_shape))
    assert torch.isfinite(logits).all()
    assert torch.equal(logits[0], logits[1])
    logits.square().sum().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


def test_drop_path_acts_in_train_mode_only(space):
    network = make_network(space)
    x = examples(space.input_shape, batch=16)
    before = network.eval()(x)
    network.drop_path_prob = 0.5
    assert torch.equal(network(x), before)
    network.train()
    with seeded(0, "drop"):
        first, second = network(x), network(x)
    assert not torch.equal(first, second)
    with seeded(0, "drop"):
        assert torch.equal(network(x), first)


@pytest.mark.parametrize("name", [*IMAGE_SPACES, *NORMED_NETWORKS])  # others have none of 1x1
def test_no_network_has_a_strided_pointwise_convolution(name):
    """Torch's own can write beyond its buffers, see ``operations.every_second``."""
    if name in NORMED_NETWORKS:
        networks = [FIXED_NETWORKS[name]((3, 32, 32), CLASSES, norm="group")]
    else:
        space, generator = SPACES[name], make_generator(0, "genotypes")
        drawn = [space.random_genotype(generator) for _ in range(3)]
        networks = [space.supernet(), *map(space.network, drawn)]
    for module in (module for network in networks for module in network.modules()):
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size == (1, 1):
            assert module.stride == (1, 1), module
