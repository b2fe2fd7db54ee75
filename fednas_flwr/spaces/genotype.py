"""A discrete architecture as data: the result of a search and the start of retraining.

A :class:`Genotype` names its search space and lists the edges of each kind of cell. It is stored
and sent as JSON with a format name and a version, and never evaluated as code. This file checks the
form (:func:`from_json`); a space's ``check`` decides if the ops and edges belong to it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fednas_flwr.base.errors import ConfigError, MissingSettingError, show
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import load_json
from fednas_flwr.settings.parser import parse

FORMAT = "fednas-genotype"
VERSION = 1
SKIP = "skip_connect"  # name of the identity in every space of cells
SHOWN = 20  # most edges shown in a message


@dataclass(frozen=True)
class Edge:
    """One operation of a cell.

    Attributes:
        op: Name of the operation, as in its search space.
        source: Index of the node that it reads.
        target: Index of the node to which it is added; larger than ``source``.
    """

    op: str
    source: int
    target: int

    @property
    def pair(self) -> tuple[int, int]:
        """Source and target."""
        return self.source, self.target


@dataclass(frozen=True)
class Genotype:
    """A discrete architecture.

    Attributes:
        space: Name of the search space.
        cells: The edges of each kind of cell, ordered by target, then by source.
    """

    space: str
    cells: dict[str, tuple[Edge, ...]]


def skip_share(genotype: Genotype) -> float:
    """Return the fraction of all edges that are skip connections, in [0, 1].

    A share that rises while searching is the known collapse of DARTS (Zela et al. 2020,
    arXiv 1909.09656). Edges with the op ``none`` count as edges; without edges the share is 0.

    Example:
        >>> skip_share(Genotype("x", {"cell": (Edge("skip_connect", 0, 1), Edge("none", 0, 2))}))
        0.5
    """
    ops = [edge.op for edges in genotype.cells.values() for edge in edges]
    return ops.count(SKIP) / len(ops) if ops else 0.0


def arrows(pairs: Sequence[tuple[int, int]]) -> str:
    """Return edges as text for a message, the first twenty of them.

    Example:
        >>> arrows([(0, 1), (0, 2)])
        '0 -> 1, 0 -> 2'
    """
    text = ", ".join(f"{source} -> {target}" for source, target in pairs[:SHOWN])
    more = f", ... ({len(pairs)} edges)" if len(pairs) > SHOWN else ""
    return f"{text}{more}" or "no edges"


def to_json(genotype: Genotype) -> str:
    """Return the genotype as indented JSON; :func:`from_json` gives an equal one back."""
    return json.dumps({"format": FORMAT, "version": VERSION, **asdict(genotype)}, indent=2) + "\n"


def from_json(text: str, *, origin: str = "genotype") -> Genotype:
    """Return the genotype in ``text``.

    Args:
        text: JSON as written by :func:`to_json`.
        origin: Name of the text in error messages, e.g. the path of its file.

    Raises:
        ConfigError: The text is not JSON, has another format or version, or a field is missing,
            unknown, duplicated or of the wrong type; the message names the field and value.
    """
    hint = "; a newer file needs a newer fednas_flwr"
    about = read_document(text, origin=origin, format=FORMAT, version=VERSION, hint=hint)
    try:
        genotype: Genotype = parse(Genotype, about, key=f"{origin}: genotype")
    except MissingSettingError as error:
        raise ConfigError(f"{error.key} is missing.") from None
    for kind, edges in genotype.cells.items():
        for index, edge in enumerate(edges):
            if not 0 <= edge.source < edge.target:
                where = f"{origin}: genotype.cells.{kind}[{index}]"
                pair = f"{edge.source} and {edge.target}"
                raise ConfigError(f"{where}: 0 <= source < target must hold, got {pair}.")
    return genotype


def read_document(
    text: str, *, origin: str, format: str, version: int, hint: str
) -> dict[str, Any]:
    """Return the fields of a JSON document that begins with its format and version.

    Raises:
        ConfigError: The text is not JSON, a field is duplicated, or it has another format or
            version; the message about the version ends with ``hint``.
    """
    try:
        document = load_json(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise ConfigError(f"{origin} is not valid JSON: {error}.") from error
    fields = document if isinstance(document, dict) else {"format": document}
    for field, expected, advice in (("format", format, ""), ("version", version, hint)):
        value = fields.pop(field, None)
        if value != expected or isinstance(value, bool):
            raise ConfigError(f"{origin}: {field} must be {expected!r}, got {show(value)}{advice}.")
    return fields


def save_genotype(path: Path, genotype: Genotype) -> None:
    """Write the genotype to ``path`` atomically: a crash leaves either the old or the new file."""
    write_atomically(path, to_json(genotype))


def load_genotype(path: Path) -> Genotype:
    """Return the genotype stored in ``path``.

    Raises:
        ConfigError: The file cannot be read, or :func:`from_json` refuses its text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"genotype={path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"genotype={path} is not a UTF-8 text file of JSON.") from error
    return from_json(text, origin=str(path))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the JSON object; refuse duplicate keys, of which json silently keeps the last."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the field {key!r} appears twice")
        result[key] = value
    return result
