from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.spaces.darts import EDGES, OPS, DARTSSpace
from fednas_flwr.spaces.genotype import Edge, Genotype, load_genotype, skip_share
from fednas_flwr.spaces.two_input_cells import AuxiliaryHead

from ..refusals import refuses

# Liu et al. (2019), the cells of the published second-order search on CIFAR-10.
PUBLISHED = load_genotype(Path(__file__).parent / "darts_v2.json")
CIFAR = DARTSSpace(input_shape=(3, 32, 32), num_classes=10)
LARGE = replace(CIFAR, channels=36, num_cells=20)
SMALL = DARTSSpace(input_shape=(1, 8, 8), num_classes=10, channels=4, num_cells=3)


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def alphas_with(chosen):
    """Return alphas of zero but for the given ``(edge, op): value`` of the normal cell."""
    alphas = {kind: torch.zeros(14, 8) for kind in ("normal", "reduction")}
    for (edge, op), value in chosen.items():
        alphas["normal"][EDGES.index(edge), OPS.index(op)] = value
    return alphas


def test_supernet_has_the_published_number_of_weights():
    # The published code logs 1.930618 M; its stem's norm has 2 * 48 affine weights, ours none.
    supernet = CIFAR.supernet()
    assert count(supernet.weights().values()) + 96 == 1_930_618
    shapes = {kind: tuple(alphas.shape) for kind, alphas in supernet.alphas().items()}
    assert shapes == {"normal": (14, 8), "reduction": (14, 8)}


def test_published_genotype_has_the_published_number_of_parameters():
    # 3.3 M in the paper's table 1; the published code logs 3.349342 M without auxiliary head.
    CIFAR.check(PUBLISHED)
    with torch.device("meta"):
        plain, helped = (LARGE.network(PUBLISHED, auxiliary=own) for own in (False, True))
    assert count(plain.parameters()) == 3_349_342
    head = 36 * 4 * 4 * 128 + 2 * 128 + 128 * 768 * 4 + 2 * 768 + 768 * 10 + 10
    assert count(helped.parameters()) == 3_349_342 + head
    assert skip_share(PUBLISHED) == 5 / 16


def test_derive_keeps_the_two_strongest_edges_with_their_best_op():
    chosen = {
        **{((0, 4), "sep_conv_5x5"): 3.0, ((1, 4), "avg_pool_3x3"): 1.5},
        **{((3, 4), "skip_connect"): 2.0, ((3, 4), "dil_conv_3x3"): 1.0},
        **{((4, 5), "max_pool_3x3"): 0.5, ((2, 5), "dil_conv_5x5"): 0.7},
    }
    normal = SMALL.derive(alphas_with(chosen)).cells["normal"]
    assert normal[4:6] == (Edge("sep_conv_5x5", 0, 4), Edge("skip_connect", 3, 4))
    assert normal[6:] == (Edge("dil_conv_5x5", 2, 5), Edge("max_pool_3x3", 4, 5))


def test_derive_compares_softmax_weights_not_alphas():
    # Edge 0 -> 2 has the largest alpha but for none, which takes the weight away.
    chosen = {((source, 4), "sep_conv_3x3"): 1.0 for source in (1, 2)}
    chosen |= {((0, 4), "sep_conv_3x3"): 3.0, ((0, 4), "none"): 9.0}
    normal = SMALL.derive(alphas_with(chosen)).cells["normal"]
    assert normal[4:6] == (Edge("sep_conv_3x3", 1, 4), Edge("sep_conv_3x3", 2, 4))


def test_derive_never_returns_none_and_breaks_ties_by_lowest_source():
    chosen = {(edge, "none"): 5.0 for edge in EDGES}
    normal = SMALL.derive(alphas_with(chosen)).cells["normal"][1:]  # the first has an op to train
    pairs = [(source, target) for target in range(2, 6) for source in (0, 1)]
    assert [(edge.source, edge.target) for edge in normal] == pairs[1:]
    assert {edge.op for edge in normal} == {"max_pool_3x3"}


def test_check_refuses_none_and_doubled_sources():
    edges = PUBLISHED.cells["normal"]
    for message, wrong in {
        "unknown op 'none'": (Edge("none", 0, 2), *edges[1:]),
        "different earlier nodes": (edges[0], edges[0], *edges[2:]),
        "got 0 -> 2, 1 -> 2, 0 -> 3": (*edges[:2], *edges[2:3], *edges[2:3], *edges[4:]),
        "earlier nodes": (*edges[:6], Edge("skip_connect", 0, 6), Edge("skip_connect", 1, 6)),
    }.items():
        refuses(message, CIFAR.check, Genotype("darts", {**PUBLISHED.cells, "normal": wrong}))


def test_auxiliary_head_joins_in_train_mode_only():
    network = SMALL.network(PUBLISHED, auxiliary=True)
    x = torch.randn(2, 1, 8, 8)
    logits, auxiliary_logits = network(x)
    assert logits.shape == auxiliary_logits.shape == (2, 10)
    (logits.sum() + 0.4 * auxiliary_logits.square().sum()).backward()
    assert all(parameter.grad is not None for parameter in network.auxiliary.parameters())
    assert isinstance(network.eval()(x), torch.Tensor)


def test_auxiliary_head_stands_after_the_second_reduction():
    network = replace(CIFAR, channels=4, num_cells=6).network(PUBLISHED, auxiliary=True)
    shapes = []
    network.auxiliary.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    network(torch.randn(2, 3, 32, 32))
    assert shapes == [(2, 4 * 16, 8, 8)]


def test_auxiliary_head_pools_an_8x8_map_as_published():
    head = AuxiliaryHead(3, 10, norm="group").double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pooled = F.avg_pool2d(F.relu(x), 5, stride=3)
    assert torch.equal(head(x), head.classifier(head.features(pooled).flatten(1)))


SIZES = [(1, 1), (2, 2), (1, 3), (3, 5), (4, 4), (7, 7), (13, 8), (56, 56)]


@pytest.mark.parametrize("size", SIZES)
def test_auxiliary_head_takes_any_map_and_reads_all_of_it(size):
    head = AuxiliaryHead(3, 10, norm="group").double()
    x = torch.rand(1, 3, *size, dtype=torch.float64, requires_grad=True)
    assert head(x).shape == (1, 10)
    if min(size) > 1:
        pooled = []
        head.features.register_forward_pre_hook(lambda module, inputs: pooled.append(inputs[0]))
        head(x)
        assert pooled[0].shape[-2:] == (2, 2)
        pooled[0].sum().backward()
        assert (x.grad > 0).all()


def test_drop_path_spares_identities_but_not_reducing_skips():
    def skips(cell):
        return tuple(Edge("skip_connect", edge.source, edge.target) for edge in cell)

    genotype = Genotype("darts", {kind: skips(cell) for kind, cell in PUBLISHED.cells.items()})
    network = SMALL.network(genotype)
    outputs = []
    for cell in network.cells:
        cell.register_forward_hook(lambda module, inputs, out: outputs.append(out.detach()))
    x = torch.randn(4, 1, 8, 8, generator=make_generator(0, "images"))
    network(x)
    network.drop_path_prob = 0.9
    with seeded(0, "drop"):
        network(x)
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[1], outputs[4])
