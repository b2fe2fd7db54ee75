"""FNAS, and vanilla NAS, which is FNAS with one party (DP-FNAS, arXiv 2110.11025, section 2).

The server holds weights W and architecture variables A. One round is one iteration of Algorithm 1
without its noise: exchange 1 gives the gradients of W, the server steps; exchange 2 gives the
gradients of A at the new W, the server steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.states import Packed, Tensors, WeightedAverage
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.search.training import clip_gradients, make_adam, make_sgd
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy, average_replies, mean_metrics


class FNAS(RoundStrategy):
    """Federated NAS by exchange of gradients.

    Clients return sums of per-sample gradients over their batches and the batch sizes B_k; the
    server forms the update. ``reduce="mean"`` is ``sum_k G_k / sum_k B_k``, whose learning rate
    does not depend on the number of clients; ``reduce="sum"`` is the text's ``sum_k G_k / B_k``.
    The server's optimisers are SGD with momentum for W and Adam for A, as in the public code.

    Args:
        supernet: Newly initialised.
        courier: Reaches the clients.
        space: Search space of the supernet.
        order: 1 or 2, of the alpha gradient.
        reduce: ``mean`` or ``sum``.
        local_steps: Steps a client takes before it answers; its answer adds up their gradients.
            They are plain gradient descent at the learning rates of ``weights`` and ``alphas``.
        batch_size: Per client and step; None takes all of a client's records.
        evaluate_every: Rounds between evaluations of the supernet on validation records; 0: never.
        weights: SGD, annealed over the rounds.
        alphas: Adam.
        checkpoints: Where the state goes after every round.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: SearchSpace,
        order: int = 1,
        reduce: str = "mean",
        local_steps: int = 1,
        batch_size: int | None,
        evaluate_every: int = 0,
        weights: SGD,
        alphas: Adam,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        """See the class."""
        super().__init__(supernet, courier, space=space, checkpoints=checkpoints)
        self.order, self.reduce = order, reduce
        self.local_steps, self.batch_size = local_steps, batch_size
        self.evaluate_every = evaluate_every
        self.weights, self.alphas_settings = weights, alphas
        (self._weight_vector,) = self.states["weights"].values()
        (self._alpha_vector,) = self.states["alphas"].values()
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "weights": make_sgd([self._weight_vector], weights),
            "alphas": make_adam([self._alpha_vector], alphas),
        }

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """One iteration: gradients of W, step; gradients of A at the new W, step."""
        sgd = self.weights.at_round(server_round, num_rounds)
        settings = {
            "step": server_round - 1,
            "local_steps": self.local_steps,
            "batch_size": self.batch_size,
            "local_lr": sgd.lr,
        }
        layouts = {"weights": self.layouts["weights"]}
        if "buffers" in self.layouts:
            layouts["buffers"] = self.layouts["buffers"]
        replies = self.ask(
            "train.weight_gradient", settings=settings, states=self.states, layouts=layouts
        )
        before = {"previous_weights": {n: v.clone() for n, v in self.states["weights"].items()}}
        self._optimizers["weights"].param_groups[0]["lr"] = sgd.lr
        metrics, buffers = self._step("weights", replies, clip_norm=sgd.clip_norm)
        if buffers:
            self.states["buffers"] = buffers

        alpha_settings = {
            **settings,
            "local_lr": self.alphas_settings.lr,
            "order": self.order,
            "inner_lr": sgd.lr,
        }
        replies = self.ask(
            "train.alpha_gradient",
            settings=alpha_settings,
            states=self.states | (before if self.order == 2 else {}),
            layouts={"alphas": self.layouts["alphas"]},
        )
        alpha_metrics, _ = self._step("alphas", replies, clip_norm=None)
        return metrics | alpha_metrics | self._evaluate(server_round, num_rounds)

    def _step(
        self, state: str, replies: Iterable[tuple[int, Reply]], *, clip_norm: float | None
    ) -> tuple[dict[str, float], Packed]:
        """Reduce the gradient sums in client order and let the state's optimiser step.

        Returns the metrics, weighted by batch, and the buffers, weighted likewise.
        """
        total: Tensor | None = None
        num_examples = 0.0
        metrics: list[Reply] = []
        buffers = WeightedAverage()
        for _, reply in replies:
            (gradient,) = reply.states[state].values()
            share = gradient / reply.num_examples if self.reduce == "sum" else gradient
            total = share.clone() if total is None else total.add_(share)
            num_examples += reply.num_examples
            metrics.append(replace(reply, states={}))
            if "buffers" in reply.states:
                buffers.add({"buffers": reply.states["buffers"]}, weight=reply.num_examples)
        if total is None:
            raise ValueError("no client answered")
        (vector,) = self.states[state].values()
        vector.grad = total if self.reduce == "sum" else total / num_examples
        optimizer = self._optimizers[state]
        clip_gradients(optimizer, clip_norm)
        optimizer.step()
        return mean_metrics(metrics), buffers.result()["buffers"] if buffers.total_weight else {}

    def _evaluate(self, server_round: int, num_rounds: int) -> dict[str, float]:
        """Evaluate the supernet on the clients' validation records when it is time to."""
        due = self.evaluate_every and server_round % self.evaluate_every == 0
        if not due and server_round != num_rounds:
            return {}
        replies = self.ask(
            "evaluate.model",
            settings={"network": {"name": "supernet"}, "split": "validation"},
            states=self.states,
        )
        _, metrics = average_replies(replies)
        return {f"validation_{name}": value for name, value in metrics.items()}

    def server_tensors(self) -> Tensors:
        """Return the optimisers' moments."""
        return {
            f"{state}.{name}": value
            for state, optimizer in self._optimizers.items()
            for moments in optimizer.state_dict()["state"].values()
            for name, value in moments.items()
            if isinstance(value, Tensor)
        }

    def load_server_tensors(self, tensors: Tensors) -> None:
        """Take back the optimisers' moments and bind them to the restored vectors."""
        for state, optimizer in self._optimizers.items():
            (vector,) = self.states[state].values()
            optimizer.param_groups[0]["params"] = [vector]
            optimizer.state.clear()
            moments = {
                name.removeprefix(f"{state}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{state}.")
            }
            if moments:
                optimizer.state[vector] = moments
