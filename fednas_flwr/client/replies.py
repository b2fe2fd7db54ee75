"""Contents of a reply: a network's states, packed, or only those that an action has changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.states import (
    MOMENTS,
    Layout,
    Packed,
    Tensors,
    changed_part,
    network_states,
    pack,
    unpack,
)
from fednas_flwr.search.optimizer_step import Descents, no_moments


def network_states_of(request: Request) -> dict[str, Packed]:
    """Return the states of a request that its network is to have: all but those beside it."""
    beside = (MOMENTS, "previous_weights")
    return {name: state for name, state in request.states.items() if name not in beside}


def sent_moments(
    request: Request, network: nn.Module, *, only: Collection[str] | None = None
) -> Tensors:
    """Return the optimisers' moments that a request carries, by name; none if it does not.

    Args:
        request: Of which ``moments`` is read.
        network: Whose moments they are.
        only: The names of those that the request carries; None is all.

    Raises:
        ValueError: They are not of this network, or Adam cannot go on from their numbers of steps.
    """
    if MOMENTS not in request.states:
        return {}
    layout = Layout.of(no_moments(network))
    if only is not None:
        layout = layout.part(layout.marks(only))
    moments = unpack(request.states[MOMENTS], layout)
    for name, tensor in moments.items():
        if name.startswith("alphas.step.") and not tensor.item() >= 0:
            raise ValueError(f"{name}={tensor.item()}: a number of steps is 0 or more")
    return moments


def trained_states(
    network: nn.Module, descents: Descents, *, without: tuple[str, ...] = ()
) -> dict[str, Tensors]:
    """Return the states of a trained network that hold any tensor, and its moments if they travel.

    Args:
        network: Trained.
        descents: That have trained it.
        without: States that are left out.
    """
    states = {**network_states(network), MOMENTS: descents.moments()}
    return {name: state for name, state in states.items() if state and name not in without}


def make_reply(
    num_examples: float,
    states: Mapping[str, Tensors],
    metrics: Mapping[str, float] | None = None,
) -> Reply:
    """Return a reply that carries tensors by state."""
    packed = {name: pack(tensors) for name, tensors in states.items()}
    digests = {name: Layout.of(tensors).digest for name, tensors in states.items()}
    return Reply(num_examples, metrics or {}, packed, digests)


def only_changed(reply: Reply, request: Request, states: Mapping[str, Tensors]) -> Reply:
    """Return the reply with ``states`` without the tensors that are as the request sent them."""
    packed, digests, changed = {}, {}, {}
    for name, tensors in states.items():
        layout = Layout.of(tensors)
        packed[name], changed[name] = changed_part(reply.states[name], request.states[name], layout)
        digests[name] = layout.part(changed[name]).digest
    return replace(reply, states=packed, digests=digests, properties={"changed": changed})
