"""Results of earlier runs that a search begins with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.runs.numbers import EVENTS_FILE, Run, read_run
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.optimizers import PriorSettings
from fednas_flwr.spaces.cell_graph import CellGraphSpace, WholeGraphSpace, lead
from fednas_flwr.spaces.genotype import from_json
from fednas_flwr.spaces.space import SearchSpace


def found_alphas(config: Config, space: SearchSpace) -> dict[str, Tensor]:
    """The last alphas of the run that a pool's draws follow.

    Raises:
        ConfigError: It has none, or those of another space; or this run is private and it is not.
    """
    folder = config.algorithm.pool.alphas  # type: ignore[attr-defined]
    key = f"algorithm.pool.alphas={folder}"
    run = _earlier_run(config, key, folder)
    events = [] if run is None else run.alphas()
    if not events:
        raise ConfigError(f"{key} holds no alphas: give the folder of a one-shot search.")
    alphas = {kind: torch.tensor(values) for kind, values in events[-1]["alphas"].items()}
    try:
        if tuple(events[-1]["ops"]) != space.ops:
            raise ValueError("they are of other ops")
        space.derive(alphas)
    except ValueError as error:
        raise ConfigError(f"{key} does not fit search_space={space.name}: {error}.") from error
    return alphas


def prior_alphas(config: Config, space: SearchSpace) -> dict[str, Tensor]:
    """By how much alphas are larger at first, by kind of cell; nothing without a prior.

    Raises:
        ConfigError: The run has found no architecture, or one of another space, or the space has
            no cells; or this run is private and that one is not.
    """
    prior: PriorSettings | None = getattr(config.algorithm, "prior", None)
    if prior is None:
        return {}
    key = f"algorithm.prior.run={prior.run}"
    if not isinstance(space, CellGraphSpace | WholeGraphSpace):
        raise ConfigError(
            f"{key} with search_space={space.name}: alphas begin with a lead in spaces of cells "
            "only; set algorithm.prior=null."
        )
    run = _earlier_run(config, key, prior.run)
    found = {} if run is None else run.last("derived")
    if not found:
        raise ConfigError(f"{key} has found no architecture: give the folder of a search.")
    genotype = from_json(json.dumps(found["genotype"]), origin=key)
    space.check(genotype)
    return lead(genotype, prior.margin, ops=space.ops, nodes=space.nodes)


def _earlier_run(config: Config, key: str, folder: str) -> Run | None:
    """The run in a folder, None where there is none.

    Raises:
        ConfigError: This run is private, and that one's search has read records and was not.
    """
    path = Path(folder).expanduser()
    if not (path / EVENTS_FILE).is_file():
        return None
    run = read_run(path)
    rounds = run.rounds("search")
    data_free = bool(rounds) and all(event.get("exchanges") == 0 for event in rounds)
    if not (run.is_private or data_free) and isinstance(config.privacy, DifferentialPrivacy):
        raise ConfigError(
            f"{key} with privacy=dp: what a search without privacy has found is an exact function "
            "of records; give the folder of a private one, or of a data-free one."
        )
    return run
