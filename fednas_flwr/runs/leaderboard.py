"""The leaderboard of a run: the networks it has compared, and the one it delivers.

With ``evaluation.deliver=best`` every candidate is trained without the clients' validation records,
for a third of the rounds. The best two and the linear model are trained for all rounds. Their
scores on the validation records decide; test records do not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import Any

from fednas_flwr.runs import numbers as rn
from fednas_flwr.settings.names import ACCURACY, FOUND, LINEAR

FINALISTS = 2  # besides the linear model
COSTS = ("multiply_adds", "latency_ms", "traffic_mb", "epsilon")  # of compared networks
FRONT = "front_"  # prefix of networks of different costs, numbered from the cheapest, 1


@dataclass(frozen=True)
class Candidate:
    """A network that was trained beside a run's, or the run's own.

    Attributes:
        name: Name of its folder: ``found``, ``random_1``, ``data_free``, ``linear``, ...
        run: Its longest training.
        short: Its training for a third of the rounds, which all candidates have.
    """

    name: str
    run: rn.Run
    short: rn.Run

    def is_within(self, limits: Mapping[str, float | None]) -> bool:
        """Return false if it exceeds limits of a search."""
        costs, row = ("parameters", "multiply_adds", "latency_ms"), self.row()
        return all((row[name] or 0.0) <= (limits.get(name) or math.inf) for name in costs)

    def row(self) -> dict[str, Any]:
        """Return its row in a leaderboard, with None for values that were not measured."""
        score, numbers, values = self.run.score, self.run.numbers(), _values(self.run)
        return {
            "network": self.name,
            "metric": score.name,
            "validation": score.sign * values[0] if values else None,
            "standard_error": _spread(values) if values else None,
            "test": self.run.test_score(),
            "interval": self.run.interval(),
            "accuracy": self.run.accuracy(),
            "rounds": len(self.run.rounds("retrain")),
            "parameters": numbers["num_parameters"],
            **{cost: numbers[cost] for cost in COSTS},
            "seconds": self.run.total_seconds(),
            "reason": "not finished" if self.run.status == "unfinished" else self.run.reason,
        }


def compared(run: rn.Run) -> list[dict[str, Any]]:
    """Return rows of the models that a run has compared: its own, then the others, best first.

    Models that need no search come last.
    """
    networks = [one.row() for one in _networks(run)]
    empty = dict.fromkeys(networks[0] if networks else ()) | {"reason": ""}
    by_accuracy = run.score.name == ACCURACY
    return networks + [
        empty
        | {"network": name, "test": value, "accuracy": value if by_accuracy else None}
        | {"interval": run.interval(rn.POOLED[name]) if name in rn.POOLED else None}
        for name, value in run.simpler().items()
        if name != rn.CLIENTS_LINEAR and networks
    ]


def _networks(run: rn.Run) -> list[Candidate]:
    choice = chosen(run.folder)
    name = f"delivered ({choice.name})" if choice else "found"
    first = [Candidate(name, run, run)] if run.last("evaluated") else []
    if choice:
        return first + candidates(run.folder)
    others = [Candidate(other.folder.name, other, other) for other in run.baselines()]

    def score(one: Candidate) -> float:
        found = one.run.test_score()
        return -math.inf if found is None else run.score.sign * found

    return first + sorted(others, key=lambda one: (-score(one), one.name))


def candidates(folder: Path) -> list[Candidate]:
    """Return the candidates of a run that have a score on validation records, best first."""
    short, long = (_scored(folder / place) for place in (rn.BASELINES_FOLDER, rn.FINALISTS_FOLDER))
    longest = partial(max, key=lambda run: len(run.rounds("retrain")))  # time may have cut one
    found = [Candidate(name, longest(long.get(name, run), run), run) for name, run in short.items()]
    return sorted(found, key=lambda one: (one.name not in long, -validated(one.run), one.name))


def finalists(folder: Path) -> list[str]:
    """Return the candidates to train for all rounds: the best two, linear model and front."""
    names = [one.name for one in sorted(candidates(folder), key=lambda one: -validated(one.short))]
    best = [name for name in names if name != LINEAR][:FINALISTS]
    fronts = [name for name in names if name.startswith(FRONT)]
    further = {LINEAR, *fronts, *([FOUND] if fronts else [])}.difference(best)
    return best + [name for name in names if name in further]


def chosen(folder: Path) -> Candidate | None:
    """Return the candidate that a run delivers; None in a run without candidates.

    It is the simplest finalist, within the limits of a search, that is at most one standard error
    behind the best one. The linear model is the simplest; the others are ordered by parameters. The
    error is that of the difference, by the bootstrap of the same records; Breiman et al. (1984),
    section 3.4.3, take that of the best one's own score.
    """
    if not (folder / rn.FINALISTS_FOLDER).is_dir() or not (known := candidates(folder)):
        return None
    pools = (one.run.group("algorithm").get("pool") for one in known)
    limits: dict[str, Any] = next((pool["limits"] for pool in pools if pool), {})
    last = [one for one in known if one.run is not one.short and one.is_within(limits)] or known[:1]
    best = max(last, key=lambda one: validated(one.run))

    def is_close(one: Candidate) -> bool:
        behind = [b - v for b, v in zip(_values(best.run), _values(one.run), strict=True)]
        return validated(one.run) == validated(best.run) or behind[0] <= _spread(behind)

    def size(one: Candidate) -> tuple[bool, float]:
        return one.name != LINEAR, one.run.numbers()["num_parameters"] or math.inf

    return min(filter(is_close, last), key=size)


def _scored(folder: Path) -> dict[str, rn.Run]:
    """Return the runs in a folder that have a score on validation records, by name."""
    folders = [file.parent for file in folder.glob(f"*/{rn.EVENTS_FILE}")]
    runs = {one.name: rn.read_run(one) for one in folders}
    return {name: run for name, run in sorted(runs.items()) if _values(run)}


def _values(run: rn.Run) -> list[float]:
    """Return its score on validation records, then those on resamples of them; larger is better.

    Empty if no validation records were held out.
    """
    values = run.last("evaluated").get("validation") or []
    return [math.nan if value is None else run.score.sign * value for value in values]


def validated(run: rn.Run) -> float:
    """Return the score of a measured run on validation records; -inf if they do not define it."""
    score = _values(run)[0]
    return -math.inf if math.isnan(score) else score


def _spread(values: list[float]) -> float:
    """Return the standard deviation over the resamples in which the score is defined."""
    known = [value for value in values[1:] if not math.isnan(value)]
    return stdev(known) if len(known) > 1 else 0.0
