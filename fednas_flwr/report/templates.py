"""Templates of ``page/``: HTML, Markdown and sentences, in which every value is escaped.

Text of a template stands as it is; what ``render`` puts in is escaped by jinja in ``.html.j2`` and
by :func:`~fednas_flwr.base.foreign.markdown` in ``.md.j2``, unless it is ``Markup``. In Markdown no
filter may join texts: jinja's ``join`` escapes for HTML. Templates say the macros of
``sentences.j2`` by ``sentence``, as text that is escaped where it is put in.
"""

import json
import re
import shlex
from collections import Counter
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fednas_flwr.base.foreign import markdown
from fednas_flwr.report import quantities
from fednas_flwr.runs.numbers import largest, overall
from fednas_flwr.settings.names import QUANTILES

FORMATS = {  # filters
    "count": quantities.count,
    "percent": quantities.percent,
    "duration": quantities.duration,
    "num_bytes": quantities.num_bytes,
    "epsilon": quantities.epsilon_text,
    "as_unit": quantities.as_unit,
    "literal": lambda value: json.dumps(value, ensure_ascii=False),
    "shell_word": shlex.quote,
    "score": quantities.score,
    "largest": largest,
    "counted": lambda values: Counter(values).most_common(),
    "summed": lambda events, key: sum(event.get(key) or 0 for event in events),
    "figures": lambda value, number: quantities.DASH if value is None else f"{value:.{number}g}",
    "total": lambda parts: sum(parts.values() if isinstance(parts, dict) else parts),
}


def render(name: str, **context: object) -> str:
    """Fill a template of ``page/`` in."""
    finalize = _markdown if name.endswith(".md.j2") else None
    environment = _environment(autoescape=True, finalize=finalize)
    environment.globals |= {"sentence": sentence, "paragraphs": paragraphs}
    return environment.from_string(read_part(name)).render(context)


def paragraphs(name: str, *values: object) -> list[str]:
    """Fill one macro of ``sentences.j2`` in: a line of text for each of its paragraphs."""
    text = str(getattr(_sentences(), name)(*values))
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentence(name: str, *values: object) -> str:
    """Fill one macro of ``sentences.j2`` in, as one line of text that is not yet escaped."""
    return " ".join(paragraphs(name, *values))


@cache
def _sentences() -> Any:
    environment = _environment(autoescape=False, finalize=_one_line)  # no word begins a paragraph
    return environment.from_string(read_part("sentences.j2")).module


def _environment(**options: Any) -> Environment:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, **options)  # noqa: S701
    environment.filters |= FORMATS
    environment.globals |= {"DASH": quantities.DASH, "QUANTILES": QUANTILES, "overall": overall}
    return environment


def read_part(name: str) -> str:
    """Read a file of ``page/``: template, style or script."""
    return (resources.files("fednas_flwr.report") / "page" / name).read_text(encoding="utf-8")


def as_json(value: object) -> Markup:
    """Write JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _markdown(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(value))
