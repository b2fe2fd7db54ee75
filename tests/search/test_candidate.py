"""Candidates: paths of a supernet, drawn or given, and pools."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.candidate import CELL_SPACE, Candidate, GumbelPath
from fednas_flwr.search.exact_gradients import ClippedGradients, ExactGradients
from fednas_flwr.search.local_search import Alternating, alternate, train_candidates
from fednas_flwr.search.optimizer_step import Optimizer
from fednas_flwr.settings.optimizers import SGD, Adam, DPAware, Temperatures
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.dp_cells import DPCellSpace
from fednas_flwr.spaces.nasbench201 import NASBench201Space

from ..reference_engine import by
from .conftest import tensors_of
from .test_local_search import optimizers_of

SPACE = DPCellSpace(input_shape=(2, 6, 5), num_classes=3, widths=(4, 4, 8), head=8)
PATHS = {
    "every op": [*range(10), *range(4, 9)],
    "convolutions": [4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9, 4, 5, 6],
}


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("dp_aware", [None, DPAware(0.05, 0.0), DPAware(0.05, 2.0)])
def test_candidates_are_trained_one_after_the_other(dp_aware):
    """Batch by batch, momentum kept; DP-aware ``(sum_i clip(g_i) + C N(0, sigma^2 I)) / B``."""
    with seeded(0, "supernet"):
        supernet, twin = (SPACE.supernet().double().train() for _ in range(2))
    twin.load_state_dict(supernet.state_dict())
    generator, noise, again = (make_generator(0, name) for name in ("records", "noise", "noise"))
    batches = [tensors_of(SPACE.input_shape, 3, 3, generator) for _ in range(4)]
    constants = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    own = {} if dp_aware is None else {"dp_aware": dp_aware, "generator": noise}
    kind = ExactGradients if dp_aware is None else ClippedGradients
    gradients = kind(lambda: iter(batches), num_steps=4, **own)
    weights = supernet.weights()
    optimizer = Optimizer(weights, torch.optim.SGD(weights.values(), **constants))
    train_candidates(supernet, list(PATHS.values()), gradients, optimizer, steps=2)
    sgd, norms = torch.optim.SGD(twin.weights().values(), **constants), []
    for position, (x, y) in enumerate(batches):
        candidate = Candidate(twin, list(PATHS.values())[position // 2])
        weights = list(candidate.weights().values())
        total = [torch.zeros_like(weight) for weight in weights]
        for i in range(3):
            loss = F.cross_entropy(candidate(x[i, None]), y[i, None])
            record = torch.autograd.grad(loss, weights)
            norms.append(torch.cat([g.reshape(-1) for g in record]).norm().item())
            scale = 1.0 if dp_aware is None else min(1.0, dp_aware.max_grad_norm / norms[-1])
            total = [t + scale * g for t, g in zip(total, record, strict=True)]
        sgd.zero_grad()
        for weight, gradient in zip(weights, total, strict=True):
            if dp_aware is not None:
                std = dp_aware.noise_multiplier * dp_aware.max_grad_norm
                gradient = gradient + std * torch.randn(gradient.shape, generator=again)
            weight.grad = gradient / 3
        sgd.step()
    assert max(norms) > 0.05
    assert gradients.train_tally.num_examples == 12
    for name, weight in supernet.weights().items():
        torch.testing.assert_close(weight, twin.weights()[name], rtol=1e-9, atol=1e-12, msg=name)


def test_other_spaces_have_no_candidates():
    darts = DARTSSpace(input_shape=(3, 8, 8), num_classes=3, channels=2, num_cells=3).supernet()
    with pytest.raises(ValueError, match="set it"):
        Candidate(darts, [0] * 15)


SIZES = {"input_shape": (3, 8, 8), "num_classes": 3, "channels": 4, "num_cells": 1}
WEIGHTS = SGD(0.1, 0.0, momentum=0.9, weight_decay=0.01, clip_norm=1.0)


def make_supernet(engine="fast", norm="batch", seed=0):
    with seeded(seed, "supernet"):
        supernet = by(engine, NASBench201Space(**SIZES, norm=norm).supernet())
        with torch.no_grad():
            supernet.alphas()["cell"].copy_(torch.randn(6, 5))
    return supernet.train()


def make_batch(seed, size=6):
    generator = make_generator(seed, "batch")
    x = torch.randn(size, *SIZES["input_shape"], generator=generator)
    return x, torch.randint(0, 3, (size,), generator=generator)


def draw(supernet, seed, temperature=2.0):
    generator = make_generator(seed, "gumbel")
    return GumbelPath(supernet, temperature=temperature, generator=generator)


def first_that_trains(alphas_EO, generator):
    """Return the first noise whose cell is not degenerate."""
    while True:
        noise_EO = -torch.empty(6, 5).exponential_(generator=generator).log()
        if trains((alphas_EO + noise_EO).argmax(-1).tolist()):
            return noise_EO


def trains(columns):
    return not CELL_SPACE.is_degenerate(CELL_SPACE.genotype(columns))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_path_is_the_supernet_with_all_other_ops_at_zero(engine, norm):
    """Logits, and the gradients of the path's weights and of the gates."""
    supernet, computed = make_supernet(engine, norm).double(), set()
    for seed in range(8):
        path, (x, y) = draw(supernet, seed), make_batch(seed)
        x = x.double()
        columns = torch.tensor(path.columns)[:, None]
        computed |= set(columns[:, 0].tolist())
        gates_E = torch.ones(6, dtype=torch.float64, requires_grad=True)
        weights_EO = torch.zeros(6, 5).double().scatter(1, columns, gates_E[:, None])
        dense = supernet(x, {"cell": weights_EO})
        single = path(x)
        torch.testing.assert_close(single, dense, rtol=1e-9, atol=1e-11)

        alphas_EO = supernet.alphas()["cell"].detach()
        gumbel_EO = first_that_trains(alphas_EO, make_generator(seed, "gumbel"))
        assert columns[:, 0].tolist() == (alphas_EO + gumbel_EO).argmax(-1).tolist()
        own = path.weights()
        loss = F.cross_entropy(dense, y)
        leaves = [gates_E, *own.values()]
        by_gates, *by_weights = torch.autograd.grad(loss, leaves, allow_unused=True)
        p_EO = ((alphas_EO + gumbel_EO) / 2.0).softmax(-1)
        p_E1, chosen_EO = p_EO.gather(1, columns), torch.zeros(6, 5).scatter(1, columns, 1.0)
        expected = by_gates[:, None] * p_E1 * (chosen_EO - p_EO) / 2.0
        loss, leaves = F.cross_entropy(single, y), [*path.alphas().values(), *own.values()]
        alphas, *weights = torch.autograd.grad(loss, leaves, allow_unused=True)
        torch.testing.assert_close(alphas, expected, rtol=1e-8, atol=1e-11)
        for (name, weight), mine, other in zip(own.items(), weights, by_weights, strict=True):
            mine, other = (torch.zeros_like(weight) if g is None else g for g in (mine, other))
            torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10, msg=name)
    assert computed == set(range(5))


def test_only_the_weights_of_drawn_ops_and_those_that_all_paths_share_are_the_paths():
    supernet = make_supernet()
    path = draw(supernet, 1)
    names = {"nor_conv_1x1": 2, "nor_conv_3x3": 3}
    for name in supernet.weights():
        parts = name.split(".")
        if "edges" in parts:
            edge, op = int(parts[parts.index("edges") + 1]), parts[parts.index("ops") + 1]
            assert (name in path.weights()) == (path.columns[edge] == names[op]), name
        else:
            assert name in path.weights(), name
    assert any(column in (2, 3) for column in path.columns)


def test_cells_that_train_are_drawn_with_the_softmax_of_the_alphas_at_any_temperature():
    """Of all 15,625 cells those that are not degenerate, with the product of their ops' shares."""
    supernet, generator = make_supernet(), make_generator(0, "draws")
    supernet.alphas()["cell"].data[:, 0] += 3  # none, so that many draws are degenerate
    counts = torch.zeros(6, 5)
    for _ in range(3000):
        columns = GumbelPath(supernet, temperature=0.1, generator=generator).columns
        counts[torch.arange(6), columns] += 1
        assert trains(columns)
    shares = supernet.alphas()["cell"].detach().softmax(-1)
    expected, total = torch.zeros(6, 5), 0.0
    for cell in itertools.product(range(5), repeat=6):
        if trains(cell):
            probability = shares[torch.arange(6), list(cell)].prod()
            expected[torch.arange(6), list(cell)] += probability
            total += float(probability)
    assert total < 0.7
    torch.testing.assert_close(counts / 3000, expected / total, rtol=0, atol=0.04)


def test_a_local_search_steps_alphas_and_weights_on_paths_of_their_own():
    """Against an explicit loop; weights beside a step's path neither move nor decay in it."""
    supernet = make_supernet(norm="group").double()  # some gates are scales before a norm
    twin, start = copy.deepcopy(supernet), copy.deepcopy(supernet)
    batches = [make_batch(seed) for seed in range(6)]
    batches = [(x.double(), y) for x, y in batches]
    train, validation = batches[:3], batches[3:]
    alternate(
        supernet,
        ExactGradients(lambda: iter(train), lambda: iter(validation)),
        optimizers_of(supernet, WEIGHTS, Adam(0.05, 1e-3)),
        Alternating("first_order", temperature=0.7),
        generator=make_generator(3, "paths"),
    )
    own = supernet.weights()
    generator = make_generator(3, "paths")
    weights, (alphas,) = list(twin.weights().values()), twin.alphas().values()
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01)
    adam = torch.optim.Adam([alphas], lr=0.05, betas=(0.5, 0.999), weight_decay=1e-3)
    touched = set()
    for (x, y), (validation_x, validation_y) in zip(train, validation, strict=True):
        path = GumbelPath(twin, temperature=0.7, generator=generator)
        adam.zero_grad()
        sgd.zero_grad()
        F.cross_entropy(path(validation_x), validation_y).backward()
        adam.step()
        path = GumbelPath(twin, temperature=0.7, generator=generator)
        sgd.zero_grad()
        F.cross_entropy(path(x), y).backward()
        touched |= set(path.weights())
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        sgd.step()
    for mine, other in zip(supernet.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)
    initial = start.weights()
    still = [name for name in own if name not in touched]
    assert still
    assert all(torch.equal(own[name], initial[name]) for name in still)
    assert (supernet.alphas()["cell"] - start.alphas()["cell"]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("first", "last"), [(1e6, 1.0), (1.0, 1e6), (1e3, 1e-3), (10.0, 0.1)], ids=str
)
def test_temperatures_change_linearly_and_end_at_the_last_one(first, last):
    temperatures = Temperatures(first=first, last=last)
    found = [temperatures.at_round(number, 7) for number in range(1, 8)]
    assert found == pytest.approx([first + (last - first) * n / 6 for n in range(7)], rel=1e-9)
    assert found[0] == temperatures.at_round(1, 1) == first
    assert found[-1] == pytest.approx(last, rel=1e-12)
    assert found == sorted(found, reverse=first > last)


def test_what_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"second_order with single paths.*first_order"):
        Alternating("second_order", temperature=1.0)
    darts = DARTSSpace(**{**SIZES, "num_cells": 3}).supernet()
    with pytest.raises(ValueError, match=r"nasbench201 only"):
        draw(darts, 0)
