"""Table: learning of DPNAS' controller from rewards of a known table, by its constants.

    python scripts/table_samplers.py --table <file> --column <names>

No network is trained: a NAS-Bench-201 cell's reward is its accuracy in the table's first column,
plus noise as large as the differences between cells, as in rewards from shared weights. In every
round a sampler proposes six cells and receives their rewards. The columns have the mean percentile,
by all of the table's accuracies, of the cells that it would then propose. Rewards differ either as
much as the accuracies or by a fifth of that. The script continues where it was stopped; every
finished search is added to scripts/results/samplers.json. It takes about a minute; its seconds are
CPU time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean, pstdev

import torch
from table_runs import add_missing, arguments_of_cells, start

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.report.lookup import CellTable, read_table
from fednas_flwr.search.samplers import Controller, Sampler
from fednas_flwr.search.samplers import Path as Candidate
from fednas_flwr.settings.optimizers import ControllerSettings
from fednas_flwr.spaces.nasbench201 import NASBench201Space

REWARDED = 6  # candidates per round, as in experiment=dpnas/fashion_mnist
SEEDS = range(1, 11)
ROUNDS = (30, 60, 100)  # numbers of rounds after which cells are looked up
PROPOSED = 200  # number of cells that are looked up
SPREADS = (1.0, 0.2)  # spreads of rewards, in units of that of the table's accuracies
CHOICES = (len(NASBench201Space.ops),) * 6
FASTER = ControllerSettings(
    lr=0.01, temperature=1.0, entropy_weight=0.05, baseline_decay=0.8, scaled=False
)
CONTROLLERS = {
    "controller, the paper's constants": replace(FASTER, lr=3e-4, baseline_decay=0.99),
    "controller, learning rate .01": FASTER,
    "controller, learning rate .01, scaled": replace(FASTER, scaled=True),
}


def main() -> None:
    """Make the missing searches."""
    options = arguments_of_cells(__doc__).parse_args()
    torch.set_num_threads(1)
    table = read_table(options.table, options.column)
    results = start(
        "samplers",
        title="Mean percentile of proposed NAS-Bench-201 cells, with rewards from a table",
        command="python scripts/table_samplers.py --table <file> --column <names>",
        columns=[
            {"metric": f"percentile_{rounds}", "title": f"after {rounds} rounds", "decimals": 1}
            for rounds in ROUNDS
        ],
        against={"sampler": "random"},
    )
    rows = [("random", 1.0), *itertools.product(CONTROLLERS, SPREADS)]
    for (name, spread), seed in itertools.product(rows, SEEDS):
        add_missing(
            results,
            partial(search, table, name, spread, seed=seed),
            settings={
                "sampler": name,
                "constants": asdict(CONTROLLERS[name]) if name in CONTROLLERS else None,
                "spread": spread,
                "rewarded": REWARDED,
                "table": options.table.name,
            },
            group={"sampler": name, "spread of rewards": f"{spread:g}"},
            seed=seed,
            clock=time.process_time,
        )


def make_sampler(name: str, seed: int) -> Sampler:
    """Return one of the controllers, initialised from the seed, or random draws."""
    if name not in CONTROLLERS:
        return Sampler(CHOICES)
    with seeded(seed, "sampler"):
        return Controller(CHOICES, CONTROLLERS[name])


def search(table: CellTable, name: str, spread: float, *, seed: int) -> dict[str, float]:
    """Return the mean percentiles of the cells proposed after each number of rounds.

    Args:
        table: The table with the rewards.
        name: Name of the sampler, which proposes and learns.
        spread: Factor of the cells' differences and of the noise.
        seed: Seed of the draws and the noise.
    """
    sampler = make_sampler(name, seed)
    generator, reward = make_generator(seed, "table_samplers"), rewarding(table, spread)
    metrics = {}
    for number in range(1, max(ROUNDS) + 1):
        paths = sampler.sample(REWARDED, generator)
        sampler.learn(paths, [reward(path, generator) for path in paths])
        if number in ROUNDS:
            proposed = sampler.sample(PROPOSED, make_generator(seed, "proposed", number))
            metrics[f"percentile_{number}"] = fmean(table.percentiles[cell(p)] for p in proposed)
    return metrics


def rewarding(table: CellTable, spread: float) -> Callable[[Candidate, torch.Generator], float]:
    """Return the function that rewards a candidate, around the mean accuracy of all cells."""
    first = [values[0] for values in table.accuracies.values()]
    unit = 100.0 if max(first) > 1 else 1.0  # rewards are from 0 to 1
    mean, deviation = fmean(first), pstdev(first)

    def reward(path: Candidate, generator: torch.Generator) -> float:
        noise = deviation * float(torch.randn((), generator=generator))
        accuracy = table.accuracies[cell(path)][0]
        return (mean + spread * (accuracy - mean + noise)) / unit

    return reward


def cell(path: Candidate) -> tuple[str, ...]:
    """Return the ops of a candidate's edges."""
    return tuple(NASBench201Space.ops[op] for op in path)


if __name__ == "__main__":
    main()
