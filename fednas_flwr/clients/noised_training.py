"""Training on noised gradients only, and the checks that come before any record is read.

What the private verbs are made of. :func:`noised_gradient` and :func:`local_training` read no
record when they are called: they check, rehearse on made-up records, and return what then trains.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.clients.client import Client
from fednas_flwr.clients.release import Admission, ReleaseGate
from fednas_flwr.data.loaders import Split
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.messages import Request
from fednas_flwr.exchange.states import Tensors
from fednas_flwr.names import LARGEST_MICRO_BATCH
from fednas_flwr.privacy.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.privacy.policy import show
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.search.training import (
    Batch,
    clip_gradients,
    make_adam,
    make_sgd,
    record_losses,
    trainable_weights,
)
from fednas_flwr.search_spaces.space import Supernet

SPLIT_OF = {"alphas": "validation", "weights": "train"}  # what each state's gradient reads
LARGEST_NUMBER = 1e30  # of rates and weights that a request gives: fits float32


def noised_gradient(
    client: Client,
    settings: Mapping[str, Any],
    network: nn.Module,
    state: str,
    admission: Admission,
) -> Callable[[], tuple[Tensors, float]]:
    """Return what releases one noised sum of clipped gradients, and the expected batch size.

    Args:
        client: With a gate.
        settings: Of the request.
        network: A supernet, or a network with the attribute ``drop_path_prob``; in training mode.
        state: ``weights`` or ``alphas``.
        admission: What the gate has admitted of this state; only its split is read.
    """
    size = whole_number(settings, "micro_batch_size", largest=LARGEST_MICRO_BATCH)
    auxiliary_weight, split = 0.0, client.split(admission.split)
    chosen: list[object] = [state]
    if not isinstance(network, Supernet):
        auxiliary_weight = number(settings, "auxiliary_weight")
        chosen = [state, settings["network"], number(settings, "drop_path_prob")]
    terms: dict[str, Any] = {
        "loss": _with_auxiliary(auxiliary_weight),
        "max_norm": admission.terms.max_grad_norm,
        "class_factors": client.class_factors,
    }

    def clipped_sum(x: Tensor, y: Tensor) -> Tensors:
        if state == "alphas":
            assert isinstance(network, Supernet)
            return clipped_alpha_gradient_sum(network, x, y, alphas=network.alphas(), **terms)
        weights = trainable_weights(network)
        return clipped_gradient_sum(network, x, y, parameters=weights, **terms)

    rehearse(client, clipped_sum, size, *chosen)

    def release() -> tuple[Tensors, float]:
        return noised_sum(client, admission, split, size, clipped_sum), admission.batch_size

    return release


def noised_sum(
    client: Client,
    admission: Admission,
    split: Split,
    micro_batch_size: int,
    clipped_sum: Callable[[Tensor, Tensor], Tensors],
) -> Tensors:
    """Return one release, on the client's device: the noised sum over a Poisson batch."""
    rows_sum = partial(_sum_over, client, split, micro_batch_size, clipped_sum)
    sums = gate_of(client).release(admission, len(split), rows_sum)
    return {name: total.to(client.device) for name, total in sums.items()}


def local_training(
    client: Client,
    settings: Mapping[str, Any],
    network: nn.Module,
    admissions: Mapping[str, Admission],
) -> Callable[[], None]:
    """Return what trains a network in place by ``local_steps`` noised steps.

    Of a supernet each is a step of the alphas, then one of the weights, as in
    ``search.local_search``; else it is one of the weights. Arguments as :func:`noised_gradient`.
    """
    sgd = SGD(**numbers(settings["weights"]))  # type: ignore[arg-type]
    adam = None
    if isinstance(network, Supernet):
        adam = Adam(**numbers(settings["alphas"]))  # type: ignore[arg-type]
    drop_path_prob = 0.0 if adam else number(settings, "drop_path_prob")

    def ready() -> dict[str, tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]]:
        """Return each state's parameters and a new optimiser of them."""
        network.train()
        weights = trainable_weights(network)
        if adam is None:
            network.drop_path_prob = drop_path_prob  # type: ignore[assignment]
            return {"weights": (weights, make_sgd(weights.values(), sgd))}
        assert isinstance(network, Supernet)
        alphas = network.alphas()
        return {
            "alphas": (alphas, make_adam(alphas.values(), adam)),
            "weights": (weights, make_sgd(weights.values(), sgd)),
        }

    noised = {
        state: noised_gradient(client, settings, network, state, admissions[state])
        for state in ready()
    }

    def train() -> None:
        states = ready()
        for _ in range(settings["local_steps"]):
            for state, (parameters, optimizer) in states.items():
                sums, batch_size = noised[state]()
                for name, parameter in parameters.items():
                    parameter.grad = (sums[name] / batch_size).to(parameter)
                clip_gradients(optimizer, sgd.clip_norm if state == "weights" else None)
                optimizer.step()
                optimizer.zero_grad()

    return train


@contextmanager
def before_reading(request: Request) -> Iterator[None]:
    """Refuse what cannot be computed; inside no record is read, so that the reason may be told.

    The ledger's RuntimeError and OSError are the site's own affair.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"refused, the settings do not fit {request.verb}: {type(error).__name__}: "
            f"{str(error)[:200]}."
        ) from error


def rehearse(
    client: Client, computation: Callable[[Tensor, Tensor], object], size: int, *chosen: object
) -> None:
    """Compute on a full micro-batch of zeros, of the last class, shaped like the client's records.

    Once for everything that the server has chosen and on which success could depend, memory
    included: no computation on records takes more.
    """
    key = json.dumps([size, *chosen])
    if key in client.rehearsed:
        return
    x = torch.zeros(size, *client.data.train.features.shape[1:], device=client.device)
    y = torch.full((size,), len(client.class_names) - 1, device=client.device)
    try:
        computation(x, y)
    except RuntimeError as error:  # of torch
        raise ValueError(error) from error
    client.rehearsed.add(key)


def number(settings: Mapping[str, Any], name: str) -> float:
    """Return a setting that must be a number, as float."""
    value = settings[name]
    if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
        raise ConfigError(f"refused, {name}={show(value)} is no number up to {LARGEST_NUMBER:g}.")
    return float(value)


def numbers(given: Mapping[str, Any]) -> dict[str, float | None]:
    """Return an optimiser's constants, each a number or null."""
    return {name: None if given[name] is None else number(given, name) for name in given}


def whole_number(settings: Mapping[str, Any], name: str, *, largest: int) -> int:
    """Return a setting that must be a whole number from 1 to ``largest``."""
    value = settings[name]
    if type(value) is not int or not 1 <= value <= largest:
        limit = f"an integer from 1 to {largest}"
        raise ConfigError(f"refused, {name}={show(value)} is not {limit}.")
    return value


def gate_of(client: Client) -> ReleaseGate:
    """Return the gate of a private client."""
    assert client.gate is not None  # answer() chooses these verbs by it
    return client.gate


def _sum_over(
    client: Client,
    split: Split,
    micro_batch_size: int,
    clipped_sum: Callable[[Tensor, Tensor], Tensors],
    rows: Tensor,
) -> Tensors:
    """Return the clipped sum over some rows, of which one micro-batch is in memory at a time."""
    totals: Tensors = {}
    for part in torch.split(rows, micro_batch_size) if len(rows) else (rows,):
        sums = clipped_sum(*_private_batch(client, split, part))
        totals = {name: totals[name] + s for name, s in sums.items()} if totals else sums
    return totals


def _private_batch(client: Client, split: Split, rows: Tensor) -> Batch:
    """Return the augmented batch of some rows; what is drawn for a record, nobody can foresee."""
    x, y = split.batch(rows, client.device)
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    return (client.augmented(x, generator) if len(rows) else x), y


def _with_auxiliary(weight: float) -> Callable[[Tensor | tuple[Tensor, Tensor], Tensor], Tensor]:
    """Return the loss [B] of a network that may have an auxiliary head, as in ``train_epoch``."""

    def losses(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        logits, auxiliary = output if isinstance(output, tuple) else (output, None)
        total = record_losses(logits, labels)
        return total if auxiliary is None else total + weight * record_losses(auxiliary, labels)

    return losses
