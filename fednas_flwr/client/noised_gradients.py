"""Gradients of private clients: noised releases of clipped sums over Poisson batches.

Guarantee: every gradient is one release, as booked. A path or a candidate is drawn from the run's
seed and from earlier releases; given the path, a step is DP-SGD on one network. Weights outside the
path have no gradient, whatever the records are: a record's gradient is clipped over the path's own
weights, noise is added to these, and no others move.

Tensor suffixes: B records, E blocks, O ops, K ops that are computed in a block.
"""

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client import rehearsal, release_guard
from fednas_flwr.client.client import Client
from fednas_flwr.data.loaders import Split
from fednas_flwr.privacy.mechanism import clipping
from fednas_flwr.privacy.mechanism.micro_batches import ClippedSum, by_person, sum_of_parts
from fednas_flwr.protocol.messages import Request
from fednas_flwr.protocol.secure_sum.masks import Cells
from fednas_flwr.protocol.states import Tensors
from fednas_flwr.search import proxyless as px
from fednas_flwr.search.candidate import PREFIX, Pool
from fednas_flwr.search.objective import Batch, Output
from fednas_flwr.search.optimizer_step import Gradient, Optimizer, trainable_weights
from fednas_flwr.spaces.costs import HardwareLoss
from fednas_flwr.spaces.mbconv import CELL
from fednas_flwr.spaces.space import Supernet

# A function of features [B, ...] and labels [B], with keywords ``micro_batch_size``, ``persons``
# and ``watch``, see ``clipping.clipped_gradient_sum``.
TakeSum = Callable[..., ClippedSum]


class NoisedGradients:
    """A source of gradients (``search.optimizer_step.Gradients``); each gradient is a release.

    Each computation is first tried on made-up records by the ``rehearse`` methods. They and the
    constructor read no record.

    Args:
        client: A client with a guard.
        request: The request as the guard has admitted it, with releases of ``weights`` or
            ``alphas``.
        steps: Number of steps of the loop.
        auxiliary_weight: Weight of an auxiliary head's loss.
        augmented: True if images are augmented.
    """

    def __init__(
        self,
        client: Client,
        request: Request,
        *,
        steps: int = 1,
        auxiliary_weight: float = 0.0,
        augmented: bool = True,
    ) -> None:
        self._client, self._guard, self._request = client, client.private_guard, request
        self._planned, self._steps = request.releases, steps
        self._auxiliary_weight, self._augmented = auxiliary_weight, augmented
        self._sizes: dict[str, int] = {}  # of micro-batches, by kind, from rehearsals

    def rehearse(self, state: str, network: nn.Module, *chosen: Any) -> None:
        """Try a state's gradient; ``chosen`` is everything else that the server has chosen."""
        computation = partial(self._sum_of(state), network.train())
        self._rehearse(state, computation, network, state, *chosen)

    def rehearse_gates(
        self, supernet: Supernet, paths_EK: Tensor, hardware: HardwareLoss | None, *chosen: Any
    ) -> None:
        """Try the gradient by the gates of some paths; no drawn path exceeds these."""
        supernet.train()
        if hardware is not None:
            if hardware.costs.per_op_EO.shape != supernet.alphas()[CELL].shape:
                raise ConfigError("refused, the costs of hardware are not of this supernet's ops.")
            self._cost_gradient(supernet, paths_EK, hardware)
        computation = partial(self._gate_sum, supernet, paths_EK, hardware)
        kind = "gates" if hardware is None else f"gates, {hardware.form}"
        self._rehearse("alphas", computation, px.PathNetwork(supernet, paths_EK), kind, *chosen)

    def _rehearse(
        self, state: str, take: TakeSum, network: nn.Module, kind: str, *chosen: Any
    ) -> None:
        """Try a sum; a state uses the smallest micro-batches that any of its sums needs."""
        size = rehearsal.rehearse(self._client, take, network, kind, *chosen)
        self._sizes[state] = min(size, self._sizes.get(state, size))

    def steps(self) -> Iterator[None]:
        """Yield as many times as was agreed; each release draws its own records."""
        yield from repeat(None, self._steps)

    def sums(self, state: str, network: nn.Module) -> tuple[Any, float]:
        """Return a noised sum of gradients, and the expected batch size by which it is divided.

        The sum is tensors by name, or cells if clients share the noise.
        """
        return self._noised(state, partial(self._sum_of(state), network))

    def _sum_of(self, state: str) -> TakeSum:
        return self._weight_sum if state == "weights" else self._alpha_sum

    def weights(self, network: nn.Module) -> Gradient:
        """Return the noised mean gradient of the weights with which a network computes.

        For a pool of M networks it is one release, too. Every member's gradient is clipped to R on
        its own, so that a record's gradients of all members have a joint norm of at most ``sqrt(M)
        R``, by which noise is scaled. Clipping all of them jointly to ``sqrt(M) R`` would cost the
        same, but a member with large gradients would shrink the others' steps. M separate releases
        would need the same noise.
        """
        return self._mean("weights", partial(self._weight_sum, network))

    def alphas(self, supernet: Supernet, weights: Optimizer, *, rule: str) -> Gradient:
        """Return the noised mean gradient of the alphas; requests for other rules are refused."""
        return self._mean("alphas", partial(self._alpha_sum, supernet))

    def gates(self, supernet: Supernet, paths_EK: Tensor, hardware: HardwareLoss | None) -> Tensor:
        """Return the noised gradient [E, O] of the alphas of drawn paths.

        A record's gradient with respect to the gates of the computed ops is converted into one with
        respect to the alphas, clipped over all blocks and noised. Noise on other ops' alphas is set
        to zero, which is post-processing. The gradient of an additive hardware loss depends on no
        record and is added after the noise. The multiplicative form is a factor of every record's
        loss and is therefore clipped with it.
        """
        alphas_EO = supernet.alphas()[CELL]
        means = self._mean("alphas", partial(self._gate_sum, supernet, paths_EK, hardware))
        noised_EO = means[CELL].to(alphas_EO)
        computed_EO = torch.zeros(alphas_EO.shape, dtype=torch.bool).scatter(-1, paths_EK, True)
        moved_EO = (computed_EO & px.offered_ops(supernet)).to(alphas_EO.device)
        return noised_EO.where(moved_EO, 0.0) + self._cost_gradient(supernet, paths_EK, hardware)

    def metrics(self) -> dict[str, float]:
        """Return no metrics, as they would reveal records."""
        return {}

    def _mean(self, state: str, take: TakeSum) -> Tensors:
        """Return the noised sum over a Poisson batch, divided by the batch's expected size."""
        sums, size = self._noised(state, take)
        return {name: total / size for name, total in sums.items()}

    def _noised(self, state: str, take: TakeSum) -> tuple[Any, float]:
        """Return one release, on the client's device, and the expected size of its batch."""
        planned, size = self._planned[state], self._sizes[state]
        split = self._client.split("+".join(planned.splits))

        def total(units: Tensor) -> ClippedSum:
            parts = (  # one micro-batch is in memory at a time
                take(*self._batch(split, rows), micro_batch_size=size, persons=persons)
                for rows, persons in _micro_batches(split, units, size)
            )
            return sum_of_parts(parts, bound=planned.max_grad_norm)

        units = release_guard.Contributions(split.num_units, total)
        sums = self._guard.answer(planned, self._request, units)
        if not isinstance(sums, Cells):
            sums = {name: value.to(self._client.device) for name, value in sums.items()}
        return sums, self._guard.expected_batch(planned)

    def _batch(self, split: Split, rows: Tensor) -> Batch:
        """Return the batch of some rows, augmented if asked for; nobody can foresee the draws.

        The draws are independent and alike at every position, and augmentation only moves whole
        numbers within a record. The result for a record therefore does not depend on its
        neighbours.
        """
        x, y = split.batch(rows, self._client.device)
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        return (self._client.augmented(x, generator) if len(rows) and self._augmented else x), y

    def _weight_sum(self, network: nn.Module, x: Tensor, y: Tensor, **how: Any) -> ClippedSum:
        """Return the clipped sum of gradients by the weights with which a network computes.

        The members of a :class:`Pool` are clipped one by one.
        """
        if isinstance(network, Pool):
            sums = (self._weight_sum(member, x, y, **how) for member in network.members)
            named = {f"{PREFIX}.{index}": total for index, total in enumerate(sums)}
            return ClippedSum.side_by_side(named)
        losses, weight = self._client.objective.plain_losses, self._auxiliary_weight
        how |= {"loss": partial(losses, auxiliary_weight=weight)} | self._terms("weights")
        parameters = trainable_weights(network)
        return clipping.clipped_gradient_sum(network, x, y, parameters=parameters, **how)

    def _alpha_sum(self, supernet: Supernet, x: Tensor, y: Tensor, **how: Any) -> ClippedSum:
        """Return the clipped sum of gradients by the alphas.

        ``how`` may replace the network that computes with them, and the loss of its outputs.
        """
        network, alphas = how.pop("network", supernet), supernet.alphas()
        how = {"loss": self._client.objective.plain_losses} | how | self._terms("alphas")
        return clipping.clipped_alpha_gradient_sum(network, x, y, alphas=alphas, **how)

    def _terms(self, state: str) -> dict[str, Any]:
        """Return the terms by which a state's gradients are clipped and weighted."""
        norm, objective = self._planned[state].max_grad_norm, self._client.objective
        return {"max_norm": norm, "class_factors": objective.class_factors}

    def _gate_sum(
        self,
        supernet: Supernet,
        paths_EK: Tensor,
        hardware: HardwareLoss | None,
        x: Tensor,
        y: Tensor,
        **how: Any,
    ) -> ClippedSum:
        """Return the clipped sum of gradients by the alphas, through the paths' gates."""
        alphas, objective = supernet.alphas(), self._client.objective
        factor = hardware if hardware is not None and hardware.form == "multiplicative" else None
        gates_EK = px.active_gates(paths_EK, like=alphas[CELL])

        def losses(output: Output, labels: Tensor) -> Tensor:
            if isinstance(output, Tensor):
                return objective.plain_losses(output, labels)
            assert factor is not None  # the network returns its costs
            logits, cost_B = output
            return factor(objective.plain_losses(logits, labels), cost_B)

        def by_alphas(kind: str, gradient: Tensor) -> Tensor:
            return px.alpha_gradient(gradient, alphas[kind].double(), paths_EK)

        network = px.PathNetwork(supernet, paths_EK, None if factor is None else factor.costs)
        how |= {"network": network, "relaxation": clipping.Relaxation({CELL: gates_EK}, by_alphas)}
        return self._alpha_sum(supernet, x, y, loss=losses, **how)

    def _cost_gradient(
        self, supernet: Supernet, paths_EK: Tensor, hardware: HardwareLoss | None
    ) -> Tensor:
        """Return the gradient [E, O] of an additive loss's cost; zeros without one."""
        if hardware is None or hardware.form != "additive":
            return torch.zeros_like(supernet.alphas()[CELL])
        return px.cost_gradient(hardware, supernet, paths_EK)


def _micro_batches(
    split: Split, units: Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the rows of up to ``size`` records of some units, with their persons; at least once."""
    if split.persons is not None:
        yield from by_person(split.records_of(units), size)
    else:
        yield from ((rows, None) for rows in (torch.split(units, size) if len(units) else (units,)))
