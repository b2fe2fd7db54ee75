"""Noised means over all declared records: the losses and accuracies of private clients.

Each is one release of a sum with one vector per record. A vector is clipped to the largest norm
that it can have, by which noise is scaled. A record's measurement does not depend, in any bit, on
the records beside it, and sums of measurements are exact: see
:mod:`fednas_flwr.privacy.mechanism.micro_batches`.

Tensor suffixes: B rows of a micro-batch, V values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fednas_flwr.base.layers import evaluating, own_linear_layers
from fednas_flwr.client import rehearsal, release_guard
from fednas_flwr.client.client import Client
from fednas_flwr.data.loaders import Split
from fednas_flwr.models.noised_scores import BINS, one_hot
from fednas_flwr.privacy.mechanism import micro_batches
from fednas_flwr.privacy.mechanism.micro_batches import ClippedSum, filled
from fednas_flwr.privacy.self_test import Watch, unwatched
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.search.objective import heads, log_odds

# A function of a network's outputs and labels: the values of every record [B, V].
Measure = Callable[[Tensor, Tensor], Tensor]

Values = Callable[[Tensor], Tensor]  # a function of units, or of rows
AT_A_TIME = 1024  # units whose vectors are in memory at a time
METRICS_NORM = math.sqrt(2)  # norm of a record's (loss / bound, correct), both from 0 to 1


class NoisedMeasures:
    """Noised means that answer one request.

    The ``prepare`` methods return functions that read records. They themselves read none; each
    tries its computation on made-up records.

    Args:
        client: A client with a guard.
        request: The request as the guard has admitted it.
    """

    def __init__(self, client: Client, request: Request) -> None:
        self._client, self._guard, self._request = client, client.private_guard, request

    def mean(self, kind: str, split: Split, values: Values, *, norm: float) -> Tensor:
        """Return one release: the noised mean, over declared units, of one vector per unit.

        Args:
            kind: Kind of the release.
            split: Records to measure. A person counts as the mean of all their records.
            values: Given indices, returns a vector for each record, float64 [N, V].
            norm: Bound to which a unit's vector is clipped; it also scales the noise.
        """
        units = _contributions(kind, split, values, norm=norm)
        sums = self._guard.release(self._request.releases[kind], self._request.header, units)
        return sums[kind] / self._num_examples(kind)

    def reply(self, kind: str, means: Tensor) -> Reply:
        """Return the reply with noised means, whose weight is a public number of records."""
        return Reply.of(self._num_examples(kind), {kind: {kind: means}})

    def prepare_metrics(
        self, network: nn.Module, threshold: float | None = None
    ) -> Callable[[], Reply]:
        """Return a function that releases a network's loss and accuracy, at a threshold.

        A record's loss counts for at most twice the loss of guessing, and so does a loss that is
        not finite. For a number, whose loss is the squared difference, the bound is the squared
        range.
        """
        objective = replace(self._client.objective, threshold=threshold)
        bound = 2 * objective.guessing_loss(len(self._client.inputs.class_names))

        def measure(logits: Tensor, y: Tensor) -> Tensor:
            """Return (loss / bound, hit) of every record, each from 0 to 1; float64 [B, 2]."""
            losses = objective.tested_losses(logits, y).double()
            losses = losses.nan_to_num(nan=bound).clamp(0, bound) / bound
            return torch.stack([losses, objective.hits(logits, y).double()], dim=1)

        split = self._client.split("+".join(self._request.releases["metrics"].splits))
        values = self._prepare(split, network, measure, "metrics")

        def release() -> Reply:
            loss, accuracy = self.mean("metrics", split, values, norm=METRICS_NORM).tolist()
            metrics = {"loss": loss * bound, "accuracy": accuracy}
            return Reply(self._num_examples("metrics"), metrics)

        return release

    def prepare_counts(self, network: nn.Module) -> Callable[[], Reply]:
        """Return a function that releases the counts of scores by class.

        See :mod:`fednas_flwr.models.noised_scores`.
        """
        objective, planned = self._client.objective, self._request.releases["scores"]
        positive = objective.positive_class(2)
        assert positive is not None  # with two classes there is always one

        def measure(logits: Tensor, y: Tensor) -> Tensor:
            odds_B2 = log_odds(logits.double())
            return one_hot(odds_B2[:, positive], objective.members(y, positive))

        split = self._client.split("+".join(planned.splits))
        values = self._prepare(split, network, measure, "scores")
        return lambda: self.sums("scores", split, values, size=2 * BINS)

    def sums(self, kind: str, split: Split, values: Values, *, size: int) -> Reply:
        """Return the reply of one release: the noised sum of a vector per unit, of norm at most 1.

        Vectors are clipped to the norm that the client has committed to. In a secure sum clients
        share the noise.

        Args:
            kind: Kind of the release.
            split: As in :meth:`mean`.
            values: As in :meth:`mean`.
            size: V, the length of a vector.
        """
        planned = self._request.releases[kind]
        units = _contributions(kind, split, values, norm=planned.max_grad_norm)
        released = self._guard.answer(planned, self._request, units)
        like = {kind: {kind: torch.zeros(size)}}
        return Reply.of(self._num_examples(kind), {kind: released}, like=like)

    def prepare_losses(self, network: nn.Module) -> Callable[[], Tensor]:
        """Return a function that computes every validation record's loss, times its class's factor.

        Its result is float64 [N] on the CPU, in evaluation mode.
        """
        objective, split = self._client.objective, self._client.data.validation

        def measure(logits: Tensor, y: Tensor) -> Tensor:
            losses_B, factors_B = objective.plain_losses(logits, y), objective.record_factors(y)
            factors_B = torch.ones(()) if factors_B is None else factors_B
            return (losses_B.double() * factors_B.double())[:, None]

        values = self._prepare(split, network, measure, "losses")
        return lambda: values(torch.arange(len(split)))[:, 0]

    def prepare_rewards(
        self, candidates: Sequence[nn.Module], largest: Sequence[nn.Module]
    ) -> Callable[[], Reply]:
        """Return a function that releases every candidate's accuracy on validation records, [M].

        Accuracies are shares of the declared number of records. All accuracies are one release: the
        hits of M candidates on one record are a vector of norm at most sqrt(M).

        Args:
            candidates: M networks in evaluation mode.
            largest: Candidates that take as much memory as any; they are tried before.
        """

        def correct(logits: Tensor, y: Tensor) -> Tensor:
            return self._client.objective.hits(logits, y)[:, None]

        networks = nn.ModuleList([*candidates, *largest]).eval()
        split, norm = self._client.data.validation, math.sqrt(len(candidates))
        values = self._prepare(split, networks, correct, "rewards", candidates, largest)
        return lambda: self.reply("rewards", self.mean("rewards", split, values, norm=norm))

    def _prepare(
        self,
        split: Split,
        networks: nn.Module,
        measure: Measure,
        kind: str,
        measured: Sequence[nn.Module] = (),
        tried: Sequence[nn.Module] = (),
    ) -> Values:
        """Return a function that computes values [N, V] of rows, by networks in evaluation mode.

        Args:
            split: Split of the records.
            networks: The network to compute with, or all of the following.
            measure: Computes the values to measure.
            kind: Name of the measure.
            measured: The networks whose values are put side by side; if empty, ``networks`` alone.
            tried: Networks that take as much memory as any; if empty, ``measured``.
        """

        def computation(
            computed: Sequence[nn.Module], x: Tensor, y: Tensor, watch: Watch = unwatched
        ) -> Tensor:
            parts = []
            for network in computed:
                logits, _ = heads(network(x))
                watch(logits)
                parts.append(measure(logits, y).double().cpu())
            values_BV = torch.cat(parts, dim=1)
            watch(values_BV)
            return values_BV

        client, measured = self._client, measured or [networks]
        tries = partial(computation, tried or measured)
        with torch.no_grad(), evaluating(networks), own_linear_layers(networks):
            size = rehearsal.rehearse(client, tries, networks, kind, self._request.network)

        @torch.no_grad()
        def values(rows: Tensor) -> Tensor:
            parts = []  # micro-batches of exactly one size
            with evaluating(networks), own_linear_layers(networks):
                for part in torch.split(rows, size) if len(rows) else (rows,):
                    x, y = (filled(tensor, size) for tensor in split.batch(part, client.device))
                    parts.append(computation(measured, x, y)[: len(part)])
            return torch.cat(parts)

        return values

    def _num_examples(self, kind: str) -> float:
        return self._guard.expected_batch(self._request.releases[kind])


def _contributions(
    kind: str, split: Split, values: Values, *, norm: float
) -> release_guard.Contributions:
    """The clipped vectors of records; a person counts as the mean of all their records."""

    def total(units: Tensor) -> ClippedSum:
        vectors = values if split.persons is None else means
        parts = (
            micro_batches.clipped_row_sum(kind, vectors(part), max_norm=norm)
            for part in torch.split(units, AT_A_TIME)
        )
        return micro_batches.sum_of_parts(parts, bound=norm)

    def means(units: Tensor) -> Tensor:
        rows, persons = micro_batches.joined(split.records_of(units))
        return micro_batches.person_means(values(rows), persons)

    return release_guard.Contributions(split.num_units, total)
