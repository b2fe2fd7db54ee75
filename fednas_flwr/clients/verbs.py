"""The verbs: every way in which something of a client's data can leave it.

Each takes the client and the request and returns the reply; none keeps anything between calls.
``answer`` calls them; in private mode those of ``private_verbs`` take their place.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from fednas_flwr.clients.client import Client
from fednas_flwr.clients.local_training import (
    clipped_decreases,
    refresh_statistics,
    search_locally,
    train_locally,
    validation_losses,
)
from fednas_flwr.clients.replies import filled_states, make_reply, only_changed
from fednas_flwr.data.loaders import step_batch
from fednas_flwr.errors import ConfigError
from fednas_flwr.evaluation.metrics import evaluate
from fednas_flwr.evaluation.space_costs import measure_space
from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.states import Layout, Tensors, network_states, unpack
from fednas_flwr.hardware.latency import to_json
from fednas_flwr.search.architect import alpha_gradient_sum, second_order_gradient
from fednas_flwr.search.candidate import Candidate, train_candidates
from fednas_flwr.search.settings import SGD, DPAware
from fednas_flwr.search.training import (
    Batch,
    Tally,
    make_sgd,
    periodic_gradients,
    weight_gradient_sum,
)
from fednas_flwr.search_spaces.mbconv import MBConvSpace
from fednas_flwr.search_spaces.space import Supernet

LATENCY_RANGES = {"batch_size": (1, 1024), "passes": (2, 1000)}
SUPERNET = {"name": "supernet"}
STATES_OF = {  # what each gradient verb returns the gradients of
    "train.weight_gradient": ("weights",),
    "train.alpha_gradient": ("alphas",),
    "train.gradients": ("weights", "alphas"),
}


def describe(client: Client, request: Request) -> Reply:
    """``query.describe``: who the client is and how much data it has."""
    data = client.data
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    counts = torch.zeros(len(client.class_names), dtype=torch.int64)
    for split in splits.values():
        counts += torch.bincount(split.labels[split.rows], minlength=len(counts))
    facts = identity(client) | {
        "class_counts": counts.tolist(),
        "splits": {name: len(split) for name, split in splits.items()},
    }
    return Reply(num_examples=max(1, int(counts.sum())), facts=facts)


def identity(client: Client) -> dict[str, Any]:
    """Return what a client says of itself that does not depend on its records."""
    return {
        "client": client.index,
        "tag": client.tag,
        "hardware": f"{client.device.type} {platform.machine()}",
        "versions": {"fednas_flwr": version("fednas_flwr"), "torch": torch.__version__},
        "input_shape": list(client.data.train.features.shape[1:]),
        "feature_names": list(client.feature_names),
        "class_names": list(client.class_names),
    }


def gradients(client: Client, request: Request) -> Reply:
    """``train.weight_gradient``, ``train.alpha_gradient`` and, fused, ``train.gradients``.

    The sums over a batch of gradients of the weights (train records) or alphas (validation
    records) or both, taken at the same point. ``num_examples`` is the batch size B_k by which the
    server divides; fused, the alphas' sum is scaled to the weights' batch size. Of second order
    the alphas' gradient is of batch means (Eq. 5), times B_k.
    """
    supernet = request_supernet(client, request).train()
    settings, states, factors = request.settings, STATES_OF[request.verb], client.class_factors
    train, validation = (
        _step_batches(client, request, name, steps=settings["local_steps"])
        for name in ("train", "validation")
    )
    tallies = {state: Tally() for state in states}

    def weight_sum() -> tuple[Tensors, float]:
        batch = next(train)
        sums = weight_gradient_sum(supernet, batch, tallies["weights"], class_factors=factors)
        return sums, len(batch[1])

    def alpha_sum() -> tuple[Tensors, float]:
        batch = next(validation)
        size = len(batch[1])
        if settings["order"] == 1:
            sums, losses = alpha_gradient_sum(supernet, batch, class_factors=factors)
        else:
            layout = Layout.of(network_states(supernet)["weights"])
            previous = unpack(request.states["previous_weights"], layout)
            means, losses = second_order_gradient(
                supernet,
                weights={name: weight.to(client.device) for name, weight in previous.items()},
                virtual_weights=supernet.weights(),
                train_batch=next(train),
                validation_batch=batch,
                inner_lr=settings["inner_lr"],
                class_factors=factors,
            )
            sums = {kind: gradient * size for kind, gradient in means.items()}
        tallies["alphas"].add(losses, None, batch[1])
        return sums, size

    take = {"weights": weight_sum, "alphas": alpha_sum}
    sums, batch_size = periodic_gradients(
        lambda: {state: take[state]() for state in states},
        {"weights": supernet.weights(), "alphas": supernet.alphas()},
        steps=settings["local_steps"],
        local_lrs=settings["local_lrs"],
    )
    metrics: dict[str, float] = {}
    if "weights" in states:
        if buffers := network_states(supernet)["buffers"]:
            sums["buffers"] = buffers
        tally = tallies["weights"]
        metrics |= {"train_loss": tally.loss, "train_accuracy": tally.accuracy}
    if "alphas" in states:
        metrics["validation_loss"] = tallies["alphas"].loss
    return make_reply(batch_size, sums, metrics)


def search(client: Client, request: Request) -> Reply:
    """``train.search``: weights, alphas and buffers after local epochs of search."""
    supernet = request_supernet(client, request)
    metrics = search_locally(client, request, supernet)
    reply = make_reply(len(client.data.train), filled_states(supernet), metrics)
    return only_changed(reply, request, supernet) if request.settings.get("sparse") else reply


def candidate(client: Client, request: Request) -> Reply:
    """``train.candidate``: the shared weights after ``local_steps`` steps on each candidate."""
    settings = request.settings
    supernet = request_supernet(client, request).train()
    paths, steps, sgd = settings["candidates"], settings["local_steps"], SGD(**settings["weights"])
    dp_aware = settings["dp_aware"]
    tally = train_candidates(
        supernet,
        paths,
        _step_batches(client, request, "train", steps=len(paths) * steps),
        steps=steps,
        optimizer=make_sgd(supernet.weights().values(), sgd),
        clip_norm=sgd.clip_norm,
        dp_aware=None if dp_aware is None else DPAware(**dp_aware),
        generator=client.generator(request.header, "noise"),
        class_factors=client.class_factors,
    )
    metrics = {"train_loss": tally.loss, "train_accuracy": tally.accuracy}
    weights = {"weights": network_states(supernet)["weights"]}
    return make_reply(len(client.data.train), weights, metrics)


def candidates(client: Client, request: Request) -> Reply:
    """``evaluate.candidates``: each candidate's accuracy on validation records, as ``rewards``."""
    supernet, split = request_supernet(client, request), client.data.validation
    measured = [
        evaluate(Candidate(supernet, path), split, client.device)
        for path in request.settings["candidates"]
    ]
    rewards = torch.tensor([metrics.accuracy for metrics in measured])
    loss = sum(metrics.loss for metrics in measured) / len(measured)
    states = {"rewards": {"rewards": rewards}}
    return make_reply(len(split), states, {"validation_loss": loss})


def probe(client: Client, request: Request) -> Reply:
    """``train.probe``: by how much local training would reduce the loss on validation records.

    FEATHERS, Alg. 2 and 3 without their last line. Each of ``settings["trials"]`` (settings beside
    the common ones) trains the same network, a supernet or a derived one, from the same states
    and with the same draws; the result is discarded. Nothing but the mean over validation records
    of ``clip(l_before - l_after, -M, M)`` leaves per trial, as ``rewards`` [trials]. The number of
    validation records, ``num_examples``, is the client's weight in the rewards (Eq. 5).

    Deviations: the text does not clip, its clients try one configuration per message, and its
    losses are those with batch norm's running statistics, see :func:`refresh_statistics`.
    """
    settings, rewards = request.settings, []
    network = client.network(settings["network"], request.states)
    refresh_statistics(client, request, network)
    before = validation_losses(client, network)
    for trial in settings["trials"]:
        with torch.random.fork_rng():
            network = client.network(settings["network"], request.states)
            tried = replace(request, settings={**settings, **trial})
            if isinstance(network, Supernet):
                search_locally(client, tried, network)
            else:
                train_locally(client, tried, network)
            refresh_statistics(client, request, network)
            decreases = before - validation_losses(client, network)
        rewards.append(clipped_decreases(decreases, settings["loss_bound"]).mean())
    states = {"rewards": {"rewards": torch.stack(rewards).float()}}
    return make_reply(len(client.data.validation), states, {})


def weights(client: Client, request: Request) -> Reply:
    """``train.weights``: the weights of a network after local epochs.

    With the setting ``validates`` also its mean loss on validation records after them, if the
    client has any.
    """
    network = client.network(request.settings["network"], request.states)
    metrics = train_locally(client, request, network)
    num_examples = len(client.split(request.settings["split"]))
    reply = make_reply(num_examples, filled_states(network), metrics)
    if not (request.settings.get("validates", False) and len(client.data.validation)):
        return reply
    refresh_statistics(client, request, network)
    loss = float(validation_losses(client, network).mean())
    return replace(reply, metrics={**metrics, "validation_loss": loss})


def model(client: Client, request: Request) -> Reply:
    """``evaluate.model``: loss and accuracy of a network or supernet on one of the splits."""
    network = client.network(request.settings["network"], request.states)
    split = client.split(request.settings["split"])
    metrics = evaluate(network, split, client.device)
    return Reply(num_examples=metrics.num_examples, metrics=metrics.as_dict())


def personalised(client: Client, request: Request) -> Reply:
    """``evaluate.personalised``: test metrics of a network after local epochs; it is discarded.

    What FDNAS (Zhang et al., 2020, section 4) averages to its mean local accuracy.
    """
    network = client.network(request.settings["network"], request.states)
    train_locally(client, request, network)
    metrics = evaluate(network, client.data.test, client.device)
    return Reply(num_examples=metrics.num_examples, metrics=metrics.as_dict())


def latency(client: Client, request: Request) -> Reply:
    """``query.latency``: how long every layer of the run's search space takes on this machine.

    The table is ``facts["latency"]``, as ``hardware.latency`` writes it. No record is read.
    """
    space = client.make_space()
    if not isinstance(space, MBConvSpace):
        raise ConfigError(f"search_space={space.name} has no latency table: choose mbconv.")
    for name, (least, most) in LATENCY_RANGES.items():
        value = request.settings.get(name)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"{name} must be a whole number from {least} to {most}.")
    table, _ = measure_space(
        space,
        device=client.device,
        threads=client.threads,
        batch_size=request.settings["batch_size"],
        passes=request.settings["passes"],
    )
    return Reply(num_examples=1, facts={"latency": to_json(table)})


VERBS: dict[str, Callable[[Client, Request], Reply]] = {
    "query.describe": describe,
    "query.latency": latency,
    "train.weight_gradient": gradients,
    "train.alpha_gradient": gradients,
    "train.gradients": gradients,
    "train.search": search,
    "train.candidate": candidate,
    "train.probe": probe,
    "train.weights": weights,
    "evaluate.candidates": candidates,
    "evaluate.model": model,
    "evaluate.personalised": personalised,
}


def request_supernet(client: Client, request: Request) -> Supernet:
    """Return the supernet with the states that the request carries."""
    states = {name: s for name, s in request.states.items() if name != "previous_weights"}
    network = client.network(SUPERNET, states)
    assert isinstance(network, Supernet)
    return network


def _step_batches(
    client: Client, request: Request, split_name: str, *, steps: int
) -> Iterator[Batch]:
    """Yield the batches of one exchange: the next ``steps`` of an endless epoch sequence."""
    settings, split = request.settings, client.for_training(client.split(split_name))
    generator = client.generator(request.header, split_name)
    for step in range(settings["step"] * steps, (settings["step"] + 1) * steps):
        indices = step_batch(
            len(split),
            batch_size=settings["batch_size"],
            step=step,
            seed=client.seed,
            purpose=("batches", split_name, client.index),
        )
        x, y = split.batch(indices, client.device)
        yield client.augmented(x, generator), y
