"""FedAdam, FedYogi and FedAdagrad, stepped by Flower's own strategies.

Reddi et al. (2021), arXiv 2003.00295, Alg. 2: the server takes the difference between the clients'
average and the model that they were sent for a gradient, and steps along it by Adam, Yogi or
Adagrad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedYogi
from flwr.serverapp.strategy.fedopt import FedOpt

from fednas_flwr.protocol.states import Packed, Tensors
from fednas_flwr.settings.run_settings import ServerAdagrad, ServerAdam
from fednas_flwr.settings.run_settings import ServerOptimizer as Settings

MOMENTS = ("m_t", "v_t")  # Flower's names of the first and second ones


class _Averaged(FedAvg):
    """Stand-in that Flower's optimisers ask for the average of the replies: it is ready already."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the only reply, which is the average."""
        (average,) = replies
        return cast(ArrayRecord, average), None


class _Adam(FedAdam, _Averaged):
    """FedAdam of a ready average."""


class _Yogi(FedYogi, _Averaged):
    """FedYogi of a ready average."""


class _Adagrad(FedAdagrad, _Averaged):
    """FedAdagrad of a ready average."""


_KINDS: dict[str, Callable[..., FedOpt]] = {"adam": _Adam, "yogi": _Yogi, "adagrad": _Adagrad}


class ServerOptimizer:
    """The server's optimiser of packed weights.

    Deviation from Flower: statistics of batch norm and its counters are averaged, and do not step.

    Args:
        name: ``adam``, ``yogi`` or ``adagrad``.
        constants: Flower's: ``eta`` (the learning rate), ``tau`` and, but of ``adagrad``,
            ``beta_1`` and ``beta_2``.
    """

    def __init__(self, name: str, **constants: float) -> None:
        """See the class."""
        self._steps = _KINDS[name](**constants)

    @classmethod
    def of(cls, settings: Settings) -> ServerOptimizer | None:
        """The optimiser of the settings, None if they have none."""
        if not isinstance(settings, ServerAdagrad):
            return None
        constants = {"eta": settings.lr, "tau": settings.tau}
        if isinstance(settings, ServerAdam):
            constants |= {"beta_1": settings.beta_1, "beta_2": settings.beta_2}
        return cls(settings.name, **constants)

    def step(self, average: Packed, before: Packed, server_round: int) -> Packed:
        """Return the new weights.

        Args:
            average: Of the clients' weights.
            before: What the clients were sent.
            server_round: From 1.
        """
        self._steps.current_arrays = {dtype: v.numpy() for dtype, v in before.items()}
        arrays = ArrayRecord({dtype: Array(v.numpy()) for dtype, v in average.items()})
        moved, _ = self._steps.aggregate_train(server_round, [cast(Message, arrays)])
        assert moved is not None
        return {d: torch.from_numpy(moved[d].numpy()).to(v.dtype) for d, v in before.items()}

    def tensors(self) -> Tensors:
        """Return the moments, none before the first step."""
        return {
            f"{moments}.{dtype}": torch.from_numpy(array)
            for moments in MOMENTS
            for dtype, array in (getattr(self._steps, moments) or {}).items()
        }

    def load(self, tensors: Tensors) -> None:
        """Take back what :meth:`tensors` returned."""
        for moments in MOMENTS:
            own = {n: t for n, t in tensors.items() if n.startswith(f"{moments}.")}
            arrays = {n.removeprefix(f"{moments}."): t.numpy() for n, t in own.items()}
            setattr(self._steps, moments, arrays)
