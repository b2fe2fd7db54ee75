"""Noised means over all declared records: what private clients tell of losses and accuracies.

Each is one release of a sum of one vector per record, of a norm that is known, scaled to the
clipping norm that was committed to. Losses and hits are computed in batches of a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.clients.admission import gate_of, rehearse
from fednas_flwr.clients.client import Client
from fednas_flwr.data.loaders import Split
from fednas_flwr.exchange.messages import Header
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.search.objective import heads

BATCH = 256
METRICS_NORM = math.sqrt(2)  # of a record's (loss / bound, correct), both from 0 to 1


def noised_mean(
    client: Client,
    header: Header,
    planned: PlannedRelease,
    num_records: int,
    total: Callable[[Tensor], Tensor],
    *,
    norm: float,
) -> Tensor:
    """Return one release: the noised mean over declared records of a vector per record.

    Args:
        client: With a gate.
        header: Of the request.
        planned: The plan; its clipping norm is what noise is in units of.
        num_records: How many records there are.
        total: Given rows, returns the sum of their vectors, float64.
        norm: Largest norm of a record's vector.
    """
    gate, scale = gate_of(client), norm / planned.max_grad_norm
    sums = gate.release(
        planned, header, num_records, lambda rows: {planned.kind: total(rows) / scale}
    )
    return sums[planned.kind] * (scale / gate.expected_batch(planned))


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
    bound = 2 * math.log(max(2, len(client.class_names)))
    network.eval()

    measure = partial(_loss_and_hits, client, network, bound)
    rehearse(client, measure, BATCH, "metrics", description)
    split = client.split("+".join(planned.splits))

    def release() -> dict[str, float]:
        total = partial(_total, client, split, measure, 2)
        loss, accuracy = noised_mean(
            client, header, planned, len(split), total, norm=METRICS_NORM
        ).tolist()
        return {"loss": loss * bound, "accuracy": accuracy}

    return release


def rehearse_losses(client: Client, network: nn.Module, description: object) -> None:
    """Try the losses of a network on made-up records."""
    rehearse(
        client, partial(_loss_and_hits, client, network.eval(), 1.0), BATCH, "losses", description
    )


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
        client: With a gate.
        header: Of the request.
        planned: The plan.
        candidates: M networks in evaluation mode.
        largest: Candidates which take as much memory as any; they are tried before.
        *chosen: All that the server has chosen of them besides.
    """

    @torch.no_grad()
    def num_correct(measured: Sequence[nn.Module], x: Tensor, y: Tensor) -> Tensor:
        hits_MB = [client.objective.hits(candidate(x), y) for candidate in measured]
        return torch.stack(hits_MB).sum(1).double().cpu()

    rehearse(client, partial(num_correct, largest), BATCH, "rewards", *chosen)
    split = client.data.validation

    def release() -> Tensor:
        total = partial(_total, client, split, partial(num_correct, candidates), len(candidates))
        norm = math.sqrt(len(candidates))
        return noised_mean(client, header, planned, len(split), total, norm=norm)

    return release


def _total(
    client: Client,
    split: Split,
    measure: Callable[[Tensor, Tensor], Tensor],
    num_values: int,
    rows: Tensor,
) -> Tensor:
    """Return the sum of what is measured of some rows, one batch at a time."""
    total = torch.zeros(num_values, dtype=torch.float64)
    for part in torch.split(rows, BATCH) if len(rows) else ():
        total += measure(*split.batch(part, client.device))
    return total


@torch.no_grad()
def _loss_and_hits(
    client: Client, network: nn.Module, bound: float, x: Tensor, y: Tensor
) -> Tensor:
    """Return the sum over records of (loss / bound, correct), each from 0 to 1; float64 [2].

    A loss that is not finite counts as the bound.
    """
    logits, _ = heads(network(x))
    losses = client.objective.plain_losses(logits, y).double()
    losses = losses.nan_to_num(nan=bound).clamp(0, bound) / bound
    correct = client.objective.hits(logits, y).double()
    return torch.stack([losses.sum(), correct.sum()]).cpu()
