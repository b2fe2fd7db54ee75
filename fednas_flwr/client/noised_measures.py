"""Noised means over all declared records: what private clients tell of losses and accuracies.

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
from fednas_flwr.client.admission import guard_of, rehearse
from fednas_flwr.client.client import Client
from fednas_flwr.data.loaders import Split
from fednas_flwr.privacy.mechanism.micro_batches import (
    ClippedSum,
    clipped_row_sum,
    filled,
    joined,
    person_means,
)
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.self_test import Watch, unwatched
from fednas_flwr.protocol.messages import Header
from fednas_flwr.search.objective import heads

# Of features [B, ...] and labels, watched: values of every record, float64 [B, V].
Measure = Callable[[Tensor, Tensor, Watch], Tensor]

METRICS_NORM = math.sqrt(2)  # of a record's (loss / bound, correct), both from 0 to 1


def noised_mean(
    client: Client,
    header: Header,
    planned: PlannedRelease,
    split: Split,
    values: Callable[[Tensor], Tensor],
    *,
    norm: float,
) -> Tensor:
    """Return one release: the noised mean over declared units of a vector per unit.

    Args:
        client: With a guard.
        header: Of the request.
        planned: The plan.
        split: What is measured. Of a person counts the mean of all records.
        values: Given indices, returns a vector of each record, float64 [N, V].
        norm: What a unit's vector is clipped to, and what noise is scaled by.
    """
    guard = guard_of(client)

    def total(units: Tensor) -> ClippedSum:
        vectors = values(units) if split.persons is None else means(units)
        return clipped_row_sum(planned.kind, vectors, max_norm=norm)

    def means(units: Tensor) -> Tensor:
        rows, persons = joined(split.records_of(units))
        return person_means(values(rows), persons)

    sums = guard.release(planned, header, split.num_units, total)
    return sums[planned.kind] / guard.expected_batch(planned)


def prepare_metrics(
    client: Client,
    header: Header,
    planned: PlannedRelease,
    network: nn.Module,
    description: object,
) -> Callable[[], dict[str, float]]:
    """Return what releases a network's loss and accuracy; reads no record.

    A record's loss counts for at most twice that of guessing.
    """
    bound = 2 * client.objective.guessing_loss(len(client.class_names))
    measure = partial(_loss_and_hits, client, network, bound)
    with _measuring(network):
        size = rehearse(client, measure, network, "metrics", description)
    split = client.split("+".join(planned.splits))

    def values(rows: Tensor) -> Tensor:
        with _measuring(network):
            return _measured(client, split, measure, size, rows)

    def release() -> dict[str, float]:
        loss, accuracy = noised_mean(
            client, header, planned, split, values, norm=METRICS_NORM
        ).tolist()
        return {"loss": loss * bound, "accuracy": accuracy}

    return release


def prepare_losses(client: Client, network: nn.Module, description: object) -> Callable[[], Tensor]:
    """Return what computes the loss of every validation record, times its class's factor, [N].

    float64 on the CPU, in evaluation mode. Reads no record itself.
    """
    objective = client.objective

    @torch.no_grad()
    def measure(x: Tensor, y: Tensor, watch: Watch) -> Tensor:
        logits, _ = heads(network(x))
        losses_B, factors_B = objective.plain_losses(logits, y), objective.record_factors(y)
        values_B1 = losses_B.double().cpu()[:, None]
        if factors_B is not None:
            values_B1 = values_B1 * factors_B.double().cpu()[:, None]
        watch(logits)
        watch(values_B1)
        return values_B1

    with _measuring(network):
        size = rehearse(client, measure, network, "losses", description)
    split = client.data.validation

    def losses() -> Tensor:
        with _measuring(network):
            return _measured(client, split, measure, size, torch.arange(len(split)))[:, 0]

    return losses


def prepare_rewards(
    client: Client,
    header: Header,
    planned: PlannedRelease,
    candidates: Sequence[nn.Module],
    largest: Sequence[nn.Module],
    *chosen: Any,
) -> Callable[[], Tensor]:
    """Return what releases each candidate's accuracy over the declared validation records, [M].

    Reads no record. One release for all: whether each of M candidates is right about a record is a
    vector of norm sqrt(M) at most.

    Args:
        client: With a guard.
        header: Of the request.
        planned: The plan.
        candidates: M networks in evaluation mode.
        largest: Candidates which take as much memory as any; they are tried before.
        *chosen: All that the server has chosen of them besides.
    """

    @torch.no_grad()
    def correct(measured: Sequence[nn.Module], x: Tensor, y: Tensor, watch: Watch) -> Tensor:
        hits = []
        for candidate in measured:
            logits = candidate(x)
            hits.append(client.objective.hits(logits, y))
            watch(logits)
        hits_BM = torch.stack(hits, dim=1).double().cpu()
        watch(hits_BM)
        return hits_BM

    networks = nn.ModuleList([*candidates, *largest]).eval()
    with _measuring(networks):
        size = rehearse(client, partial(correct, largest), networks, "rewards", *chosen)
    split = client.data.validation

    def values(rows: Tensor) -> Tensor:
        with _measuring(networks):
            return _measured(client, split, partial(correct, candidates), size, rows)

    def release() -> Tensor:
        norm = math.sqrt(len(candidates))
        return noised_mean(client, header, planned, split, values, norm=norm)

    return release


def _measured(client: Client, split: Split, measure: Measure, size: int, rows: Tensor) -> Tensor:
    """Return what is measured of some rows [N, V], in micro-batches of exactly ``size``."""
    values = []
    for part in torch.split(rows, size) if len(rows) else (rows,):
        x, y = split.batch(part, client.device)
        values.append(measure(filled(x, size), filled(y, size), unwatched)[: len(part)])
    return torch.cat(values)


@torch.no_grad()
def _loss_and_hits(
    client: Client, network: nn.Module, bound: float, x: Tensor, y: Tensor, watch: Watch
) -> Tensor:
    """Return (loss / bound, correct) of every record, each from 0 to 1; float64 [B, 2].

    A loss that is not finite counts as the bound.
    """
    logits, _ = heads(network(x))
    losses = client.objective.plain_losses(logits, y).double()
    losses = losses.nan_to_num(nan=bound).clamp(0, bound) / bound
    correct = client.objective.hits(logits, y).double()
    values_B2 = torch.stack([losses, correct], dim=1).cpu()
    watch(logits)
    watch(values_B2)
    return values_B2


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
