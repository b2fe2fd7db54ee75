"""A search by scores alone: no record is read, no client is asked, nothing of a budget is spent.

:func:`search` ranks architectures by data-free scores, drawn at random within limits of cost. Its
result is a ranking: the first is the choice, the first few are a pool that records can decide in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.search.data_free_scores import combine
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.genotype import Genotype, to_json
from fednas_flwr.spaces.space import SearchSpace

Scores = Callable[[list[Genotype]], Iterable[Mapping[str, float]]]  # of each, in their order
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
) -> dict[str, float]:
    """The costs, by name, in which a genotype's network exceeds limits.

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
    return {name: costs[name] for name, most in limits.items() if costs[name] > most}


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
    """Different architectures, the best first, by ``combine`` over all of them.

    Args:
        space: Space of the architectures; none is degenerate.
        score: Function that returns the scores of each of some genotypes, as
            ``data_free_scores.measure`` has them. Every genotype must get the same names.
        draws: Number of architectures to score; fewer where the space has no more.
        generator: All that is random comes from it, so that its state fixes the result.
        limits: Limits on the cost of a network, see :func:`exceeded`.
        latency_ms: See :func:`exceeded`.
        limited: The space at the sizes of the networks that the limits are for; None: ``space``.
        known: Result of an earlier search, which this one goes on with: its architectures come
            back, too, and are not scored again.

    Raises:
        ConfigError: No architecture within the limits was found.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    scored = {to_json(one.genotype): one for one in sorted(known, key=lambda one: one.number)}
    refused, drawn = dict[str, list[float]](), list[Genotype]()
    tried, seen = 0, set(scored)
    while len(drawn) < draws and tried < TRIES:
        tried += 1
        genotype = space.random_genotype(generator)
        key = to_json(genotype)
        if key in seen:
            continue
        seen.add(key)
        over = exceeded(limits, limited or space, genotype, latency_ms)
        for name, cost in over.items():
            refused.setdefault(name, []).append(cost)
        if not over:
            drawn.append(genotype)
            tried = 0
    if limits and not scored and not drawn:
        counts = (
            f"{len(costs)} exceed {name}={limits[name]} (the least of them has {min(costs):,.10g})"
            for name, costs in refused.items()
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
    """Architectures by their scores, the best first; of equals the first found."""
    return _ordered(scored, [one.scores for one in scored])


def _ordered(scored: list[Scored], scores: Sequence[Mapping[str, float]]) -> list[Scored]:
    combined = combine(scores)
    order = sorted(range(len(scored)), key=lambda index: -combined[index])
    return [scored[index] for index in order]


def shortlisted(ranking: list[Scored], score: Scores, *, keep: int) -> list[Scored]:
    """A ranking whose first ``keep`` are ordered by further scores, combined among them.

    Args:
        ranking: The best first.
        score: Function that returns the further scores of each genotype that has none yet.
        keep: Number of architectures, at most all.
    """
    further = iter(score([one.genotype for one in ranking[:keep] if one.further is None]))
    best = [
        one if one.further is not None else one._replace(further=next(further))
        for one in ranking[:keep]
    ]
    return _ordered(best, [one.further or {} for one in best]) + ranking[keep:]
