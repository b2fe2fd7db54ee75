"""Sums of gradients that clients return, and the server's steps along them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fednas_flwr.algorithms.base import RoundStrategy, S
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import Settings
from fednas_flwr.protocol.states import Packed, Tensors, WeightedAverage
from fednas_flwr.search.optimizer_step import after_prefix, clip_gradients


class GradientStrategy(RoundStrategy[S]):
    """Base of strategies whose server steps, with its own momentum, along the clients' gradients.

    Attributes:
        optimizers: The optimiser of each state's single vector; a subclass makes them. Their
            moments are saved in checkpoints.
    """

    optimizers: dict[str, torch.optim.Optimizer]

    def _momentum(self) -> str:
        return "reset"

    def take_step(
        self,
        action: str,
        request: Settings,
        states: Sequence[str],
        *,
        clip_norm: float | None,
        added: Mapping[str, Tensor | float] = {},
        further: Mapping[str, Packed] = {},
    ) -> list[Reply]:
        """Ask for gradients, and step along their mean ``sum_k G_k / sum_k B_k``.

        With the weights, the clients' buffers are replaced by their average, weighted by batch
        size.

        Args:
            action: Action whose replies have sums of gradients over a batch, and the batch's size
                B_k. The sums are added in the order of the replies.
            request: The request.
            states: The states with sums G_k, which step in this order.
            clip_norm: Largest norm of the gradient of the weights; None does not clip.
            added: For each state, what is added to its gradient.
            further: States that are sent along with the model.

        Returns:
            The replies without their states.
        """
        names = [*states, "buffers"] if "weights" in states else states
        layouts = {name: self.layouts[name] for name in names if name in self.layouts}
        replies = self.ask(action, request, states={**self.states, **further}, layouts=layouts)
        totals: dict[str, Tensor] = {}
        buffers, stripped = WeightedAverage(), list[Reply]()
        for _, reply in replies:
            for state in states:
                (gradient,) = reply.states[state].values()
                totals[state] = totals[state] + gradient if state in totals else gradient
            if "buffers" in reply.states:
                buffers.add({"buffers": reply.states["buffers"]}, weight=reply.num_examples)
            stripped.append(replace(reply, states={}))
        divisor = sum(reply.num_examples for reply in stripped)
        for state, total in totals.items():
            (vector,) = self.states[state].values()
            vector.grad = total / divisor
            if state in added:
                vector.grad = vector.grad + added[state]
            optimizer = self.optimizers[state]
            clip_gradients(optimizer, clip_norm if state == "weights" else None)
            optimizer.step()
        if buffers.total_weight:
            self.states["buffers"] = buffers.result()["buffers"]
        return stripped

    def server_tensors(self) -> Tensors:
        """The optimisers' moments, as ``<state>.<moment>``."""
        return {
            f"{state}.{name}": value
            for state, optimizer in self.optimizers.items()
            for moments in optimizer.state_dict()["state"].values()
            for name, value in moments.items()
            if isinstance(value, Tensor)
        }

    def load_server_tensors(self, tensors: Tensors) -> None:
        """Restore the optimisers' moments and bind them to the restored vectors."""
        for state, optimizer in self.optimizers.items():
            (vector,) = self.states[state].values()
            optimizer.param_groups[0]["params"] = [vector]
            optimizer.state.clear()
            if moments := after_prefix(tensors, f"{state}."):
                optimizer.state[vector] = moments
