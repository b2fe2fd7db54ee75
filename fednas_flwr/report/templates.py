"""Templates of ``page/``: HTML and Markdown, in which every value is escaped.

Text of a template stands as it is; what ``render`` puts in is escaped by jinja in ``.html.j2`` and
by :func:`~fednas_flwr.base.foreign.markdown` in ``.md.j2``, unless it is ``Markup``. In Markdown no
filter may join texts: jinja's ``join`` escapes for HTML.
"""

import json
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fednas_flwr.base.foreign import markdown


def render(name: str, **context: object) -> str:
    """Fill a template of ``page/`` in."""
    finalize = _markdown if name.endswith(".md.j2") else None
    return (
        _environment(autoescape=True, finalize=finalize)
        .from_string(read_part(name))
        .render(context)
    )


def macro(name: str, sentence: str, **values: object) -> str:
    """Fill one macro of a template in, as one line of text that is not yet escaped."""
    module = _environment(autoescape=False).from_string(read_part(name)).module
    return " ".join(str(getattr(module, sentence)(**values)).split())


def _environment(**options: Any) -> Environment:
    return Environment(undefined=StrictUndefined, trim_blocks=True, **options)  # noqa: S701


def read_part(name: str) -> str:
    """Read a file of ``page/``: template, style or script."""
    return (resources.files("fednas_flwr.report") / "page" / name).read_text(encoding="utf-8")


def as_json(value: object) -> Markup:
    """Write JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _markdown(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(value))
