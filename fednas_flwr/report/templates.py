"""Templates of ``page/``: HTML and Markdown, in which every value is escaped.

Text of a template stands as it is; what a template puts in is escaped by jinja in ``.html.j2`` and
by :func:`~fednas_flwr.base.foreign.markdown` in ``.md.j2``, unless it is ``Markup``. In Markdown no
filter may join texts: jinja's ``join`` escapes for HTML.
"""

import json
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fednas_flwr.base.foreign import markdown


def render(name: str, **context: object) -> str:
    """Fill a template of ``page/`` in."""
    environment = Environment(
        autoescape=True,
        finalize=_markdown if name.endswith(".md.j2") else None,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.from_string(read_part(name)).render(context)


def read_part(name: str) -> str:
    """Read a file of ``page/``: template, style or script."""
    return (resources.files("fednas_flwr.report") / "page" / name).read_text(encoding="utf-8")


def as_json(value: object) -> Markup:
    """Write JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _markdown(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(value))
