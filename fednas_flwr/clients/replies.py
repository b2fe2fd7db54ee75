"""What a reply carries: a network's states, packed, or only those that a verb has changed."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.states import Layout, Tensors, changed_part, network_states, pack


def filled_states(network: nn.Module) -> dict[str, Tensors]:
    """Return the states of a network that hold any tensor."""
    return {name: state for name, state in network_states(network).items() if state}


def make_reply(num_examples: float, states: dict[str, Tensors], metrics: dict[str, float]) -> Reply:
    """Return a reply that carries tensors by state."""
    return Reply(
        num_examples=num_examples,
        metrics=metrics,
        states={name: pack(tensors) for name, tensors in states.items()},
        digests={name: Layout.of(tensors).digest for name, tensors in states.items()},
    )


def only_changed(reply: Reply, request: Request, network: nn.Module) -> Reply:
    """Return the reply without the tensors that are as the request sent them."""
    states, digests, changed = {}, {}, {}
    for name, tensors in network_states(network).items():
        if name in reply.states:
            layout = Layout.of(tensors)
            states[name], changed[name] = changed_part(
                reply.states[name], request.states[name], layout
            )
            digests[name] = layout.part(changed[name]).digest
    return replace(reply, states=states, digests=digests, facts={"changed": changed})
