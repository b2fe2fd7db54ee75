"""The interface of every search space, and the supernet that all of them share.

A space is a frozen dataclass of its sizes, a :class:`SearchSpace`. Its relaxed network is a
:class:`Supernet`: the architecture parameters (alphas) and a body that holds all weights. A new
space implements a body and a discrete network; the conversions between alphas and genotypes are
here.

Tensor suffixes: B batch, E edges of a cell, O ops.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.settings import names, optimizers, parser, registry
from fednas_flwr.spaces.cell_graph import has_weights, nearest_trained
from fednas_flwr.spaces.genotype import Edge, Genotype, arrows
from fednas_flwr.spaces.operations import OpWeights, SkipNetwork, zeroed

ALPHA_STD = 1e-3
CELL = "cell"  # the kind of cell, if there is only one
AXES = {"images": ("channels", "height", "width"), "tables": ("features",)}


class Alphas(nn.ParameterDict):
    """The architecture parameters: one tensor [edges, ops] per kind of cell.

    Calling it returns them by kind. It is a module, so that they are in the state_dict
    (``alphas.<kind>``) and can be replaced in ``torch.func.functional_call`` like any parameter.
    """

    def __call__(self) -> dict[str, nn.Parameter]:  # type: ignore[override]
        """Return the alphas by kind of cell."""
        return dict(self.items())


class Supernet(nn.Module):
    """A network in which every edge is the weighted sum of all its ops (Liu et al. 2019, Eq. 2).

    Attributes:
        alphas: ``supernet.alphas()`` returns the architecture parameters by kind of cell.
        body: Everything else; called with images and the op weights, returns logits.
    """

    def __init__(self, body: SkipNetwork, *, num_edges: Mapping[str, int], num_ops: int) -> None:
        """Combine a body with alphas, ``1e-3 * randn`` from torch's global generator.

        Args:
            body: Module with ``forward(x, op_weights)``.
            num_edges: Number of edges per kind of cell.
            num_ops: Number of ops per edge.
        """
        super().__init__()
        self.body = body
        alphas = {k: torch.empty(edges, num_ops) for k, edges in num_edges.items()}
        for alpha in alphas.values():
            if not alpha.is_meta:  # for meta, torch would import its compiler, which takes 1 s
                alpha.copy_(ALPHA_STD * torch.randn(alpha.shape))
        self.alphas = Alphas(alphas)

    @property
    def takes_stack(self) -> bool:
        """True if the body's weights are joined by ``base.layers.stacked``."""
        return self.body.takes_stack

    def weights(self) -> dict[str, nn.Parameter]:
        """Return all parameters but the alphas, by their names in the state_dict."""
        return dict(self.body.named_parameters(prefix="body"))

    def path_weights(self, path: Sequence[int]) -> dict[str, nn.Parameter]:
        """Return the weights with which a path computes: its ops' and those that all paths share.

        Args:
            path: The column of the op of every edge, or block; the same in every cell.
        """
        choices = self.body.choices()
        chosen = [edge.op(column) for edge, column in zip(choices, cycle(path), strict=False)]
        along = {id(weight) for op in chosen if op is not None for weight in op.parameters()}
        beside = {id(weight) for edge in choices for weight in edge.parameters()} - along
        return {name: w for name, w in self.weights().items() if id(w) not in beside}

    def forward(self, x: Tensor, op_weights: OpWeights = None) -> Tensor:
        """Return the logits [B, classes].

        Args:
            x: Examples [B, ...].
            op_weights: For each kind of cell, the weight of every op on every edge, [E, O], or one
                set per example, [B, E, O], which allows per-example gradients of the alphas; None
                means ``softmax(alphas)``.
        """
        if op_weights is None:
            op_weights = {kind: alphas.softmax(dim=-1) for kind, alphas in self.alphas().items()}
        return self.body(x, op_weights)


@dataclass(frozen=True, kw_only=True)
class SearchSpace(parser.Checked):
    """A set of architectures, with its relaxation, its discrete networks and the way between them.

    By default a network has one op on each edge of each kind of cell. A space defines the class
    variables, :meth:`body` and :meth:`discrete`.

    Attributes:
        name: The name by which users choose the space; also the ``space`` of its genotypes.
        inputs: Kind of examples, a key of ``AXES``.
        ops: Names of the candidate ops, in the order of a row of alphas.
        kinds: Kinds of cell.
        edges: (source, target) of the edges of a cell with alphas.
        routes: Routes through the cell, as positions of edges; there is something to train only if
            some op on a route has weights. None if every edge is a route.
        has_auxiliary: True if networks can have a second classifier.
        input_shape: Shape of one example.
        num_classes: Number of classes.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
        skip: Addition to the logits of every network: ``none``, or the logits of a ``linear``
            classifier on the input, which begins with zeros.
        own_ops: Names of further ops that users have registered; they follow ``ops``.
    """

    name: ClassVar[str]
    inputs: ClassVar[str] = "images"
    ops: ClassVar[tuple[str, ...]]
    kinds: ClassVar[tuple[str, ...]] = (CELL,)
    edges: ClassVar[tuple[tuple[int, int], ...]]
    routes: ClassVar[Sequence[Sequence[int]] | None] = None
    has_auxiliary: ClassVar[bool] = False

    input_shape: tuple[int, ...]
    num_classes: optimizers.Count
    norm: Annotated[names.Norm, parser.OneOf(names.NORMS)] = names.BATCH
    skip: Annotated[str, parser.OneOf(names.SKIPS)] = names.NO_SKIP
    own_ops: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse examples for which no network can be built, and ops that do not exist."""
        for op in self.own_ops:
            if op in self.ops or op not in registry.TABLES["op"]:
                raise ConfigError(
                    f"search_space.own_ops={show(op)} must be the name of an op that register_op "
                    f"has been given (fednas run --with <file>), and none of {', '.join(self.ops)}."
                )
        object.__setattr__(self, "ops", (*self.ops, *self.own_ops))
        super().__post_init__()
        axes = AXES[self.inputs]
        if len(self.input_shape) != len(axes) or min(self.input_shape) < 1:
            other = {1: "; of a table take search_space=mlp_small", 3: "; of images, darts_small"}
            raise ConfigError(
                f"search_space={self.name} needs {self.inputs} of shape ({', '.join(axes)}), but "
                f"the data set's examples have the shape {tuple(self.input_shape)}"
                f"{other.get(len(self.input_shape), '')}."
            )

    @property
    def outputs(self) -> range:
        """The nodes of which a cell's output consists; by default only the last."""
        last = self.edges[-1][1]
        return range(last, last + 1)

    def body(self) -> SkipNetwork:
        """Build the newly initialised body of the supernet."""
        raise NotImplementedError

    def discrete(self, genotype: Genotype, *, auxiliary: bool) -> SkipNetwork:
        """Build the newly initialised network of a genotype of this space, which has been checked.

        ``auxiliary`` is False for spaces without such a head.
        """
        raise NotImplementedError

    @property
    def cell_kinds(self) -> dict[str, int]:
        """Number of edges with alphas per kind of cell."""
        return dict.fromkeys(self.kinds, len(self.edges))

    @property
    def offered(self) -> list[list[int]]:
        """The columns of the ops that each edge offers."""
        return [list(range(len(self.ops)))] * len(self.edges)

    def supernet(self) -> Supernet:
        """Build a newly initialised supernet; draws from torch's global generator."""
        body = self._with_skip(self.body())
        return Supernet(body, num_edges=self.cell_kinds, num_ops=len(self.ops))

    def network(self, genotype: Genotype, *, auxiliary: bool = False) -> SkipNetwork:
        """Build a newly initialised discrete network with the space's sizes, to be trained.

        Its forward returns logits or, in train mode with an auxiliary head, a pair of logits and
        auxiliary logits. A trainer sets its attribute ``drop_path_prob``. Its method ``chain()``
        returns the modules that compute one after the other, from the stem to the last cell.

        Args:
            genotype: Genotype of the network.
            auxiliary: True if a second classifier is added.

        Raises:
            ConfigError: The genotype is not of this space, or it has no auxiliary head.
        """
        self.check(genotype)
        if auxiliary and not self.has_auxiliary:
            raise ConfigError(
                f"{self.name} networks have no auxiliary head: set retrain.auxiliary_weight=0."
            )
        return self._with_skip(self.discrete(genotype, auxiliary=auxiliary))

    def derive(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the architecture that the alphas represent, which is never degenerate.

        If the result of :meth:`likeliest` is degenerate, it is replaced by the most likely ops that
        are not (``cell_graph.nearest_trained``).

        Raises:
            ValueError: Kinds or shapes are wrong, or an alpha is not finite.
        """
        if set(alphas) != set(self.kinds):
            raise ValueError(f"expected alphas for {sorted(self.kinds)}, got {sorted(alphas)}")
        expected = (len(self.edges), len(self.ops))
        for kind in self.kinds:
            if (shape := tuple(alphas[kind].shape)) != expected:
                raise ValueError(f"expected alphas of shape {expected} for {kind}, got {shape}")
            if not bool(torch.isfinite(alphas[kind]).all()):
                raise ValueError(f"alphas of {kind} are not all finite")
        genotype = self.likeliest(alphas)
        return self._nearest(genotype, alphas) if self.is_degenerate(genotype) else genotype

    def likeliest(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the genotype with the largest alpha's op on every edge; ties go to the lowest."""
        # max() keeps the first of equals, which torch.argmax does not guarantee.
        pairs = zip(alphas[self.kinds[0]].detach().tolist(), self.offered, strict=True)
        return self.genotype(max(columns, key=row.__getitem__) for row, columns in pairs)

    def random_genotype(self, generator: torch.Generator) -> Genotype:
        """Draw a genotype uniformly from those that :meth:`derive` can return."""
        while self.is_degenerate(genotype := self.draw(generator)):
            pass
        return genotype

    def draw(self, generator: torch.Generator) -> Genotype:
        """Draw a genotype uniformly; it may be degenerate."""
        return self.genotype(
            columns[int(torch.randint(len(columns), (), generator=generator))]
            for columns in self.offered
        )

    def is_degenerate(self, genotype: Genotype) -> bool:
        """Return True if nothing in the cells can be trained, see ``cell_graph``."""
        cells = genotype.cells.values()
        return not any(has_weights(edges, outputs=self.outputs) for edges in cells)

    def genotype(self, path: Iterable[int]) -> Genotype:
        """Build the genotype with these ops, given by column, on the edges of the only cell."""
        edges = (Edge(self.ops[op], *edge) for op, edge in zip(path, self.edges, strict=True))
        return Genotype(space=self.name, cells={self.kinds[0]: tuple(edges)})

    def path(self, genotype: Genotype) -> list[int]:
        """Return the column of the op on every edge of the only cell; raises like :meth:`check`."""
        self.check(genotype)
        return [self.ops.index(edge.op) for edge in genotype.cells[self.kinds[0]]]

    def check(self, genotype: Genotype) -> None:
        """Raise ConfigError unless the genotype belongs to this space, in its canonical order.

        Degenerate ones do belong: a user may train one.
        """
        if genotype.space != self.name:
            raise ConfigError(
                f"the genotype's space is {show(genotype.space)!r}, but search_space={self.name}: "
                "choose the search space that it was found in."
            )
        if set(genotype.cells) != set(self.kinds):
            raise ConfigError(
                f"a {self.name} genotype has the cells {sorted(self.kinds)}, got "
                f"{show(', '.join(sorted(genotype.cells)))}."
            )
        for kind, edges in genotype.cells.items():
            self.check_cell(kind, edges)

    def check_cell(self, kind: str, edges: Sequence[Edge]) -> None:
        """Raise ConfigError unless a cell has one op on each edge, in order."""
        self._check_ops(kind, edges, self.ops)
        pairs = tuple(edge.pair for edge in edges)
        if pairs != self.edges:
            raise ConfigError(
                f"cell {kind!r}: the edges {arrows(self.edges)} are needed in this order; got "
                f"{arrows(pairs)}."
            )

    def _check_ops(self, kind: str, edges: Sequence[Edge], ops: Sequence[str]) -> None:
        """Raise ConfigError unless every edge's op is one of ``ops``."""
        for edge in edges:
            if edge.op not in ops:
                raise ConfigError(
                    f"cell {kind!r}: edge {edge.source} -> {edge.target} has the unknown op "
                    f"{show(edge.op)!r}, expected one of {', '.join(ops)}."
                )

    def _nearest(self, genotype: Genotype, alphas: Mapping[str, Tensor]) -> Genotype:
        """Replace ops of a degenerate genotype by the likeliest that are not degenerate."""
        places = [(kind, edge) for kind, edges in genotype.cells.items() for edge in edges]
        rows = {kind: alphas_EO.detach().tolist() for kind, alphas_EO in alphas.items()}
        path = nearest_trained(
            [rows[kind][self.edges.index(edge.pair)] for kind, edge in places],
            [self.ops.index(edge.op) for _, edge in places],
            ops=self.ops,
            routes=self.routes or [[place] for place in range(len(places))],
        )
        cells: dict[str, tuple[Edge, ...]] = dict.fromkeys(genotype.cells, ())
        for (kind, edge), op in zip(places, path, strict=True):
            cells[kind] += (replace(edge, op=self.ops[op]),)
        return replace(genotype, cells=cells)

    def _with_skip(self, network: SkipNetwork) -> SkipNetwork:
        """Put the space's skip into a network."""
        if self.skip == names.LINEAR:
            sizes = (math.prod(self.input_shape), self.num_classes)
            empty = nn.Linear(*sizes, device="meta")  # draws nothing: all else stays the same
            network.skip = zeroed(empty.to_empty(device=torch.get_default_device()))
        return network
