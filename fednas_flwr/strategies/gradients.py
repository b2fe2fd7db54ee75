"""Sums of gradients that clients return, and the optimisers of the server that step along them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.states import Packed, Tensors, WeightedAverage


@dataclass(frozen=True)
class Update:
    """What an exchange of gradients gives the server.

    Attributes:
        gradients: By state, the packed gradient.
        buffers: The clients' buffers, averaged by batch; empty where they have none.
        replies: Without their states: for metrics.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: Packed = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)


def add_gradients(
    replies: Iterable[tuple[int, Reply]], states: Sequence[str], *, reduce: str = "mean"
) -> Update:
    """Return the update that replies give, which are added in their order.

    Args:
        replies: Each has sums of gradients over a batch, and the batch's size B_k.
        states: Of which there are sums G_k.
        reduce: ``mean`` is ``sum_k G_k / sum_k B_k``, ``sum`` is ``sum_k G_k / B_k``.

    Raises:
        ValueError: There is no reply.
    """
    update, buffers, num_examples = Update(), WeightedAverage(), 0.0
    totals = update.gradients
    for _, reply in replies:
        for state in states:
            (gradient,) = reply.states[state].values()
            share = gradient / reply.num_examples if reduce == "sum" else gradient
            total = totals.get(state)
            totals[state] = share.clone() if total is None else total.add_(share)
        num_examples += reply.num_examples
        update.replies.append(replace(reply, states={}))
        if "buffers" in reply.states:
            buffers.add({"buffers": reply.states["buffers"]}, weight=reply.num_examples)
    if not update.replies:
        raise ValueError("no client answered")
    if reduce == "mean":
        for state, total in totals.items():
            totals[state] = total / num_examples
    if buffers.total_weight:
        update.buffers.update(buffers.result()["buffers"])
    return update


def moments(optimizers: Mapping[str, torch.optim.Optimizer]) -> Tensors:
    """Return the moments of the optimisers of single vectors, as ``<state>.<moment>``."""
    return {
        f"{state}.{name}": value
        for state, optimizer in optimizers.items()
        for kept in optimizer.state_dict()["state"].values()
        for name, value in kept.items()
        if isinstance(value, Tensor)
    }


def restore_moments(
    optimizers: Mapping[str, torch.optim.Optimizer],
    states: Mapping[str, Packed],
    tensors: Tensors,
) -> None:
    """Have optimisers go on with restored vectors and with what :func:`moments` returned."""
    for state, optimizer in optimizers.items():
        (vector,) = states[state].values()
        optimizer.param_groups[0]["params"] = [vector]
        optimizer.state.clear()
        kept = {
            name.removeprefix(f"{state}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{state}.")
        }
        if kept:
            optimizer.state[vector] = kept
