"""A search by scores alone: no record is read, no client is asked, nothing of a budget is spent.

:func:`search` ranks architectures by data-free scores, drawn at random or bred by regularised
evolution, within limits of cost. Its result is a ranking: the first is the choice,
the first few are a pool that records can decide in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.search.data_free_scores import combine
from fednas_flwr.settings.optimizers import EvolutionSettings
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.genotype import Genotype, to_json
from fednas_flwr.spaces.space import SearchSpace

Score = Callable[[Genotype], Mapping[str, float]]
TRIES = 200  # in a row without a new architecture within the limits, before the search gives up


class Scored(NamedTuple):
    """An architecture and its scores by name.

    Attributes:
        genotype: The architecture.
        scores: The scores that rank all architectures.
        further: The scores that rank a shortlist; None outside of it.
        number: Number of architectures that were found before it.
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
) -> list[str]:
    """The names of the limits on cost that a genotype's network exceeds.

    Args:
        limits: Highest cost by name: ``parameters``, ``multiply_adds`` of one example, or
            ``latency_ms``.
        space: The genotype's space, at the network's sizes.
        genotype: Built without memory for its weights.
        latency_ms: Function that returns the latency of a genotype; needed with a limit of it.
    """
    costs: dict[str, float] = {}
    if limits.keys() - {"latency_ms"}:
        with torch.device("meta"):
            network = space.network(genotype)
            costs["parameters"] = count_parameters(network)
            if "multiply_adds" in limits:
                costs["multiply_adds"] = count_multiply_adds(network, space.input_shape)
    if "latency_ms" in limits:
        assert latency_ms is not None
        costs["latency_ms"] = latency_ms(genotype)
    return [name for name, most in limits.items() if costs[name] > most]


def search(
    space: SearchSpace,
    score: Score,
    *,
    draws: int,
    generator: torch.Generator,
    evolution: EvolutionSettings | None = None,
    limits: Mapping[str, float] = {},
    latency_ms: Callable[[Genotype], float] | None = None,
    limited: SearchSpace | None = None,
    known: Sequence[Scored] = (),
) -> list[Scored]:
    """Different architectures, the best first, by ``combine`` over all of them.

    Without ``evolution`` all are drawn at random. With it the first are, as many as a population
    holds; then each is a mutated copy of the best of a tournament, and the oldest leave the
    population (Real et al. 2019, arXiv 1802.01548, Alg. 1). Deviations: an architecture is scored
    once, so that a mutation that leads to a known one is made anew; members of a tournament are
    drawn with replacement and compared by their place in the ranking so far.

    Args:
        space: Space of the architectures; none is degenerate.
        score: Function that returns the scores of a genotype, such as ``data_free_scores.measure``
            with all other arguments given. Every genotype must get the same names.
        draws: Number of architectures to score; fewer where the space has no more.
        generator: All that is random comes from it, so that its state fixes the result.
        evolution: Sizes of population and tournament.
        limits: Limits on the cost of a network, see :func:`exceeded`.
        latency_ms: See :func:`exceeded`.
        limited: The space at the sizes of the networks that the limits are for; None: ``space``.
        known: Result of an earlier search, which this one goes on with: its architectures come
            back, too, are not scored again, and the youngest of them are the population.

    Raises:
        ConfigError: No architecture within the limits was found.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    scored = {to_json(one.genotype): one for one in sorted(known, key=lambda one: one.number)}
    refused: Counter[str] = Counter()
    tried, seen = 0, set(scored)
    while len(scored) < len(known) + draws and tried < TRIES:
        tried += 1
        if evolution is not None and len(scored) >= evolution.population:
            genotype = _child(space, list(scored.values()), evolution, generator)
        else:
            genotype = space.random_genotype(generator)
        key = to_json(genotype)
        if key in seen:
            continue
        seen.add(key)
        over = exceeded(limits, limited or space, genotype, latency_ms)
        refused.update(over)
        if not over:
            scored[key] = Scored(genotype, score(genotype), number=len(scored))
            tried = 0
    if limits and not scored:
        counts = (f"{n} exceed {name}={limits[name]}" for name, n in refused.items())
        raise ConfigError(
            f"no network of search_space={space.name} is within the limits: of {len(seen)} drawn, "
            f"{', '.join(counts)}: raise them, or lower the network's sizes (retrain.channels, "
            "retrain.num_cells, or those of search_space)."
        )
    return ranked(list(scored.values()))


def ranked(scored: list[Scored]) -> list[Scored]:
    """Architectures by their scores, the best first; of equals the first found."""
    return _ordered(scored, [one.scores for one in scored])


def _ordered(scored: list[Scored], scores: Sequence[Mapping[str, float]]) -> list[Scored]:
    combined = combine(scores)
    order = sorted(range(len(scored)), key=lambda index: -combined[index])
    return [scored[index] for index in order]


def shortlisted(ranking: list[Scored], score: Score, *, keep: int) -> list[Scored]:
    """A ranking whose first ``keep`` are ordered by further scores, combined among them.

    Args:
        ranking: The best first.
        score: Function that returns the further scores of a genotype that has none yet.
        keep: Number of architectures, at most all.
    """
    best = [
        one if one.further is not None else one._replace(further=score(one.genotype))
        for one in ranking[:keep]
    ]
    return _ordered(best, [one.further or {} for one in best]) + ranking[keep:]


def mutate(space: SearchSpace, genotype: Genotype, generator: torch.Generator) -> Genotype:
    """A genotype that differs in one edge: its op, or the node that it reads.

    The edge is drawn anew until the result belongs to the space and is not degenerate; a drawn
    genotype of the space gives the op or the source.
    """
    cells = genotype.cells.items()
    places = [(kind, index) for kind, edges in cells for index in range(len(edges))]
    while True:
        kind, index = places[int(torch.randint(len(places), (), generator=generator))]
        moves = bool(torch.randint(2, (), generator=generator))
        other = space.random_genotype(generator).cells[kind][index]
        edges = list(genotype.cells[kind])
        edge = edges[index]
        edges[index] = replace(edge, source=other.source) if moves else replace(edge, op=other.op)
        edges.sort(key=lambda edge: (edge.target, edge.source))
        child = replace(genotype, cells={**genotype.cells, kind: tuple(edges)})
        try:
            space.check(child)
        except ConfigError:  # two edges from one node
            continue
        if child != genotype and not space.is_degenerate(child):
            return child


def _child(
    space: SearchSpace,
    scored: list[Scored],
    evolution: EvolutionSettings,
    generator: torch.Generator,
) -> Genotype:
    """A mutated copy of the best of a tournament among the youngest."""
    combined = combine([one.scores for one in scored])
    first = len(scored) - evolution.population
    size = (evolution.tournament,)
    drawn = torch.randint(first, len(scored), size, generator=generator).tolist()
    return mutate(space, scored[max(drawn, key=combined.__getitem__)].genotype, generator)
