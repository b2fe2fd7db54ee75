"""Values that follow from records, budget and noise in a private run, and why.

Learning rates of DP-SGD follow from its noise, so that one setting serves many data sets and
budgets. The noise of T steps moves every weight by a random walk. A rate at which that walk is too
long drowns what is learnt, at one at which it is short steps are wasted; what is best in between
hardly depends on the number of records and clients, on the budget or the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fednas_flwr.pipeline.run_stages import Run
from fednas_flwr.pipeline.schedule import given_noise
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.report.templates import render
from fednas_flwr.runs.events import read_events
from fednas_flwr.runs.numbers import EVENTS_FILE
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.incompatible import chooses_rates, follows_noise
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.optimizers import LARGEST_STEP

LAST_RATE = 0.1  # of the learning rate, in the last round


def with_learning_rate(run: Run) -> Config:
    """Return the run's configuration with the learning rate of retraining that is to be taken.

    A resumed run keeps the one that it began with, whoever is connected now.
    """
    config, privacy = run.config, run.config.privacy
    if not isinstance(privacy, DifferentialPrivacy) or not follows_noise(config):
        return config
    events = read_events(run.folder / EVENTS_FILE)
    known = [event for event in events if event["event"] == "learning_rate"]
    weights, walk = config.retrain.weights, privacy.retrain.noise_walk
    if known:
        lr = known[-1]["lr"]
    else:
        (release,) = (planned for planned in run.schedule if planned.noise_name == "retrain")
        noise = _noise_of_mean(run, release)
        steps = config.retrain.rounds * privacy.retrain.local_steps
        assert walk is not None
        lr = learning_rate(walk, noise, steps=steps, momentum=weights.momentum)
        lr = min(lr, LARGEST_STEP)
        rates = {"lr": lr, "min_lr": LAST_RATE * lr}
        run.log.emit("learning_rate", **rates, noise=noise, steps=steps, walk=walk)
    weights = replace(weights, lr=lr, min_lr=LAST_RATE * lr)
    return replace(config, retrain=replace(config.retrain, weights=weights))


def explained(run: Run) -> list[str]:
    """Explain each kind of release of a private run, and what its terms follow from."""
    config, privacy = run.config, run.config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    known = [properties["splits"] for properties in run.cohort.properties.values()]
    rated = "retrain" in config.stages and not chooses_rates(config)
    text = render(
        "calibration.txt.j2",
        records={split: [splits.get(split, 0) for splits in known] for split in SPLITS},
        releases=[
            (
                release,
                [release.expected_batch(splits) for splits in known],
                _noise_of_mean(run, release),
                given_noise(privacy, release.noise_name),
            )
            for release in run.schedule
        ],
        rated=with_learning_rate(run).retrain.weights if rated else None,
        follows_noise=follows_noise(config),
        asked=config.asked,
        privacy=privacy,
        span=_span,
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _noise_of_mean(run: Run, release: PlannedRelease) -> float:
    """Return the noise in each value of a step's mean over the clients."""
    batches = [release.expected_batch(known["splits"]) for known in run.cohort.properties.values()]
    return noise_per_step(release, batches, asked=min(run.config.asked, len(batches)))


def _span(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def noise_per_step(release: PlannedRelease, batches: Sequence[float], *, asked: int) -> float:
    """The standard deviation of the noise in a value of a step's mean gradient.

    Args:
        release: A stage's releases of gradients, their noise calibrated.
        batches: Every client's expected batch.
        asked: Number of clients that answer in a step.
    """
    if release.noise_multiplier is None:
        raise ValueError(f"the noise of {release.key} is not calibrated yet")
    noises = 1 if release.shared else asked
    whole = asked * sum(batches) / len(batches)
    return release.noise_multiplier * release.max_grad_norm * math.sqrt(noises) / whole


def learning_rate(walk: float, noise: float, *, steps: int, momentum: float) -> float:
    """The rate at which the noise of all steps gives each weight a deviation of ``walk``.

    ``walk (1 - m) / (noise sqrt(T))``: a step of momentum m moves a weight by ``lr / (1 - m)`` of
    its noise in the end.

    Args:
        walk: The standard deviation, > 0, as if the rate never fell.
        noise: From :func:`noise_per_step`.
        steps: T, at least 1.
        momentum: m, from 0 to below 1.
    """
    return walk * (1 - momentum) / (noise * math.sqrt(steps))
