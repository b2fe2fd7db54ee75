"""FNAS and DP-FNAS; vanilla NAS is FNAS with one party (DP-FNAS, arXiv 2110.11025, Alg. 1).

The server holds weights W and architecture variables A. One round is one iteration: exchange 1
gives the gradients of W, the server steps; exchange 2 gives the gradients of A at the new W, the
server steps. DP-FNAS is the same schedule with clients that clip and noise what they return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from torch import Tensor

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.requests import TakeGradients
from fednas_flwr.exchange.states import Packed, pack
from fednas_flwr.privacy.plan import PlannedRelease, gradient_releases, metrics_release
from fednas_flwr.search.descent import make_adam, make_sgd
from fednas_flwr.search.regularisation import beta_gradient, rising
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import Shared, evaluates, mean_metrics
from fednas_flwr.strategies.gradients import GradientStrategy
from fednas_flwr.verbs import SUPERNET


class FNAS(GradientStrategy):
    """Federated NAS by exchange of gradients.

    Clients return sums of per-sample gradients over their batches and the batch sizes B_k; the
    server forms the update. ``reduce="mean"`` is ``sum_k G_k / sum_k B_k``, whose learning rate
    does not depend on the number of clients; ``reduce="sum"`` is the text's ``sum_k G_k / B_k``.
    The server's optimisers are SGD with momentum for W and Adam for A, as in the public code.
    ``fused`` asks for both gradients in one exchange, at the same W: half the exchanges, a
    deviation from Algorithm 1. With ``private`` this is DP-FNAS, of first order only; then the
    supernet is not evaluated unless metrics are to be released.

    Args:
        supernet: Newly initialised.
        courier: Reaches the clients.
        space: Search space of the supernet.
        order: 1 or 2, of the alpha gradient.
        reduce: ``mean`` or ``sum``.
        fused: Whether both gradients are asked for at once; of first order only.
        local_steps: Steps a client takes before it answers; its answer adds up their gradients.
            They are plain gradient descent at the learning rates of ``weights`` and ``alphas``.
        batch_size: Per client and step; None takes all of a client's records.
        evaluate_every: Rounds between evaluations of the supernet on validation records; 0: never.
        weights: SGD, annealed over the rounds.
        alphas: Adam.
        beta_decay: Weight of beta-DARTS' regulariser in the last round, for each local step; it
            rises linearly. The server adds its gradient, which reads no record, to the clients'.
        **shared: See :class:`RoundStrategy`; the server's own SGD has the momentum.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: SearchSpace,
        order: int = 1,
        reduce: str = "mean",
        fused: bool = False,
        local_steps: int = 1,
        batch_size: int | None,
        evaluate_every: int = 0,
        weights: SGD,
        alphas: Adam,
        beta_decay: float = 0.0,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        shared["momentum"] = "reset"
        super().__init__(supernet, courier, space=space, **shared)
        self.order, self.reduce, self.fused = order, reduce, fused
        self.local_steps, self.batch_size = local_steps, batch_size
        self.evaluate_every = evaluate_every
        self.weights, self.alphas_settings, self.beta_decay = weights, alphas, beta_decay
        self._beta_weight = 0.0
        (self._weight_vector,) = self.states["weights"].values()
        (self._alpha_vector,) = self.states["alphas"].values()
        self.optimizers = {
            "weights": make_sgd([self._weight_vector], weights),
            "alphas": make_adam([self._alpha_vector], alphas),
        }

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """One iteration: gradients of W, step; gradients of A at the new W, step."""
        sgd = self.weights.at_round(server_round, num_rounds)
        request = TakeGradients(
            step=server_round - 1,
            local_steps=self.local_steps,
            local_lrs={"weights": sgd.lr, "alphas": self.alphas_settings.lr},
            batch_size=None if self.private is not None else self.batch_size,
            order=self.order,
            inner_lr=sgd.lr,
            site=self.site,
        )
        self.optimizers["weights"].param_groups[0]["lr"] = sgd.lr
        self._beta_weight = rising(self.beta_decay, server_round, num_rounds)
        if self.fused:
            metrics = self._step(("weights", "alphas"), "train.gradients", request, sgd)
            return metrics | self._evaluate(server_round, num_rounds)
        before = {"previous_weights": {n: v.clone() for n, v in self.states["weights"].items()}}
        first_order = replace(request, order=1)
        metrics = self._step(("weights",), "train.weight_gradient", first_order, sgd)
        further = before if self.order == 2 else {}
        metrics |= self._step(("alphas",), "train.alpha_gradient", request, sgd, further=further)
        return metrics | self._evaluate(server_round, num_rounds)

    def _step(
        self,
        states: tuple[str, ...],
        verb: str,
        request: TakeGradients,
        sgd: SGD,
        *,
        further: Mapping[str, Packed] | None = None,
    ) -> dict[str, float]:
        """Ask for the gradients of some states and let their optimisers step.

        Sums are reduced in client order; metrics, and buffers with the weights, are averaged by
        batch.
        """
        names = [*states, "buffers"] if "weights" in states else states
        layouts = {name: self.layouts[name] for name in names if name in self.layouts}
        replies = self.ask(
            verb, request, states={**self.states, **(further or {})}, layouts=layouts
        )
        added = {"alphas": self._beta_gradient()} if "alphas" in states else {}
        told = self.descend(
            replies, states, clip_norm=sgd.clip_norm, reduce=self.reduce, added=added
        )
        return mean_metrics(told)

    def _beta_gradient(self) -> Tensor | float:
        """Return the gradient of the round's regulariser, packed as the alphas are."""
        if not self._beta_weight:
            return 0.0
        weight = self._beta_weight * self.local_steps
        (gradient,) = pack(beta_gradient(self.alphas(), weight=weight)).values()
        return gradient

    def _evaluate(self, server_round: int, num_rounds: int) -> dict[str, float]:
        """Evaluate the supernet on the clients' validation records when it is time to."""
        if not evaluates(self.evaluate_every, server_round, num_rounds):
            return {}
        if self.private is not None and self.private.noise_multiplier("metrics") is None:
            return {}
        return self.validation_metrics({"name": SUPERNET})


def releases(
    server_round: int,
    num_rounds: int,
    *,
    fused: bool,
    local_steps: int,
    batch_size: float | None,
    evaluate_every: int,
    measures: bool,
    norms: Mapping[str, float],
    secure_sum: bool = False,
) -> list[PlannedRelease]:
    """Return what a round releases of each client, with ``measures`` metrics, too.

    With secure sums clients share the noise of a single step: their replies are clipped sums at
    weights that all were sent. After several steps they are not: a record steers its client's later
    steps through weights that carry that client's noise alone. Fused sums are not, either: those of
    the alphas are scaled by each client's batch sizes.
    """
    verbs = {"weights": "train.weight_gradient", "alphas": "train.alpha_gradient"}
    if fused:
        verbs = dict.fromkeys(verbs, "train.gradients")
    planned = gradient_releases(
        verbs,
        batch_size=batch_size,
        steps=local_steps,
        norms=norms,
        shared=secure_sum and local_steps == 1 and not fused,
    )
    if measures and evaluates(evaluate_every, server_round, num_rounds):
        planned += [metrics_release("search", "validation")]
    return planned
