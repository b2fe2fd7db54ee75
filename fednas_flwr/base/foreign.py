"""Untrusted text and files: from clients, from other people's runs, from a site's settings.

Text goes into a file through the function for its format: :func:`markdown`, :func:`terminal` or
:func:`csv_cell` (HTML and SVG are escaped by jinja's autoescape and ``html.escape``). YAML and JSON
are read only by :func:`read_yaml` and :func:`load_json`: without interpolation, and with limits on
size, depth, and nodes that aliases multiply.
"""

import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from copy import deepcopy
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import yaml

from fednas_flwr.base.errors import ConfigError, show

LARGEST_BYTES = 2**21  # of a YAML file
MOST_NODES = 50_000  # of a YAML file; an alias counts as all nodes that it stands for
DEEPEST = 50  # levels of YAML and JSON
_NESTED = (dict, list, tuple)
_MARKDOWN = re.compile(
    r"&#\d+;|[\\`*\[\]<>|~$@#&]|(?<![^\W_])_|_(?![^\W_])"
    r"|:(?=//)|(?<=mailto):|(?<=xmpp):|(?<=www)\.",
    re.IGNORECASE,
)
_FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # first characters of formulas in spreadsheets


def terminal(text: object) -> str:
    r"""Return one line in which every character prints as itself.

    White space becomes a blank. Characters that would move the cursor, change colours or turn the
    direction of writing become escape sequences of Python, such as ``\x1b``.
    """
    shown = (c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in str(text))
    return "".join(shown)


def markdown(text: object) -> str:
    """Return one line that Markdown shows as it is: no markup, HTML, link or end of a table's cell.

    Special characters become numeric entities, which no dialect reads as markup. Applying it twice
    is the same as once.

    Example:
        >>> markdown("<b>[a|b](http://c.d)")
        '&#60;b&#62;&#91;a&#124;b&#93;(http&#58;//c.d)'
    """
    return _MARKDOWN.sub(
        lambda found: found[0] if found[0][1:] else f"&#{ord(found[0])};", terminal(text)
    )


def csv_cell(value: Any) -> Any:
    """Return a cell of a CSV file; text that a spreadsheet would compute gets an apostrophe.

    Numbers stay as they are, also those written as text, and so does a sign alone. A semicolon is
    also taken for a separator, as it is where a comma is the decimal point.
    """
    if not isinstance(value, str) or value in ("+", "-"):
        return value
    parts = value.split(";")
    return ";".join(f"'{p}" if p.startswith(_FORMULA) and not _is_number(p) else p for p in parts)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def load_json(text: str | bytes, **options: Any) -> Any:
    """Return the value in a JSON text; ``options`` are those of ``json.loads``.

    Raises:
        ValueError: The text is no JSON, or more than ``DEEPEST`` levels deep.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise _too_deep() from None
    _check_size(value)
    return value


def _check_size(value: Any, most: int | None = None) -> None:
    """Raise ValueError for a value of over ``DEEPEST`` levels, or of over ``most`` values."""
    number, level = 0, [value]
    for _ in range(DEEPEST + 1):
        nested = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, _NESTED)]
        if not nested:
            return
        level = list(islice(chain.from_iterable(nested), most))
        number += len(level)
        if most is not None and number >= most:
            raise ValueError(f"its aliases and values make more than {most:,} nodes")
    raise _too_deep()


def read_yaml(path: Path, what: str) -> Any:
    """Return the value in a YAML file; ``what`` begins the sentence of an error.

    Raises:
        ConfigError: The file cannot be read, or :func:`load_yaml` refuses it.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read: {error}.") from error
    return load_yaml(text, what)


def load_yaml(text: str, what: str) -> Any:
    """Return the value in a YAML text: plain values, without interpolation.

    ``1e-5`` is a number, ``${...}`` is text, and no key may occur twice.

    Raises:
        ConfigError: The text is not such YAML, or exceeds a limit.
    """
    try:
        if len(text) > LARGEST_BYTES:
            raise yaml.YAMLError(f"it has more than {LARGEST_BYTES:,} characters")
        value = deepcopy(_value_of(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = _too_deep() if isinstance(error, RecursionError) else error
        raise ConfigError(f"{what} is not valid YAML: {' '.join(str(reason).split())}.") from error
    return value


@lru_cache(maxsize=8)  # a run's configuration is read for each of its reports
def _value_of(text: str) -> Any:
    value = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    _check_size(value, MOST_NODES)
    return value


def dump_yaml(value: Any) -> str:
    """Return YAML from which :func:`load_yaml` reads the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def check_resolved(value: Any, key: str = "") -> None:
    """Refuse ``${...}`` in settings from elsewhere: it would read the user's own environment.

    A run writes resolved settings, which have none.
    """
    if isinstance(value, Mapping):
        value = value.items()
    elif isinstance(value, list):
        value = enumerate(value)
    elif isinstance(value, str) and "${" in value:
        raise ConfigError(f"{key or 'it'}={show(value)} is not resolved: write the value itself.")
    else:
        return
    for name, item in value:
        check_resolved(name)
        check_resolved(item, f"{key}.{name}".lstrip("."))


def _too_deep() -> ValueError:
    return ValueError(f"it is more than {DEEPEST} levels deep")


class _Dumper(yaml.SafeDumper):
    """SafeDumper that puts quotes around the text 1e-5."""


class _Loader(yaml.SafeLoader):
    """SafeLoader of decimal numbers only, such as 1e-5; refuses a key given twice, or by ``<<``.

    As in YAML 1.2 yes, no, on and off are texts; so are 010, 0x1F, 1_000 and 12:30, which may be
    codes.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse to merge mappings, which aliases could multiply without limit."""
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError(f"<< is not read: write the keys themselves{node.start_mark}")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping of a node."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            raise yaml.YAMLError(f"{twice[0]} is given twice{node.start_mark}")
        return super().construct_mapping(node, deep)


_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))
_DIGITS = list("-+0123456789")
_Dumper.add_implicit_resolver(_FLOAT, re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), _DIGITS)
_Loader.yaml_implicit_resolvers = {
    sign: [(tag, form) for tag, form in known if tag not in (_BOOL, _INT, _FLOAT)]
    for sign, known in _Loader.yaml_implicit_resolvers.items()
}
_NUMBER = r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.inf$|^\.nan$"
_Loader.add_implicit_resolver(_FLOAT, re.compile(_NUMBER), [*_DIGITS, "."])
_Loader.add_implicit_resolver(_BOOL, re.compile("^([Tt]rue|TRUE|[Ff]alse|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_INT, re.compile("^[-+]?(0|[1-9][0-9]*)$"), _DIGITS)
