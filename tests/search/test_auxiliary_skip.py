"""DARTS-minus' auxiliary skip against its formula, written edge by edge."""

from __future__ import annotations

import pytest
import torch

from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.search.auxiliary_skip import AuxiliarySkip
from fednas_flwr.search_spaces.genotype import SKIP
from fednas_flwr.search_spaces.nasbench201 import NASBench201Space
from fednas_flwr.search_spaces.nasbench201_network import SearchCell

BETA = 0.7


def make_supernet(engine):
    space = NASBench201Space(
        input_shape=(3, 8, 8), num_classes=3, channels=4, num_cells=1, engine=engine
    )
    with seeded(1, "supernet"):
        supernet = space.supernet().train()
        with torch.no_grad():
            supernet.alphas()["cell"].copy_(torch.randn(6, 5))
    return supernet, space.ops


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_every_edge_gives_beta_times_its_input_besides(engine, monkeypatch):
    """Logits and the gradients of weights and alphas; the oracle mixes ops in a loop."""
    supernet, ops = make_supernet(engine)
    x = torch.randn(4, 3, 8, 8, generator=make_generator(1, "x"))
    network = AuxiliarySkip(supernet, column=ops.index(SKIP), beta=BETA)
    found = network(x)

    def forward(cell, state, weights_EO):
        states, edge = [state], 0
        for target in range(1, 4):
            total = 0.0
            for source in range(target):
                mixed = [
                    weights_EO[edge, ops.index(name)] * op(states[source])
                    for name, op in cell.edges[edge].ops.items()
                ]
                total = total + sum(mixed) + BETA * states[source]
                edge += 1
            states.append(total)
        return states[-1]

    monkeypatch.setattr(SearchCell, "forward", forward)
    slow, _ = make_supernet("reference")
    expected = slow(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    plain = [*supernet.alphas().values(), *supernet.weights().values()]
    other = [*slow.alphas().values(), *slow.weights().values()]
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), plain, allow_unused=True),
        torch.autograd.grad(expected.square().sum(), other, allow_unused=True),
        strict=True,
    ):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
