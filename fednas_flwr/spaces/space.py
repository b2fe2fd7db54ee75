"""Interface of every search space, and the supernet that all of them share.

A space is a frozen dataclass of its sizes that fulfils :class:`SearchSpace`. Its relaxed network is
a :class:`Supernet`: the architecture parameters (alphas) beside a body that holds all weights. A
new space writes a body, a discrete network and the way from alphas to a genotype.

Tensor suffixes: B batch, E edges of a cell, O ops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.base.layers import Stack
from fednas_flwr.settings.names import BATCH, LINEAR, NO_SKIP, SKIPS, Norm
from fednas_flwr.spaces.genotype import Edge, Genotype
from fednas_flwr.spaces.operations import Choice, SkipNetwork, check_norm

ALPHA_STD = 1e-3
Network = TypeVar("Network", bound=SkipNetwork)
AXES = {"images": ("channels", "height", "width"), "tables": ("features",)}


class Alphas(nn.Module):
    """The architecture parameters: one tensor [edges, ops] per kind of cell, ``1e-3 * randn``.

    Calling it returns them by kind. A module of its own, so that they are in the state_dict
    (``alphas.<kind>``) and can be exchanged by ``torch.func.functional_call`` like any parameter.
    """

    def __init__(self, num_edges: Mapping[str, int], *, num_ops: int) -> None:
        """Draw the alphas from torch's global generator."""
        super().__init__()
        for kind, edges in num_edges.items():
            alphas_EO = ALPHA_STD * torch.randn(edges, num_ops)
            self.register_parameter(kind, nn.Parameter(alphas_EO))

    def __call__(self) -> dict[str, nn.Parameter]:
        """Return the alphas by kind of cell."""
        return dict(self.named_parameters())


class Supernet(nn.Module):
    """A network in which every edge is the weighted sum of all its ops (Liu et al. 2019, Eq. 2).

    Attributes:
        alphas: ``supernet.alphas()`` returns the architecture parameters by kind of cell.
        body: Everything else; called with images and the op weights, returns logits.
    """

    def __init__(self, body: nn.Module, *, num_edges: Mapping[str, int], num_ops: int) -> None:
        """Put alphas beside a body.

        Args:
            body: Module with ``forward(x, op_weights)``; with an attribute ``takes_stack`` that is
                true, ``forward(x, op_weights, stack)``.
            num_edges: Number of edges per kind of cell.
            num_ops: Number of ops per edge.
        """
        super().__init__()
        self.body = body
        self.alphas = Alphas(num_edges, num_ops=num_ops)

    @property
    def takes_stack(self) -> bool:
        """True if the weights can be given per record."""
        return getattr(self.body, "takes_stack", False)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return all parameters but the alphas, by their names in the state_dict."""
        return dict(self.body.named_parameters(prefix="body"))

    def path_weights(self, path: Sequence[int]) -> dict[str, nn.Parameter]:
        """Return the weights that one path computes with: its ops' and those that all paths share.

        Args:
            path: For every edge, or block, the column of its op; the same in every cell.
        """
        choices: list[Choice] = self.body.choices()  # type: ignore[operator]
        chosen = [edge.op(column) for edge, column in zip(choices, cycle(path), strict=False)]
        along = {id(weight) for op in chosen if op is not None for weight in op.parameters()}
        beside = {id(weight) for edge in choices for weight in edge.parameters()} - along
        return {name: w for name, w in self.weights().items() if id(w) not in beside}

    def forward(
        self,
        x: Tensor,
        op_weights: Mapping[str, Tensor] | None = None,
        stack: Stack | None = None,
    ) -> Tensor:
        """Return the logits [B, classes].

        Args:
            x: Examples [B, ...].
            op_weights: Per kind of cell the weight of every op on every edge, [E, O], or one
                set per example, [B, E, O], through which per-example gradients of the alphas
                can be taken; None means ``softmax(alphas)``.
            stack: How the weights of parallel layers are joined; through it per-example gradients
                of the weights can be taken (``privacy.mechanism.record_gradients``).
        """
        if op_weights is None:
            op_weights = {kind: alphas.softmax(dim=-1) for kind, alphas in self.alphas().items()}
        logits: Tensor = self.body(x, op_weights, *([] if stack is None else [stack]))
        return logits


class SearchSpace(Protocol):
    """A set of architectures: its relaxation, its discrete networks and the way between them."""

    @property
    def name(self) -> str:
        """The name users choose the space by; the ``space`` of its genotypes."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the candidate ops, in the order of an alpha row."""

    @property
    def cell_kinds(self) -> dict[str, int]:
        """Number of edges with alphas per kind of cell."""

    def supernet(self) -> Supernet:
        """Return a newly initialised supernet; draws from torch's global generator."""

    def derive(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the architecture that the alphas stand for; ties go to the lowest index.

        It is never degenerate.
        """

    def random_genotype(self, generator: torch.Generator) -> Genotype:
        """Return a genotype drawn uniformly from those that ``derive`` can return."""

    def is_degenerate(self, genotype: Genotype) -> bool:
        """Return whether nothing in the cells can be trained, see ``degenerate``."""

    def check(self, genotype: Genotype) -> None:
        """Raise ConfigError unless the genotype belongs to this space, in its canonical order.

        Degenerate ones do: a user may train one.
        """

    def network(self, genotype: Genotype, *, auxiliary: bool = False) -> nn.Module:
        """Return the newly initialised discrete network of the space's sizes, to be trained.

        Its forward returns logits; in train mode with an auxiliary head a pair, logits and
        auxiliary logits. A trainer sets its attribute ``drop_path_prob``. Its method ``chain()``
        returns the modules that compute one after the other, from the stem to the last cell.
        """


@dataclass(frozen=True, kw_only=True)
class SpaceShape:
    """Data and sizes that every search space of the package is made for.

    Attributes:
        input_shape: Of one example.
        num_classes: Number of classes.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
        skip: What is added to the logits of every network: ``none``, or those of a ``linear``
            classifier on the input, which begins with zeros.
    """

    name: ClassVar[str]
    inputs: ClassVar[str] = "images"  # one of AXES

    input_shape: tuple[int, ...]
    num_classes: int
    norm: Norm = BATCH
    skip: str = NO_SKIP

    def __post_init__(self) -> None:
        """Refuse examples for which no network can be built."""
        check_norm(self.norm)
        if self.skip not in SKIPS:
            raise unknown_choice("search_space.skip", self.skip, SKIPS)
        axes = AXES[self.inputs]
        if len(self.input_shape) != len(axes) or min(self.input_shape) < 1:
            other = {1: "; of a table take search_space=mlp_small", 3: "; of images, darts_small"}
            raise ConfigError(
                f"search_space={self.name} needs {self.inputs} of shape ({', '.join(axes)}), but "
                f"the data set's examples have the shape {tuple(self.input_shape)}"
                f"{other.get(len(self.input_shape), '')}."
            )
        self.check_sizes("num_classes")

    def with_skip(self, network: Network) -> Network:
        """Return the network, with the space's skip in it."""
        if self.skip == LINEAR:
            sizes = (math.prod(self.input_shape), self.num_classes)
            empty = nn.Linear(*sizes, device="meta")  # draws nothing: all else stays the same
            network.skip = empty.to_empty(device=torch.get_default_device())
            nn.init.zeros_(network.skip.weight)
            nn.init.zeros_(network.skip.bias)
        return network

    def check_auxiliary(self, auxiliary: bool) -> None:  # noqa: FBT001
        """Raise ConfigError if an auxiliary head is asked for, of a space without one."""
        if auxiliary:
            raise ConfigError(
                f"{self.name} networks have no auxiliary head: set retrain.auxiliary_weight=0."
            )

    def check_sizes(self, *fields: str) -> None:
        """Raise ConfigError for the first of some fields that is below 1."""
        for field in fields:
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, got {getattr(self, field)}.")


def check_alphas(
    alphas: Mapping[str, Tensor], *, num_edges: Mapping[str, int], num_ops: int
) -> None:
    """Raise ValueError unless there is one finite tensor [edges, ops] for every kind of cell."""
    if set(alphas) != set(num_edges):
        raise ValueError(f"expected alphas for {sorted(num_edges)}, got {sorted(alphas)}")
    for kind, edges in num_edges.items():
        if alphas[kind].shape != (edges, num_ops):
            shape = tuple(alphas[kind].shape)
            raise ValueError(f"expected alphas of shape {(edges, num_ops)} for {kind}, got {shape}")
        if not bool(torch.isfinite(alphas[kind]).all()):
            raise ValueError(f"alphas of {kind} are not all finite")


def check_cells(genotype: Genotype, *, space: str, kinds: Mapping[str, int]) -> None:
    """Raise ConfigError unless the genotype names this space and has exactly its kinds of cell."""
    if genotype.space != space:
        raise ConfigError(
            f"the genotype's space is {show(genotype.space)!r}, but search_space={space}: choose "
            "the search space that it was found in."
        )
    if set(genotype.cells) != set(kinds):
        raise ConfigError(
            f"a {space} genotype has the cells {sorted(kinds)}, got "
            f"{show(', '.join(sorted(genotype.cells)))}."
        )


def check_op(edge: Edge, *, kind: str, ops: tuple[str, ...]) -> None:
    """Raise ConfigError unless the edge's op is one of ``ops``."""
    if edge.op not in ops:
        raise ConfigError(
            f"cell {kind!r}: edge {edge.source} -> {edge.target} has the unknown op "
            f"{show(edge.op)!r}, "
            f"expected one of {', '.join(ops)}."
        )
