"""Sums of gradients that clients return, and the server's steps along them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fednas_flwr.algorithms.base import RoundStrategy, S
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.states import Packed, Tensors, WeightedAverage
from fednas_flwr.search.optimizer_step import clip_gradients


@dataclass(frozen=True)
class Update:
    """Result of an exchange of gradients at the server.

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


class GradientStrategy(RoundStrategy[S]):
    """Base of those whose server steps along gradients that clients return, with its momentum.

    Attributes:
        optimizers: By state, of its single vector; a subclass makes them. Their moments go into
            checkpoints.
    """

    optimizers: dict[str, torch.optim.Optimizer]

    def _momentum(self) -> str:
        return "reset"

    def descend(
        self,
        replies: Iterable[tuple[int, Reply]],
        states: Sequence[str],
        *,
        clip_norm: float | None,
        reduce: str = "mean",
        added: Mapping[str, Tensor | float] | None = None,
    ) -> list[Reply]:
        """Step along what replies give, and take over the clients' average buffers.

        Args:
            replies: See :func:`add_gradients`.
            states: That step, in this order.
            clip_norm: Largest norm of the gradient of the weights; None does not clip.
            reduce: See :func:`add_gradients`.
            added: By state, to its gradient; with ``sum`` once for every reply, of which each
                brings a mean.

        Returns:
            The replies without their states.
        """
        update = add_gradients(replies, states, reduce=reduce)
        times = len(update.replies) if reduce == "sum" else 1
        for state, gradient in update.gradients.items():
            (vector,) = self.states[state].values()
            further = (added or {}).get(state)
            vector.grad = gradient if further is None else gradient + times * further
            optimizer = self.optimizers[state]
            clip_gradients(optimizer, clip_norm if state == "weights" else None)
            optimizer.step()
        if update.buffers:
            self.states["buffers"] = update.buffers
        return update.replies

    def server_tensors(self) -> Tensors:
        """Return the optimisers' moments, as ``<state>.<moment>``."""
        return {
            f"{state}.{name}": value
            for state, optimizer in self.optimizers.items()
            for kept in optimizer.state_dict()["state"].values()
            for name, value in kept.items()
            if isinstance(value, Tensor)
        }

    def load_server_tensors(self, tensors: Tensors) -> None:
        """Take back the optimisers' moments and bind them to the restored vectors."""
        for state, optimizer in self.optimizers.items():
            (vector,) = self.states[state].values()
            optimizer.param_groups[0]["params"] = [vector]
            optimizer.state.clear()
            kept = {
                name.removeprefix(f"{state}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{state}.")
            }
            if kept:
                optimizer.state[vector] = kept
