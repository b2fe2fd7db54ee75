"""A request of every action, which asks for as little as there is, and single properties."""

from dataclasses import replace
from typing import Any, get_type_hints

from fednas_flwr.protocol.requests import (
    Amount,
    Commit,
    CountScores,
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
    TakeGradients,
    TakeNetworkGradient,
    TellStatistics,
    Train,
    TrainCandidates,
    Trial,
    decode_properties,
)
from fednas_flwr.protocol.sum_requests import PROPERTIES, Masked, OpenMasks, SignSurvivors
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.settings.optimizers import SGD, Adam

ONE_STEP = Amount(epochs=None, steps=1, batch_size=None)
PLAIN = SGD(lr=0.1, min_lr=0.0, momentum=0.9, weight_decay=0.0, clip_norm=None)
ALPHAS = Adam(lr=0.01, weight_decay=0.0)
SUPERNET = {"name": "supernet"}


def smallest(data_set=None, *, network=None, split="train", weights=PLAIN, loss_bound=1.0):
    """Return the settings by action; ``network`` is what is trained where it is no supernet."""
    search = LocalSearch(ONE_STEP, weights, ALPHAS, Alternating("first_order"))
    training = LocalTraining(dict(network or {"name": "x"}), split, ONE_STEP, weights, 0.0, 0.0)
    gradients = TakeGradients(
        step=0,
        local_steps=1,
        local_lrs={"weights": 0.1, "alphas": 0.1},
        batch_size=None,
        order=1,
        inner_lr=0.1,
        data_set=data_set,
    )
    asked = {
        "query.describe": Describe(),
        "query.commit": Commit(data_set=data_set or "records", releases=()),
        "query.latency": MeasureLatency(batch_size=1, passes=2, data_set=data_set),
        "query.statistics": TellStatistics(data_set=data_set),
        "query.keep_model": KeepModel(card="# A model", signature="ab" * 64, data_set=data_set),
        "query.sign_survivors": SignSurvivors(context="ab" * 32, survivors=(0, 1)),
        "query.open_masks": OpenMasks(context="ab" * 32, survivors=(0, 1), signatures={}, boxes={}),
        "train.weight_gradient": gradients,
        "train.alpha_gradient": gradients,
        "train.gradients": gradients,
        "train.network_gradient": TakeNetworkGradient(
            network=training.network,
            split=split,
            step=0,
            batch_size=None,
            auxiliary_weight=0.0,
            drop_path_prob=0.0,
            data_set=data_set,
        ),
        "train.search": Search(local=search, data_set=data_set),
        "train.candidate": TrainCandidates(
            candidates=[[0]],
            step=0,
            local_steps=1,
            batch_size=None,
            weights=weights,
            dp_aware=None,
            data_set=data_set,
        ),
        "train.probe": Probe(
            search=search,
            training=None,
            trials=[Trial(weights, ALPHAS, 0.0)],
            loss_bound=loss_bound,
            data_set=data_set,
        ),
        "train.weights": Train(local=training, data_set=data_set),
        "evaluate.candidates": RewardCandidates(candidates=[[0]], data_set=data_set),
        "evaluate.model": Evaluate(network=SUPERNET, split="validation", data_set=data_set),
        "evaluate.scores": CountScores(network=SUPERNET, data_set=data_set),
        "evaluate.personalised": Personalise(local=training),
    }
    return asked


def spied(federation, change=None):
    """Return the list of what a federation's clients are asked from now on, and their replies.

    Each entry is an exchange with the states as they were sent, and the replies by client; the
    strategy gets ``change(exchange, client, reply)`` in a reply's place.
    """
    ask, asked = federation.cohort.ask, list[Any]()

    def noting(exchange):
        sent = {s: {d: v.clone() for d, v in p.items()} for s, p in exchange.states.items()}
        replies = {}
        asked.append((replace(exchange, states=sent), replies))
        for client, reply in ask(exchange):
            replies[client] = reply
            yield client, reply if change is None else change(exchange, client, reply)

    federation.cohort.ask = noting
    return asked


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
    return decode_properties(action, said, masked=form is Masked)[name]
