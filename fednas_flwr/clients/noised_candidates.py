"""Private DPNAS on one client: noised steps on candidates, and their noised rewards.

Not in the text, whose search is not private. Candidates are sampled from the run's seed and what
was released before, so given the candidate a step is DP-SGD on one network.

Guarantee: every step of :func:`candidate_training` is one release of a clipped sum over a Poisson
batch of train records, plus noise, on the weights that the candidate's path computes with; no other
moves. :func:`noised_rewards` is one release for all candidates: whether each of them is right about
a validation record is a vector of norm sqrt(m) at most, which is scaled to the clipping norm.

Tensor suffixes: B records, M candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fednas_flwr.clients.client import Client
from fednas_flwr.clients.noised_training import (
    gate_of,
    noised_sum,
    numbers,
    rehearse,
    whole_number,
)
from fednas_flwr.clients.release import Admission
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.messages import Request
from fednas_flwr.exchange.states import Tensors
from fednas_flwr.names import LARGEST_MICRO_BATCH
from fednas_flwr.privacy.clipping import clipped_gradient_sum
from fednas_flwr.privacy.policy import show
from fednas_flwr.search.candidate import Candidate, all_alike
from fednas_flwr.search.settings import SGD
from fednas_flwr.search.training import clip_gradients, make_sgd, record_losses
from fednas_flwr.search_spaces.space import Supernet

LARGEST_CANDIDATES = 1000
REWARD_BATCH = 256


def num_candidates(settings: Mapping[str, Any]) -> int:
    """Return how many candidates a request names.

    Raises:
        ConfigError: Not 1 to ``LARGEST_CANDIDATES``.
    """
    paths = settings["candidates"]
    if not isinstance(paths, list) or not 1 <= len(paths) <= LARGEST_CANDIDATES:
        raise ConfigError(
            f"refused, candidates={show(paths)} are not a list of 1 to {LARGEST_CANDIDATES}."
        )
    return len(paths)


def candidate_training(
    client: Client, request: Request, supernet: Supernet, admission: Admission
) -> Callable[[], None]:
    """Return what trains a supernet in place by ``local_steps`` noised steps on each candidate.

    Reads no record. What is rehearsed is every op on all edges: no path takes more memory than that
    of the op which takes most.

    Args:
        client: With a gate.
        request: Of ``train.candidate``.
        supernet: Of a space with candidates.
        admission: Of ``weights``.
    """
    settings, supernet = request.settings, supernet.train()
    sgd = SGD(**numbers(settings["weights"]))  # type: ignore[arg-type]
    size = whole_number(settings, "micro_batch_size", largest=LARGEST_MICRO_BATCH)
    steps = whole_number(settings, "local_steps", largest=10**6)
    candidates = [Candidate(supernet, path) for path in settings["candidates"]]

    def gradient_sum(candidate: Candidate, x: Tensor, y: Tensor) -> Tensors:
        return clipped_gradient_sum(
            candidate,
            x,
            y,
            loss=record_losses,
            parameters=candidate.weights(),
            max_norm=admission.terms.max_grad_norm,
            class_factors=client.class_factors,
        )

    for path in all_alike(supernet):
        rehearse(client, partial(gradient_sum, Candidate(supernet, path)), size, "candidate", path)

    def train() -> None:
        optimizer, split = make_sgd(supernet.weights().values(), sgd), client.data.train
        for candidate in candidates:
            weights = candidate.weights()
            for _ in range(steps):
                optimizer.zero_grad()  # to None: weights beside the path neither decay nor move
                sums = noised_sum(client, admission, split, size, partial(gradient_sum, candidate))
                for name, total in sums.items():
                    weights[name].grad = (total / admission.batch_size).to(weights[name])
                clip_gradients(optimizer, sgd.clip_norm)
                optimizer.step()
        optimizer.zero_grad()

    return train


def noised_rewards(
    client: Client, supernet: Supernet, paths: Sequence[Sequence[int]], admission: Admission
) -> Callable[[], Tensor]:
    """Return what releases each candidate's accuracy over the declared validation records, [M].

    Reads no record.
    """
    candidates = [Candidate(supernet.eval(), path) for path in paths]
    scale = math.sqrt(len(candidates)) / admission.terms.max_grad_norm

    @torch.no_grad()
    def num_correct(chosen: Sequence[Candidate], x: Tensor, y: Tensor) -> Tensor:
        hits_MB = [candidate(x).argmax(1) == y for candidate in chosen]
        return torch.stack(hits_MB).sum(1).double().cpu()

    alike = [Candidate(supernet, path) for path in all_alike(supernet)]
    rehearse(client, partial(num_correct, alike), REWARD_BATCH, "rewards")

    def correct_sum(rows: Tensor) -> Tensors:
        total_M = torch.zeros(len(candidates), dtype=torch.float64)
        for part in torch.split(rows, REWARD_BATCH) if len(rows) else ():
            total_M += num_correct(candidates, *client.data.validation.batch(part, client.device))
        return {"rewards": total_M / scale}

    def release() -> Tensor:
        gate, records = gate_of(client), len(client.data.validation)
        noised_M = gate.release(admission, records, correct_sum)["rewards"]
        return noised_M * (scale / admission.batch_size)

    return release
