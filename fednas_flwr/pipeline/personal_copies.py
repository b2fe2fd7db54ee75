"""Copies of the trained network that sites fine-tune for themselves and keep if they are better.

A copy's gain is measured on its site's validation records, if nothing was trained on them. Few
records give an uncertain gain, which is therefore shrunk towards the gains at all sites. Main
functions: :func:`compared` and :func:`keep`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fednas_flwr.pipeline.beginning import Run
from fednas_flwr.pipeline.later_settings import with_precision
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.states import Layout, Packed, load_states, network_states
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange

EPOCHS, RATE = 5, 0.1  # of fine-tuning; the rate is a share of retraining's first rate
SMALLEST_VARIANCE = 1e-12  # of the gain per record
Result = Mapping[str, Any]  # result of one site


def last_round(run: Run, description: dict[str, Any]) -> rq.LocalTraining:
    """The local training of retraining's last round, for the network of a description."""
    config = with_precision(run, run.config, description)
    retrain = config.retrain
    return rq.LocalTraining(
        description,
        "train+validation",
        rq.Amount(retrain.local_epochs, None, retrain.batch_size),
        retrain.weights.at_round(retrain.planned, retrain.planned),
        retrain.auxiliary_weight,
        retrain.drop_path_prob,
        augmented=retrain.unaugmented == 0,
        precision=config.training.precision,
    )


def fine_tuning(run: Run, description: dict[str, Any]) -> rq.LocalTraining:
    """The training of a copy, on the same records as retraining.

    It is that of retraining's last round with more epochs and a share of the first round's rate.
    """
    retrain, local = run.config.retrain, last_round(run, description)
    rate = RATE * retrain.weights.lr
    return replace(
        local,
        split="train" if retrain.evaluate_every else "train+validation",
        weights=replace(local.weights, lr=rate, min_lr=rate),
        amount=replace(local.amount, epochs=EPOCHS),
    )


def shrunken(gains: Mapping[int, tuple[float, float, int]]) -> dict[int, float]:
    """Gains of sites, shrunk towards the mean over all sites; the less sites differ, the more.

    Empirical Bayes with normal distributions: the sites' true gains have the variance of
    DerSimonian and Laird (1986, doi 10.1016/0197-2456(86)90046-2). The variance of a record's gain
    is assumed equal at all sites, since a site's few records cannot show its own.

    Args:
        gains: For each site, the sum over its records of the copy's decrease in loss, the sum of
            the squares, and the number of records, at least 1.
    """
    if not gains:
        return {}
    sums, squares, numbers = map(np.array, zip(*gains.values(), strict=True))
    means, freedom = sums / numbers, numbers.sum() - len(gains)
    of_record = (squares - sums**2 / numbers).sum() / max(1, freedom)
    variances = max(of_record, SMALLEST_VARIANCE) / numbers
    weights = 1 / variances
    mean = np.average(means, weights=weights)
    excess = (weights * (means - mean) ** 2).sum() - (len(gains) - 1)
    scale = weights.sum() - (weights**2).sum() / weights.sum()
    between = max(0.0, excess / scale) if len(gains) > 1 else 0.0
    mean = np.average(means, weights=1 / (variances + between))
    found = mean + between / (between + variances) * (means - mean)
    return dict(zip(gains, found.tolist(), strict=True))


def compared(answers: Sequence[Result], known: Sequence[Result]) -> list[dict[str, Any]]:
    """Results of sites' copies with their shrunken ``gain``; ``keeps`` is True if a site keeps it.

    Args:
        answers: For each site, scores on test records and the ``gain`` that it reports. A site
            without validation records has no gain and keeps no copy.
        known: Earlier results of this function for a network like it that was trained without
            validation records; else empty.
    """
    told = {one["client"]: tuple(one["gain"]) for one in answers if one.get("gain")}
    gains = {one["client"]: one["gain"] for one in known} or shrunken(told)
    found = [{**one, "gain": gains.get(one["client"])} for one in answers]
    return [{**one, "keeps": (one["gain"] or 0.0) > 0} for one in found]


def keep(
    run: Run,
    network: nn.Module,
    states: dict[str, Packed],
    local: rq.LocalTraining,
    *,
    among: Collection[int],
    save: Callable[[Path], object],
) -> dict[int, Path]:
    """Train the copies of some sites and save them; return their folders.

    Args:
        run: The run.
        network: The trained network; it holds a site's weights while that copy is saved.
        states: The network's states.
        local: The copies' training.
        among: The sites.
        save: Writes the network into a folder.
    """
    own, folders = network_states(network), {}
    exchange = Exchange(
        "train.weights",
        stage="evaluate",
        settings=rq.Train(local=local),
        states=states,
        layouts={name: Layout.of(tensors) for name, tensors in own.items() if tensors},
        among=among,
    )
    try:
        for client, reply in run.cohort.ask(exchange):
            load_states(network, reply.states)
            folders[client] = run.folder / "copies" / f"client_{client}"
            folders[client].mkdir(parents=True, exist_ok=True)
            save(folders[client])
    except QuorumError as error:  # the run already has its model
        run.log.emit("warning", message=f"few sites could fine-tune their copies: {error}")
    load_states(network, states)
    return folders


def keeping(run: Run) -> list[int]:
    """Return the sites that keep copies, as the run's evaluation has found."""
    copies = read_run(run.folder).last("evaluated").get("copies") or []
    return [one["client"] for one in copies if one["keeps"]]
