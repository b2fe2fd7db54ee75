"""A request of every action, which asks for as little as there is, and single properties."""

from dataclasses import replace
from typing import Any, get_type_hints

import torch

from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.sum_requests import PROPERTIES, Masked, OpenMasks, SignSurvivors
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.settings.optimizers import SGD, Adam

ONE_STEP = rq.Amount(epochs=None, steps=1, batch_size=None)
PLAIN = SGD(lr=0.1, min_lr=0.0, momentum=0.9, weight_decay=0.0, clip_norm=None)
ALPHAS = Adam(lr=0.01, weight_decay=0.0)
SUPERNET = {"name": "supernet"}
GRADIENTS = ("train.weight_gradient", "train.alpha_gradient", "train.gradients")


def smallest(data_set=None, *, network=None, split="train", weights=PLAIN, loss_bound=1.0):
    """Return the settings by action; ``network`` is what is trained where it is no supernet."""
    search = rq.LocalSearch(ONE_STEP, weights, ALPHAS, Alternating("first_order"))
    trained = dict(network or {"name": "x"})
    training = rq.LocalTraining(trained, split, ONE_STEP, weights, 0.0, 0.0)
    sums = {"context": "ab" * 32, "survivors": (0, 1)}
    of_data = {"data_set": data_set}
    of_batch = {**of_data, "step": 0, "batch_size": None}
    rates = {"local_lrs": {"weights": 0.1, "alphas": 0.1}, "inner_lr": 0.1}
    gradients = rq.TakeGradients(**of_batch, **rates, local_steps=1, order=1)
    plain = {"network": trained, "split": split, "auxiliary_weight": 0.0, "drop_path_prob": 0.0}
    steps = {**of_batch, "local_steps": 1, "weights": weights, "dp_aware": None}
    trials = [rq.Trial(weights, ALPHAS, 0.0)]
    probe = {"search": search, "training": None, "trials": trials, "loss_bound": loss_bound}
    return {
        "query.describe": rq.Describe(),
        "query.commit": rq.Commit(data_set=data_set or "records", releases=()),
        "query.latency": rq.MeasureLatency(batch_size=1, passes=2, **of_data),
        "query.statistics": rq.TellStatistics(**of_data),
        "query.keep_model": rq.KeepModel(card="# A model", signature="ab" * 64, **of_data),
        "query.sign_survivors": SignSurvivors(**sums),
        "query.open_masks": OpenMasks(**sums, signatures={}, boxes={}),
        **dict.fromkeys(GRADIENTS, gradients),
        "train.network_gradient": rq.TakeNetworkGradient(**of_batch, usual=1.0, **plain),
        "train.search": rq.Search(local=search, **of_data),
        "train.candidate": rq.TrainCandidates(candidates=[[0]], **steps),
        "train.probe": rq.Probe(**probe, **of_data),
        "train.weights": rq.Train(local=training, **of_data),
        "evaluate.candidates": rq.RewardCandidates(candidates=[[0]], **of_data),
        "evaluate.model": rq.Evaluate(network=SUPERNET, split="validation", **of_data),
        "evaluate.scores": rq.CountScores(network=SUPERNET, **of_data),
        "evaluate.personalised": rq.Personalise(local=training),
    }


def spied(federation, change=None):
    """Return the list of what a federation's clients are asked from now on, and their replies.

    Each entry is an exchange with the states as they were sent, and the replies by client; the
    strategy gets ``change(exchange, client, reply)`` in a reply's place.
    """
    ask, asked = federation.cohort.ask, list[Any]()

    def noting(exchange):
        sent = {s: {d: v.clone() for d, v in p.items()} for s, p in exchange.states.items()}
        replies: dict[int, Any] = {}
        asked.append((replace(exchange, states=sent), replies))
        for client, reply in ask(exchange):
            replies[client] = reply
            yield client, reply if change is None else change(exchange, client, reply)

    federation.cohort.ask = noting
    return asked


MODEL = ("weights", "alphas", "buffers")


def filled(reply, value, states=MODEL):
    """Return a reply with one value in place of all numbers of some states."""
    other = {
        name: {dtype: torch.full_like(vector, value) for dtype, vector in packed.items()}
        for name, packed in reply.states.items()
        if name in states
    }
    return replace(reply, states={**reply.states, **other})


ALWAYS_SAID = {"client": 0, "context": "ab" * 32, "boxes": {}, "parts": {}, "pairs": {}}
FORMS = {name: form for form, _ in PROPERTIES.values() for name in get_type_hints(form)}
FORMS |= dict.fromkeys(get_type_hints(Masked), Masked)


def decoded(name, value):
    """Return a property as the server decodes it, of a reply that says nothing else it need not.

    Raises:
        ReplyError: It is malformed.
    """
    form = FORMS[name]
    action = next((action for action, forms in PROPERTIES.items() if form in forms), "train.search")
    said = {n: v for n, v in ALWAYS_SAID.items() if n in get_type_hints(form)} | {name: value}
    return rq.decode_properties(action, said, masked=form is Masked)[name]
