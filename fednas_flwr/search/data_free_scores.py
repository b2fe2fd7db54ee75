"""Data-free scores of networks that have seen no record, and a search by these scores.

Each score is a number for a network with new weights; it is larger for networks that it considers
better. No score reads data, so that a server can rank architectures alone and no client spends
anything. :func:`measure` computes any of them for a genotype of any space; :func:`combine` turns
several into one ranking. :func:`search` ranks architectures that are drawn at random within limits
of cost. The first is the choice; the first few are a pool from which a search with records can
choose.

We recommend ``AZ_NAS``: of the published scores it has the highest rank correlation on
NAS-Bench-201, after 12 epochs (.56, synflow .36; ``scripts/results/scores.json``) and in its paper
after 200, and of 250 cells it seldom chooses a bad one. No score is best everywhere: none of the
published ones can rank good cells among each other. ``learning`` can: it trains a network for some
steps on a made-up task. It costs seconds, so it is meant for the best networks by other scores. Its
task, and its use together with multiply-adds, were chosen by that table; the published scores were
not tuned.

Scores depend on depth: stacked cells without a bypass train badly, which a network of one cell per
stage does not show. Give the space the depth at which networks will be used; width matters little.

Tensor suffixes: B batch, C channels, H height, W width, P positions (batch and pixels), N networks.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.errors import ConfigError, check_choice
from fednas_flwr.base.layers import hooked
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.optimizer_step import PlainSGD
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.genotype import Genotype, to_json
from fednas_flwr.spaces.space import SearchSpace

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SELU, nn.Tanh, nn.Hardtanh, nn.Sigmoid)
WEIGHTED = (nn.Linear, nn.Conv2d)
LEARNING_BATCH, LEARNING_RATE = 32, 0.1  # learning rate of the first step
LARGEST_SIDE = 16  # side of images in the made-up task
Shape = tuple[int, ...]  # shape of one example
Measure = Callable[[nn.Module, Shape, torch.Generator], float | tuple[float, ...]]
Scores = Callable[[list[Genotype]], Iterable[Mapping[str, float]]]  # of each genotype, in order
Costs = Callable[[Genotype], Mapping[str, float]]
TRIES = 200  # in a row without a new architecture within the limits, after which the search ends


def measure(
    space: SearchSpace, genotype: Genotype, scores: Iterable[str], *, seed: int
) -> dict[str, float]:
    """The scores of a genotype's network at the space's own sizes.

    Only ``learning`` is measured on images of at most 16 pixels a side, which costs a quarter of 32
    pixels. All networks of a seed are initialised from the same random numbers and given the same
    inputs, so that a score does not depend on when it is computed.

    Args:
        space: Search space, with the shape of an example.
        genotype: A genotype of that space.
        scores: Names from ``SCORES``.
        seed: Seed of initialisation and inputs.

    Raises:
        ConfigError: A name is unknown, or the genotype is not of the space.
    """
    wanted = list(scores)
    for name in wanted:
        check_choice("score", name, SCORES)
    values: dict[str, float] = {}
    for names, measured in MEASURES.items():
        if set(names) & set(wanted):
            of = space
            if names == ("learning",):
                channels, *sides = space.input_shape
                small = (channels, *(min(side, LARGEST_SIDE) for side in sides))
                of = replace(space, input_shape=small)
            with seeded(seed, "scored network"):
                network = of.network(genotype)
            if space.own_ops or space.name not in BUILT_ANEW:
                network = deepcopy(network)  # as it is changed
            numbers = measured(network, of.input_shape, make_generator(seed, *names))
            each = numbers if isinstance(numbers, tuple) else (numbers,)
            values |= zip(names, each, strict=True)
    return {name: values[name] for name in wanted}


def combine(values: Sequence[Mapping[str, float]]) -> list[float]:
    """One number per network, for comparing networks that were measured together.

    ``sum_s log(rank_s / N)``, where the rank is the number of networks that a network equals or
    beats by score s. Lee and Ham (2024), AZ-NAS, arXiv 2403.19232, "non-linear ranking
    aggregation": a network that is bad by one score is punished more than other scores reward it.
    With a single score the order is that of the score. NaN ranks below all other values.

    Args:
        values: The scores of each of N networks, all with the same names.

    Example:
        >>> combine([{"a": 1.0}, {"a": 3.0}, {"a": 3.0}])
        [-1.0986122886681098, 0.0, 0.0]
    """
    total = torch.zeros(len(values), dtype=torch.float64)
    for name in values[0] if values else ():
        column_N = torch.tensor([value[name] for value in values], dtype=torch.float64)
        column_N = column_N.nan_to_num(nan=-math.inf)
        ranks_N = torch.searchsorted(column_N.sort().values, column_N, right=True)
        total += (ranks_N.double() / len(values)).log()
    return total.tolist()


def synflow(network: nn.Module, input_shape: Shape) -> float:
    """The logarithm of synaptic flow, ``log sum_theta theta * dL/dtheta``.

    With all parameters replaced by their absolute values, an input of ones, and L the sum of the
    outputs: for a chain of layers L is ``1^T prod_l |W_l| 1``. Tanaka et al. (2020), arXiv
    2006.05467; as a score of architectures: Abdelfattah et al. (2021), arXiv 2101.08134, who omit
    the norms, as we do, and compute in float64.

    Deviations: activations are identities, as ReLU is one here; tanh would saturate and ReLU6 would
    stop the gradient. Biases count, too. The logarithm keeps the order.

    Args:
        network: The network, which is changed by the call.
        input_shape: Shape of one example.
    """
    network.double().eval()
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, (*NORMS, *ACTIVATIONS)):
                setattr(parent, name, nn.Identity())
    parameters = list(network.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.abs_()
    flow = network(torch.ones(1, *input_shape, dtype=torch.float64)).sum()
    gradients = torch.autograd.grad(flow, parameters, allow_unused=True)
    total = sum(
        float((parameter.detach() * gradient).sum())
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    )
    return math.log(total) if total > 0 else -math.inf


def az_nas_parts(
    network: nn.Module, input_shape: Shape, generator: torch.Generator, *, batch_size: int = 16
) -> tuple[float, float, float]:
    """Expressivity, progressivity and trainability; AZ-NAS' fourth part is multiply-adds.

    Lee and Ham (2024), arXiv 2403.19232, for weights from He's normal distribution and inputs from
    N(0, 1). The parts are computed from the features of each module of the chain, stem and cells:

    - expressivity: the sum of the entropies of their principal components' shares of variance;
    - progressivity: the least growth of that entropy from one module to the next;
    - trainability: the mean of ``2 - s - 1/s`` with s the largest singular value of a module's
      Jacobian, estimated as ``E[g_in g_out^T]`` with g_out random signs: gradients that neither
      grow nor vanish.

    Deviations: 16 inputs instead of 64; modules that are the identity are omitted from the
    trainability, which is -inf for such networks in the published code; sides that the stride does
    not divide are padded.

    Args:
        network: The network, which is changed by the call.
        input_shape: Shape of one example.
        generator: Source of weights, inputs and signs.
        batch_size: Number of inputs.
    """
    network.train()
    for module in network.modules():
        if isinstance(module, WEIGHTED):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    x = torch.randn(batch_size, *input_shape, generator=generator).requires_grad_()
    chain: list[nn.Module] = network.chain()  # type: ignore[operator]
    output_of: dict[nn.Module, Tensor] = {}
    with hooked(chain, lambda module, _, output: output_of.update({module: output})):
        network(x)
    features = [output_of[module] for module in chain]
    entropies = torch.stack([_entropy(feature.detach()) for feature in features])
    terms = []
    for inputs, outputs in zip(features[:-1], features[1:], strict=True):
        g_out = torch.randint(2, outputs.shape, generator=generator).to(outputs) * 2 - 1
        # To check the shape of g_out as an argument, torch would load sympy: half a second.
        (g_in,) = torch.autograd.grad((outputs * g_out).sum(), inputs, retain_graph=True)
        if g_in.shape == g_out.shape and torch.equal(g_in, g_out):
            continue
        largest = float(torch.linalg.matrix_norm(_jacobian(g_in, g_out), ord=2))
        terms.append(2 - largest - 1 / (largest + 1e-6))
    trainability = sum(terms) / len(terms) if terms else -math.inf
    return float(entropies.sum()), float(entropies.diff().min()), trainability


def learning(
    network: nn.Module, input_shape: Shape, generator: torch.Generator, *, steps: int = 60
) -> float:
    """Minus the mean loss, in nats, of the last third of some steps on a made-up task.

    An input of a class is the class' pattern, at a random place, plus as strong noise; pattern and
    noise are drawn alike, those of images with the 1/f spectrum of natural ones. The result shows
    how well a network of this depth can be trained, on records as on other data. Made-up data rank
    networks in Such et al. (2020), arXiv 1912.07768, who learn the data, and Rawal et al. (2020),
    arXiv 2005.13092; the task is ours.

    Args:
        network: The network, which is changed by the call.
        input_shape: Shape of one example; images are (channels, height, width).
        generator: Source of patterns, classes, places and noise.
        steps: Number of steps of SGD with momentum .9, whose learning rate falls linearly to 0.
    """
    network.train()
    with torch.no_grad():
        outputs = network(torch.zeros(2, *input_shape)).shape[1]
    num_classes = max(2, outputs)  # a network for numbers distinguishes two classes
    patterns = _noise(num_classes, input_shape, generator)
    optimizer = PlainSGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    for step in range(steps):
        labels_B = torch.randint(num_classes, (LEARNING_BATCH,), generator=generator)
        x = patterns[labels_B]
        for axis, size in enumerate(input_shape[1:], 1):
            places = torch.randint(size, (LEARNING_BATCH,), generator=generator).tolist()
            x = torch.stack([image.roll(k, axis) for image, k in zip(x, places, strict=True)])
        x = x + _noise(LEARNING_BATCH, input_shape, generator)
        loss = F.cross_entropy(F.pad(network(x), (num_classes - outputs, 0)), labels_B)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / steps)
        optimizer.step()
    last = losses[-(steps // 3) :]
    return -sum(last) / len(last)


# Groups of scores that are computed together, by their names in order.
MEASURES: dict[tuple[str, ...], Measure] = {
    ("synflow",): lambda network, shape, _: synflow(network, shape),
    ("parameters",): lambda network, *_: float(count_parameters(network)),
    ("multiply_adds",): lambda network, shape, _: float(count_multiply_adds(network, shape)),
    ("expressivity", "progressivity", "trainability"): az_nas_parts,
    ("learning",): learning,
}
# Spaces whose networks share no part with each other.
BUILT_ANEW = ("nasbench201", "darts", "mlp", "mbconv", "dp_cells")
SCORES = tuple(name for names in MEASURES for name in names)
AZ_NAS = ("expressivity", "progressivity", "trainability", "multiply_adds")
SYNFLOW = ("synflow",)
# Spaces whose networks AZ-NAS ranks no better than chance, or for which it was not measured.
UNRANKED = ("darts", "mbconv", "adapters")


def trusted_scores(space: str) -> tuple[str, ...]:
    """The scores that rank a space's networks; empty if AZ-NAS does not rank them.

    For DARTS' cells and MBConv blocks, the best of 250 by AZ-NAS is about as accurate as the first
    one drawn (``scripts/results/spaces.json``).

    Args:
        space: Name of the space.
    """
    return () if space in UNRANKED else AZ_NAS


def _noise(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """Gaussian noise of unit variance [count, *shape]; images with a spectrum of 1/f."""
    white = torch.randn(count, *shape, generator=generator)
    if len(shape) == 1:
        return white
    rows_H, columns_W = (torch.fft.fftfreq(size) for size in shape[1:])
    frequency_HW = torch.hypot(rows_H[:, None], columns_W)
    spectrum = torch.fft.fft2(white) / frequency_HW.clamp(min=1 / max(shape[1:]))
    noise = torch.fft.ifft2(spectrum).real
    return noise / noise.std(dim=(1, 2, 3), keepdim=True)


def _entropy(feature: Tensor) -> Tensor:
    """The entropy in nats of the shares of variance of a feature's principal components."""
    positions_PC = feature.movedim(1, -1).flatten(0, -2)
    centred_PC = positions_PC - positions_PC.mean(dim=0)
    eigenvalues = torch.linalg.eigvalsh(centred_PC.T @ centred_PC / len(centred_PC)).clamp(min=0)
    shares = eigenvalues / eigenvalues.sum().clamp(min=torch.finfo(feature.dtype).tiny)
    return torch.special.entr(shares).sum()


def _jacobian(g_in: Tensor, g_out: Tensor) -> Tensor:
    """The mean over positions of ``g_in g_out^T``; each position reads stride^2 pixels."""
    strides = [-(-a // b) for a, b in zip(g_in.shape[2:], g_out.shape[2:], strict=True)]
    for axis, (stride, size) in enumerate(zip(strides, g_out.shape[2:], strict=True), 2):
        missing = stride * size - g_in.shape[axis]
        g_in = F.pad(g_in, (*(0, 0) * (g_in.dim() - 1 - axis), 0, missing))
        g_in = torch.unflatten(g_in, axis, (size, stride)).movedim(axis + 1, 1).flatten(1, 2)
    in_PC, out_PC = (g.movedim(1, -1).flatten(0, -2) for g in (g_in, g_out))
    return in_PC.T @ out_PC / len(out_PC)


class Scored(NamedTuple):
    """An architecture and its scores by name.

    Attributes:
        genotype: The architecture.
        scores: The scores that rank all architectures.
        further: The scores that rank a shortlist; None for networks outside it.
        number: Number of architectures that were found earlier.
    """

    genotype: Genotype
    scores: Mapping[str, float]
    further: Mapping[str, float] | None = None
    number: int = 0


def exceeded(
    limits: Mapping[str, float],
    space: SearchSpace,
    genotype: Genotype,
    latency_ms: Callable[[Genotype], float] | None = None,
) -> dict[str, float]:
    """The costs, by name, in which a genotype's network exceeds limits.

    Args:
        limits: Highest allowed cost by name: ``parameters``, ``multiply_adds`` of one example, or
            ``latency_ms``.
        space: The genotype's space, at the network's sizes.
        genotype: The genotype, whose network is built without memory for weights.
        latency_ms: Function that returns the latency of a genotype; needed if latency is limited.
    """
    costs: dict[str, float] = {}
    if limits.keys() - {"latency_ms"}:
        with torch.device("meta"):
            network = space.network(genotype)
            costs["parameters"] = count_parameters(network)
            if "multiply_adds" in limits:
                costs["multiply_adds"] = count_multiply_adds(network, space.input_shape)
    if latency_ms is not None and "latency_ms" in limits:
        costs["latency_ms"] = latency_ms(genotype)
    return {name: costs[name] for name, most in limits.items() if costs[name] > most}


def smallest(space: SearchSpace, costs: Costs, name: str) -> float:
    """The lowest cost, of one kind, of a space's networks that are not degenerate.

    It is exact if the costs of ops add up and have the same order on all edges. Then the network
    has the cheapest op on every edge but one, which has the cheapest op with weights.
    """

    def cost_of(likeliness: Tensor) -> float:
        row = likeliness.expand(len(space.edges), -1)
        return costs(space.derive(dict.fromkeys(space.kinds, row)))[name]

    alone = list(map(cost_of, torch.eye(len(space.ops))))
    return min(*alone, cost_of(torch.tensor(alone) / -max(alone)))


def search(
    space: SearchSpace,
    score: Scores,
    *,
    draws: int,
    generator: torch.Generator,
    limits: Mapping[str, float] = {},
    latency_ms: Callable[[Genotype], float] | None = None,
    limited: SearchSpace | None = None,
    known: Sequence[Scored] = (),
) -> list[Scored]:
    """Different architectures, best first, by ``combine`` over all of them.

    Args:
        space: Space of the architectures; none of them is degenerate.
        score: Function that returns the scores of each of some genotypes, in the form of
            :func:`measure`. Every genotype must get the same names.
        draws: Number of architectures to score; fewer if the space has no more.
        generator: Source of all random draws, so that its state determines the result.
        limits: Limits on the cost of a network, see :func:`exceeded`.
        latency_ms: See :func:`exceeded`.
        limited: The space at the sizes to which the limits apply; None means ``space``.
        known: Result of an earlier search, which this one continues: its architectures are
            returned, too, and are not scored again.

    Raises:
        ConfigError: No architecture within the limits was found.
    """
    scored = {to_json(one.genotype): one for one in sorted(known, key=lambda one: one.number)}
    refused, drawn = dict[str, list[float]](), list[Genotype]()
    tried, seen, limited = 0, set(scored), limited or space
    while len(drawn) < draws and tried < TRIES:
        tried += 1
        genotype = space.random_genotype(generator)
        key = to_json(genotype)
        if key in seen:
            continue
        seen.add(key)
        over = exceeded(limits, limited, genotype, latency_ms)
        for name, cost in over.items():
            refused.setdefault(name, []).append(cost)
        if not over:
            drawn.append(genotype)
            tried = 0
    if limits and not scored and not drawn:
        costs = partial(exceeded, dict.fromkeys(limits, -1), limited, latency_ms=latency_ms)
        counts = (
            f"{len(over)} exceed {name}={limits[name]} (the smallest possible has "
            f"{min(smallest(limited, costs, name), *over):,.10g})"
            for name, over in refused.items()
        )
        raise ConfigError(
            f"no network of search_space={space.name} is within the limits: of {len(seen)} drawn, "
            f"{', '.join(counts)}: raise them, or lower the network's sizes (retrain.channels, "
            "retrain.num_cells, or those of search_space)."
        )
    pairs = enumerate(zip(drawn, score(drawn), strict=True), len(scored))
    found = [Scored(genotype, scores, number=number) for number, (genotype, scores) in pairs]
    return ranked([*scored.values(), *found])


def ranked(scored: list[Scored]) -> list[Scored]:
    """Architectures by their scores, best first; among equals the first found."""
    return _ordered(scored, [one.scores for one in scored])


def _ordered(scored: list[Scored], scores: Sequence[Mapping[str, float]]) -> list[Scored]:
    combined = combine(scores)
    order = sorted(range(len(scored)), key=lambda index: -combined[index])
    return [scored[index] for index in order]


def shortlisted(ranking: list[Scored], score: Scores, *, keep: int) -> list[Scored]:
    """A ranking whose first ``keep`` networks are ordered by further scores, combined among them.

    Args:
        ranking: Architectures, best first.
        score: Function that returns the further scores of each genotype that has none yet.
        keep: Number of architectures in the shortlist, at most all.
    """
    further = iter(score([one.genotype for one in ranking[:keep] if one.further is None]))
    best = [
        one if one.further is not None else one._replace(further=next(further))
        for one in ranking[:keep]
    ]
    return _ordered(best, [one.further or {} for one in best]) + ranking[keep:]
