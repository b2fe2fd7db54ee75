"""Noised means over all declared records: the losses and accuracies of private clients.

Each is one release of a sum of one vector per record, clipped to the largest norm that it can
have, by which noise is scaled. What is measured of a record does not depend, in any bit, on what
stands beside it, and sums of it are exact: see :mod:`fednas_flwr.privacy.mechanism.micro_batches`.

Tensor suffixes: B rows of a micro-batch, V values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.layers import own_linear_layers
from fednas_flwr.client.client import Client
from fednas_flwr.client.rehearsal import rehearse
from fednas_flwr.client.release_guard import Contributions
from fednas_flwr.data.loaders import Split
from fednas_flwr.models.noised_scores import BINS, one_hot
from fednas_flwr.privacy.mechanism import micro_batches
from fednas_flwr.privacy.mechanism.micro_batches import ClippedSum, filled
from fednas_flwr.privacy.self_test import Watch, unwatched
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.states import Layout
from fednas_flwr.search.objective import heads, log_odds

# Of a network's outputs and of labels: values of every record [B, V].
Measure = Callable[[Tensor, Tensor], Tensor]

METRICS_NORM = math.sqrt(2)  # of a record's (loss / bound, correct), both from 0 to 1


def noised_mean(
    client: Client,
    request: Request,
    kind: str,
    split: Split,
    values: Callable[[Tensor], Tensor],
    *,
    norm: float,
) -> Tensor:
    """Return one release: the noised mean over declared units of a vector per unit.

    Args:
        client: With a guard.
        request: As the guard has admitted it.
        kind: Of the release.
        split: Records to measure. A person counts as the mean of all their records.
        values: Given indices, returns a vector of each record, float64 [N, V].
        norm: Bound to which a unit's vector is clipped; it also scales the noise.
    """
    guard, planned = client.private_guard, request.releases[kind]
    units = _contributions(kind, split, values, norm=norm)
    return guard.release(planned, request.header, units)[kind] / guard.expected_batch(planned)


def mean_reply(client: Client, request: Request, kind: str, means: Tensor) -> Reply:
    """Return the reply of noised means, which stand for a public number of records."""
    batch = client.private_guard.expected_batch(request.releases[kind])
    return Reply.of(batch, {kind: {kind: means}})


def _contributions(
    kind: str, split: Split, values: Callable[[Tensor], Tensor], *, norm: float
) -> Contributions:
    """Clipped vectors of records; a person counts as the mean of all their records."""

    def total(units: Tensor) -> ClippedSum:
        vectors = values(units) if split.persons is None else means(units)
        return micro_batches.clipped_row_sum(kind, vectors, max_norm=norm)

    def means(units: Tensor) -> Tensor:
        rows, persons = micro_batches.joined(split.records_of(units))
        return micro_batches.person_means(values(rows), persons)

    return Contributions(split.num_units, total)


def prepare_values(
    client: Client,
    split: Split,
    networks: nn.Module,
    measure: Measure,
    *chosen: Any,
    measured: Sequence[nn.Module] = (),
    tried: Sequence[nn.Module] = (),
) -> Callable[[Tensor], Tensor]:
    """Return a function: the values [N, V] of some rows, as networks in evaluation mode give them.

    The computation is tried on made-up records; no record is read yet.

    Args:
        client: With a guard.
        split: Of the records.
        networks: The network to compute with, or all of the following.
        measure: What is measured.
        chosen: Its name, and all that the server has chosen of it besides.
        measured: The networks whose values stand side by side; none is ``networks`` alone.
        tried: Those that take as much memory as any; none is ``measured``.
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

    measured = measured or [networks]
    with torch.no_grad(), _measuring(networks):
        size = rehearse(client, partial(computation, tried or measured), networks, *chosen)

    @torch.no_grad()
    def values(rows: Tensor) -> Tensor:
        parts = []  # micro-batches of exactly one size
        with _measuring(networks):
            for part in torch.split(rows, size) if len(rows) else (rows,):
                x, y = split.batch(part, client.device)
                parts.append(computation(measured, filled(x, size), filled(y, size))[: len(part)])
        return torch.cat(parts)

    return values


def prepare_metrics(client: Client, request: Request, network: nn.Module) -> Callable[[], Reply]:
    """Return a function that releases a network's loss and accuracy; reads no record itself.

    A record's loss counts for at most twice that of guessing, and so does one that is not finite;
    that is the squared range of a number, whose loss is the squared difference.
    """
    objective = client.objective
    bound = 2 * objective.guessing_loss(len(client.inputs.class_names))

    def measure(logits: Tensor, y: Tensor) -> Tensor:
        """Return (loss / bound, hit) of every record, each from 0 to 1; float64 [B, 2]."""
        losses = objective.tested_losses(logits, y).double()
        losses = losses.nan_to_num(nan=bound).clamp(0, bound) / bound
        return torch.stack([losses, objective.hits(logits, y).double()], dim=1)

    split = client.split("+".join(request.releases["metrics"].splits))
    values = prepare_values(client, split, network, measure, "metrics", request.network)

    def release() -> Reply:
        means = noised_mean(client, request, "metrics", split, values, norm=METRICS_NORM)
        loss, accuracy = means.tolist()
        batch = client.private_guard.expected_batch(request.releases["metrics"])
        return Reply(batch, {"loss": loss * bound, "accuracy": accuracy})

    return release


def prepare_counts(client: Client, request: Request, network: nn.Module) -> Callable[[], Reply]:
    """A function that releases the counts of scores by class; reads no record itself.

    See :mod:`fednas_flwr.models.noised_scores`. In a secure sum clients share the noise.
    """
    objective, planned = client.objective, request.releases["scores"]
    positive = objective.positive_class(2)
    assert positive is not None  # of two classes there is always one

    def measure(logits: Tensor, y: Tensor) -> Tensor:
        odds_B2 = log_odds(logits.double())
        return one_hot(odds_B2[:, positive], objective.members(y, positive))

    split = client.split("+".join(planned.splits))
    values = prepare_values(client, split, network, measure, "scores", request.network)
    units, guard = _contributions("scores", split, values, norm=1.0), client.private_guard

    def release() -> Reply:
        batch, header = guard.expected_batch(planned), request.header
        if not planned.shared:
            return Reply.of(batch, {"scores": guard.release(planned, header, units)})
        cells = guard.share(planned, header, units, grid=request.grids.get("scores"))
        digest = Layout.of({"scores": torch.zeros(2 * BINS)}).digest
        return Reply(batch, digests={"scores": digest}, shares={"scores": cells})

    return release


def prepare_losses(client: Client, request: Request, network: nn.Module) -> Callable[[], Tensor]:
    """Return a function: the loss of every validation record, times its class's factor.

    Its result is float64 [N] on the CPU, in evaluation mode. Reads no record itself.
    """
    objective = client.objective

    def measure(logits: Tensor, y: Tensor) -> Tensor:
        losses_B, factors_B = objective.plain_losses(logits, y), objective.record_factors(y)
        factors_B = torch.ones(()) if factors_B is None else factors_B
        return (losses_B.double() * factors_B.double())[:, None]

    split = client.data.validation
    values = prepare_values(client, split, network, measure, "losses", request.network)
    return lambda: values(torch.arange(len(split)))[:, 0]


def prepare_rewards(
    client: Client,
    request: Request,
    candidates: Sequence[nn.Module],
    largest: Sequence[nn.Module],
) -> Callable[[], Reply]:
    """Return a function that releases every candidate's accuracy on validation records, [M].

    Accuracies are shares of the declared number of records. Reads no record itself. All are one
    release: the hits of M candidates on one record are a vector of norm sqrt(M) at most.

    Args:
        client: With a guard.
        request: As the guard has admitted it.
        candidates: M networks in evaluation mode.
        largest: Candidates which take as much memory as any; they are tried before.
    """

    def correct(logits: Tensor, y: Tensor) -> Tensor:
        return client.objective.hits(logits, y)[:, None]

    networks, split = nn.ModuleList([*candidates, *largest]).eval(), client.data.validation
    both = {"measured": candidates, "tried": largest}
    values = prepare_values(client, split, networks, correct, "rewards", request.network, **both)
    norm = math.sqrt(len(candidates))

    def release() -> Reply:
        means = noised_mean(client, request, "rewards", split, values, norm=norm)
        return mean_reply(client, request, "rewards", means)

    return release


@contextmanager
def _measuring(network: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode inside the block, and let it round all rows alike."""
    was_training = network.training
    network.eval()
    try:
        with own_linear_layers(network):
            yield
    finally:
        network.train(was_training)
