"""Faults to build into a private client, by name: what stands in the place of which function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fednas_flwr.clients import noised_gradients, release
from fednas_flwr.stages import audit

add_noise, clipped_gradient_sum = release.add_noise, noised_gradients.clipped_gradient_sum
add_shared_noise = release.add_shared_noise


def no_noise(total: Tensor, *_: Any, **__: Any) -> Tensor:
    return total


def half_noise(total: Tensor, generator: Any, **terms: float) -> Tensor:
    terms["noise_multiplier"] /= 2
    return add_noise(total, generator, **terms)


def half_shares(total: Tensor, generator: Any, **terms: Any) -> Tensor:
    terms["noise_multiplier"] /= 2
    return add_shared_noise(total, generator, **terms)


def noise_of_a_clipped_sum(total: Tensor, generator: Any, **terms: float) -> Tensor:
    scale = min(1.0, terms["max_grad_norm"] / float(total.norm()))
    return add_noise(total * scale, generator, **terms)


def unclipped_sum(*arguments: Any, **terms: Any) -> dict[str, Tensor]:
    return clipped_gradient_sum(*arguments, **terms | {"max_norm": 1e6})


FAULTS = {
    "honest": {},
    "honest, few runs": {(audit, "MOST_RUNS"): 200, (audit, "MOST_CANARIES"): 512},
    "no noise": {(release, "add_noise"): no_noise},
    "half the noise": {(release, "add_noise"): half_noise},
    "half the shares": {(release, "add_shared_noise"): half_shares},
    "no clipping": {(noised_gradients, "clipped_gradient_sum"): unclipped_sum},
    "clipping after the sum": {
        (noised_gradients, "clipped_gradient_sum"): unclipped_sum,
        (release, "add_noise"): noise_of_a_clipped_sum,
    },
}
