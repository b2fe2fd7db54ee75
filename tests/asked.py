"""A request of every verb, which asks for as little as there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednas_flwr.exchange.requests import (
    Amount,
    Commit,
    Describe,
    Evaluate,
    KeepModel,
    LocalSearch,
    LocalTraining,
    MeasureLatency,
    Personalise,
    Probe,
    RewardCandidates,
    Search,
    Settings,
    Site,
    TakeGradients,
    TakeNetworkGradient,
    TellStatistics,
    Train,
    TrainCandidates,
    Trial,
)
from fednas_flwr.exchange.sum_requests import OpenMasks, SignSurvivors
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.settings import SGD, Adam

ONE_STEP = Amount(epochs=None, steps=1, batch_size=None)
PLAIN = SGD(lr=0.1, min_lr=0.0, momentum=0.9, weight_decay=0.0, clip_norm=None)
ALPHAS = Adam(lr=0.01, weight_decay=0.0)
SUPERNET = {"name": "supernet"}


def smallest(
    site: Site | None = None,
    *,
    network: Mapping[str, Any] | None = None,
    split: str = "train",
    weights: SGD = PLAIN,
    loss_bound: float = 1.0,
) -> dict[str, Settings]:
    """Return the settings by verb; ``network`` is what is trained where it is no supernet."""
    search = LocalSearch(ONE_STEP, weights, ALPHAS, Alternating("first_order"))
    training = LocalTraining(dict(network or {"name": "x"}), split, ONE_STEP, weights, 0.0, 0.0)
    gradients = TakeGradients(0, 1, {"weights": 0.1, "alphas": 0.1}, None, 1, 0.1, site)
    asked: dict[str, Settings] = {
        "query.describe": Describe(),
        "query.commit": Commit("records" if site is None else site.data_set, ()),
        "query.latency": MeasureLatency(batch_size=1, passes=2, site=site),
        "query.statistics": TellStatistics(site),
        "query.keep_model": KeepModel("# A model", "ab" * 64, site),
        "query.sign_survivors": SignSurvivors("ab" * 32, (0, 1)),
        "query.open_masks": OpenMasks("ab" * 32, (0, 1), {}, {}),
        "train.weight_gradient": gradients,
        "train.alpha_gradient": gradients,
        "train.gradients": gradients,
        "train.network_gradient": TakeNetworkGradient(
            training.network, split, 0, None, 0.0, 0.0, site
        ),
        "train.search": Search(search, site=site),
        "train.candidate": TrainCandidates([[0]], 0, 1, None, weights, None, site),
        "train.probe": Probe(search, None, [Trial(weights, ALPHAS, 0.0)], loss_bound, site),
        "train.weights": Train(training, site=site),
        "evaluate.candidates": RewardCandidates([[0]], site),
        "evaluate.model": Evaluate(SUPERNET, "validation", site),
        "evaluate.personalised": Personalise(training),
    }
    return asked
