"""Releases of a client that is itself the unit of privacy: its whole update is one contribution.

The client computes its answer as without privacy, with as many local steps as it is asked for. Its
update is clipped and noised as one vector (McMahan et al. 2018, arXiv 1710.06963, Alg. 1, with
noise added by the clients and without sampling of clients).
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.foreign import terminal
from fednas_flwr.client.client import Client
from fednas_flwr.client.release_guard import Contributions, before_reading
from fednas_flwr.privacy.mechanism.micro_batches import ClippedSum
from fednas_flwr.privacy.policy import refused
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.requests import Probe
from fednas_flwr.protocol.secure_sum.masks import Cells, Grid
from fednas_flwr.protocol.states import MOMENTS, Layout, Packed, States, network_states, pack

MOST_CELLS = 2.0**52  # bound on a weight that is sent, on the grid of the sum of its updates


def noised_update(
    client: Client, request: Request, exact: Callable[[Client, Request, Any], Reply]
) -> Reply:
    """Return a client's reply to a request for a trained model or for rewards.

    For each trained state it has the state that was sent plus the noised difference; each reward is
    noised on its own. An answer that fails, or is not finite, counts as one that moves nothing, so
    that no record decides if there is an answer.

    Args:
        client: A client with a guard whose policy has the unit ``client``.
        request: The request to answer.
        exact: Given the client without its guard, the request and its settings, returns the answer
            without noise.

    Raises:
        ConfigError: The policy refuses the request, or it does not fit the network; nothing was
            read.
        BudgetExceededError: The budget does not cover it; nothing was read.
    """
    guard, header, settings = client.private_guard, request.header, request.settings
    planned = request.releases
    with before_reading(request.action):
        network = client.sent_network(request)
        if MOMENTS in request.states:
            limit = "none: they would tell of the records without noise"
            raise refused("unit", "moments", "sent", limit)
        base, digests, grids = *_sent(request, network), request.grids
        _check_sent(base, grids)

    @cache
    def update() -> States:
        try:
            return exact(replace(client, guard=None), request, settings).states
        except Exception as error:  # the server must not learn of any failure
            reason = terminal(f"{type(error).__name__}: {error}")
            said = f"{request.action} has failed, an update of zeros is sent: {reason}"
            print(said, file=sys.stderr)
            return {}

    def moved(kind: str, part: slice, norm: float, _rows: Tensor) -> ClippedSum:
        before = base[kind]
        after = update().get(kind, before)
        difference = {d: (after[d].double() - sent.double())[part] for d, sent in before.items()}
        return clipped(difference, max_norm=norm)

    states: dict[str, Packed] = {}
    shares: dict[str, Cells] = {}
    for kind, plan in planned.items():
        parts, norm = [slice(None)], plan.max_grad_norm
        if isinstance(settings, Probe):  # each reward is a release
            parts = [slice(i, i + 1) for i in range(len(settings.trials))]
            norm = settings.loss_bound
        units = [Contributions(1, partial(moved, kind, part, norm)) for part in parts]
        if plan.shared:
            shares[kind] = guard.share(plan, header, *units, grid=grids.get(kind))
            continue
        noised = [guard.release(plan, header, one) for one in units]
        joined = {d: torch.cat([noise[d] for noise in noised]) for d in base[kind]}
        states[kind] = {d: sent + joined[d] for d, sent in base[kind].items()}
    return Reply(1.0, {}, states, digests, shares=shares)


def clipped(update: Mapping[str, Tensor], *, max_norm: float) -> ClippedSum:
    """Return an update scaled down to a joint norm of at most ``max_norm``, float64.

    An update that is not finite becomes zeros.
    """
    double = {name: vector.double() for name, vector in update.items()}
    norm = math.hypot(*(float(torch.linalg.vector_norm(v)) for v in double.values()))
    if not math.isfinite(norm):
        double = {name: torch.zeros_like(vector) for name, vector in double.items()}
    # slightly less, so that rounding does not exceed the bound
    factor = max_norm / norm * (1 - 1e-12) if max_norm < norm < math.inf else 1.0
    return ClippedSum({n: vector * factor for n, vector in double.items()}, norm=max_norm)


def _check_sent(base: States, grids: Mapping[str, Grid]) -> None:
    """Refuse weights so large that, added to them, a cell of a secure sum is lost in float64."""
    for kind, grid in grids.items():
        most = MOST_CELLS * grid.cell
        largest = max((float(v.abs().max()) for v in base[kind].values() if len(v)), default=0.0)
        if not largest <= most:  # also refuses NaN
            raise refused("secure_sum", f"largest of {kind}", largest, f"at most {most:g}")


def _sent(request: Request, network: nn.Module) -> tuple[dict[str, Packed], dict[str, str]]:
    """Return the states from which updates are differences, and all layouts' digests."""
    if isinstance(request.settings, Probe):
        rewards = {"rewards": torch.zeros(len(request.settings.trials))}
        return {"rewards": pack(rewards)}, {"rewards": Layout.of(rewards).digest}
    states = network_states(network)
    digests = {kind: Layout.of(states[kind]).digest for kind in request.releases}
    return {kind: request.states[kind] for kind in digests}, digests
