"""Costs of networks: parameters, multiply-adds or milliseconds, and losses that hold them in check.

:func:`count_multiply_adds` counts as papers do. Of a supernet's ops :class:`Costs` are milliseconds
(``latency_tables.py``) or multiply-adds, sums over layers; :class:`HardwareLoss` holds the expected
cost near a target (Cai et al. 2019, ProxylessNAS, arXiv 1812.00332, section 3.3).

Tensor suffixes: E blocks, O ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError, unknown_choice

UNITS = ("ms", "multiply_adds")
LOSSES = ("multiplicative", "additive")

L = TypeVar("L")  # a layer


@dataclass(frozen=True)
class Costs:
    """Cost of every op of a supernet.

    Attributes:
        unit: One of ``UNITS``.
        fixed: Cost of the layers that all networks share.
        per_op_EO: Cost of every op, float64; NaN where a block does not offer it.
    """

    unit: str
    fixed: float
    per_op_EO: Tensor

    @property
    def lowest(self) -> float:
        """Cost of the cheapest network."""
        return self.fixed + self.per_op_EO.nan_to_num(math.inf).amin(dim=-1).sum().item()

    @property
    def highest(self) -> float:
        """Cost of the most expensive network."""
        return self.fixed + self.per_op_EO.nan_to_num(-math.inf).amax(dim=-1).sum().item()

    def expected(self, probabilities_EO: Tensor) -> Tensor:
        """Return ``fixed + sum p * cost`` (section 3.3), differentiable in the probabilities.

        Those of B records, [B, E, O], give [B].
        """
        per_op_EO = self.per_op_EO.nan_to_num(0.0).to(probabilities_EO)
        return self.fixed + (probabilities_EO * per_op_EO).sum((-2, -1))

    def of_path(self, path: Sequence[int]) -> float:
        """Return the cost of the network with one op per block, given by column."""
        per_op = self.per_op_EO.tolist()
        chosen = (row[op] for row, op in zip(per_op, path, strict=True))
        return math.fsum([self.fixed, *chosen])


def sum_costs(
    *,
    unit: str,
    fixed: Iterable[L],
    blocks: Iterable[Sequence[L | None]],
    cost_of: Callable[[L], float],
) -> Costs:
    """Return the costs of a supernet.

    Args:
        unit: Of ``cost_of``.
        fixed: The layers that all networks share.
        blocks: For each block the layer of every op; None where it does not offer the op.
        cost_of: Cost of a layer, a finite number.
    """
    if unit not in UNITS:
        raise unknown_choice("unit", unit, UNITS)
    rows = [[math.nan if layer is None else cost_of(layer) for layer in row] for row in blocks]
    per_op_EO = torch.tensor(rows, dtype=torch.float64)
    return Costs(unit, math.fsum(cost_of(layer) for layer in fixed), per_op_EO)


@dataclass(frozen=True)
class HardwareLoss:
    """A loss of a network's task loss CE and its expected cost E, with a target T.

    ``multiplicative``: ``CE * scale * (log E / log T) ** exponent`` (MnasNet's form as in
    ProxylessNAS' public code). ``additive``: ``CE + scale * (E - T) / T`` (divided by T so that
    ``scale`` has no unit).

    Attributes:
        costs: Of the supernet.
        target: T, in the unit of the costs.
        unit: The unit of ``target``; must be that of the costs.
        form: One of ``LOSSES``.
        scale: ``a`` of the multiplicative form, ``lambda`` of the additive one.
        exponent: ``b`` of the multiplicative form.

    Raises:
        ConfigError: When the unit differs, no network can reach the target, or logarithms of the
            multiplicative form would not be positive.
    """

    costs: Costs
    target: float
    unit: str
    form: str
    scale: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        """Check the unit and the range."""
        costs = self.costs
        if self.form not in LOSSES:
            raise unknown_choice("hardware.loss", self.form, LOSSES)
        if self.unit != costs.unit:
            raise ConfigError(
                f"hardware.unit={self.unit}, but the costs are in {costs.unit}: give the target in "
                f"{costs.unit}, from {costs.lowest:.4g} to {costs.highest:.4g}."
            )
        if not costs.lowest <= self.target <= costs.highest:
            raise ConfigError(
                f"hardware.target={self.target:g} {self.unit} cannot be reached: networks of this "
                f"space cost {costs.lowest:.4g} to {costs.highest:.4g} {self.unit}."
            )
        if self.form == "multiplicative" and costs.lowest <= 1:
            raise ConfigError(
                f"hardware.loss=multiplicative needs costs above 1 {self.unit}, of which it takes "
                f"logarithms, but networks cost {costs.lowest:.4g} {self.unit} on: set "
                "hardware.loss=additive, or measure larger batches."
            )

    def __call__(self, task_loss: Tensor, cost: Tensor) -> Tensor:
        """Return the loss."""
        if self.form == "multiplicative":
            return task_loss * self.scale * (cost.log() / math.log(self.target)) ** self.exponent
        return task_loss + self.scale * (cost - self.target) / self.target


@dataclass(frozen=True)
class HardwareTerms:
    """A :class:`HardwareLoss` as plain values, as it travels to clients.

    Attributes:
        fixed: Cost of the layers that all networks share.
        per_op: Cost of every op of every block; None where a block does not offer it.
        target: See :class:`HardwareLoss`, as the others.
    """

    target: float
    unit: str
    form: str
    scale: float
    exponent: float
    fixed: float
    per_op: list[list[float | None]]

    @classmethod
    def of(cls, loss: HardwareLoss) -> HardwareTerms:
        """Return the plain values of a loss; :meth:`loss` makes it again."""
        costs = loss.costs
        per_op = [[None if math.isnan(c) else c for c in row] for row in costs.per_op_EO.tolist()]
        terms = (loss.target, loss.unit, loss.form, loss.scale, loss.exponent)
        return cls(*terms, costs.fixed, per_op)

    def loss(self) -> HardwareLoss:
        """Return the loss.

        Raises:
            ConfigError: :class:`HardwareLoss` refuses it.
        """
        rows = [[math.nan if c is None else c for c in row] for row in self.per_op]
        costs = Costs(self.unit, self.fixed, torch.tensor(rows, dtype=torch.float64))
        terms = (self.target, self.unit, self.form, self.scale, self.exponent)
        return HardwareLoss(costs, *terms)


def count_parameters(network: nn.Module) -> int:
    """Return the number of elements of all parameters; buffers are not parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def count_multiply_adds(network: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the multiply-adds of one example of ``input_shape`` in evaluation mode.

    torch counts 2 operations per multiply-add and none for pooling, norms and activations; the
    papers count multiply-adds of convolutions and dense layers, which is half of torch's number.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton: a second

    was_training = network.training
    network.eval()
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *input_shape, device=device))
    network.train(was_training)
    flops: int = counter.get_total_flops()
    return flops // 2
