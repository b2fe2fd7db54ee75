"""Weights of replies in an average: planned ones, and none beyond the largest share."""

from __future__ import annotations

from collections.abc import Mapping

from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.settings.names import FEWEST_VOTES


def share_scales(examples: Mapping[int, float], largest: float) -> dict[int, float]:
    """Factors of the weights of the clients that would exceed a share of the sum.

    Args:
        examples: Largest weight of each client; of one or two none is scaled.
        largest: Share of a client; the sum that counts is that of the others as they declare it.
    """
    total = sum(examples.values())
    if len(examples) < FEWEST_VOTES or largest == 1:
        return {}
    scales = {c: largest / (1 - largest) * (total - n) / n for c, n in examples.items()}
    return {client: scale for client, scale in scales.items() if scale < 1}


def weighed(reply: Reply, action: str, *, scale: float | None, weight: float | None) -> Reply:
    """A reply with the weight that counts.

    Args:
        reply: Accepted.
        action: That it answers.
        scale: Factor that keeps it to the largest share; None is 1.
        weight: What it counts for in place of its number of examples, where that is planned.
    """
    if scale is None and weight is None:
        return reply
    factor = 1.0 if scale is None else scale
    if weight is not None:
        factor *= weight / reply.num_examples
    return reply.weighing(factor, summed=ACTIONS[action].gradients_of)
