"""Formats numbers for people, None as a dash, and fills in the templates of ``page/``.

Templates are HTML, Markdown and sentences. Text of a template stays as it is. Values inserted by
``render`` are escaped, unless they are ``Markup``: by jinja in ``.html.j2``, and by
:func:`~fednas_flwr.base.foreign.markdown` in ``.md.j2``. In Markdown no filter may join texts, as
jinja's ``join`` escapes for HTML. Templates call the macros of ``sentences.j2`` by ``sentence``,
whose text is escaped where it is inserted.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import ROUND_CEILING, Decimal
from functools import cache
from importlib import resources
from pathlib import PurePath
from statistics import fmean, stdev
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fednas_flwr.base.foreign import markdown
from fednas_flwr.base.shares import wilson
from fednas_flwr.runs.numbers import GUESSES, Unit, is_noised, largest, overall
from fednas_flwr.settings.names import QUANTILES

DASH = "–"


def count(value: float | None) -> str:
    """Return a count with at most three figures before its unit: ``3.35 M``, ``812``."""
    if value is None:
        return DASH
    if abs(value) < 1e4:
        return f"{value:.0f}"
    return _scaled(value, (" k", " M", " G", " T"))


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the ``QUANTILES`` of one value or more, each of them one of the values."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES]


def as_date(days: float) -> str:
    """Return a day since 1970 as ``2024-05-31``."""
    return str(date(1970, 1, 1) + timedelta(days=round(days)))


def percent(value: float | None) -> str:
    """Return a share of 1 in percent with one decimal: ``91.4 %``."""
    return DASH if value is None else f"{100 * value:z.1f} %"


def score(value: float | None) -> str:
    """Return an F1 with three decimals: ``0.914``.

    Example:
        >>> score(-0.0004)
        '0.000'
    """
    return DASH if value is None else f"{value:z.3f}"


def figures(value: float | None, number: int = 4) -> str:
    """Return a number with ``number`` significant figures, as ``12.34``."""
    return DASH if value is None else f"{value:.{number}g}"


def setting_text(value: Any) -> str:
    """Return a setting's value: ``1, 2`` for a list, a dash for None."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return DASH if value is None else str(value)


def num_bytes(value: float | None) -> str:
    """Return bytes in powers of 1000: ``12.3 MB``."""
    if value is None:
        return DASH
    return f"{value:.0f} B" if value < 1e3 else _scaled(value, (" kB", " MB", " GB", " TB"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """Return three figures with the unit, among powers of 1000, in which they are below 1000."""
    for unit in units:
        value /= 1e3
        if abs(float(f"{value:.3g}")) < 1e3:
            return f"{value:.3g}{unit}"
    return f"{value:.0f}{unit}"


def duration(seconds: float | None) -> str:
    """Return seconds as ``8.2 s``, ``3:05 min`` or ``2:10 h``."""
    if seconds is None:
        return DASH
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h"


def epsilon_text(epsilon: float | None) -> str:
    """Return an epsilon to three significant digits, rounded up; None is infinite, too.

    Example:
        >>> epsilon_text(3.1001)
        '3.11'
    """
    if epsilon is None or epsilon == math.inf:
        return "∞"
    exact = Decimal(repr(float(epsilon)))
    if not exact:
        return "0"
    return f"{exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), rounding=ROUND_CEILING):f}"


def mean_and_deviation(
    values: Sequence[float | None], *, scale: float = 1.0, decimals: int | None = None
) -> str:
    """Return ``mean ± standard deviation`` (n - 1) of the scaled values.

    One value has no deviation and stands alone; no value gives a dash. ``(2 of 3)`` follows if one
    of three values is None. Without ``decimals`` the mean has three significant digits.

    Example:
        >>> mean_and_deviation([0.90, 0.92], scale=100, decimals=1)
        '91.0 ± 1.4'
    """
    reached = [value for value in values if value is not None]
    if not reached:
        return DASH
    mean = scale * fmean(reached)
    if decimals is None:
        decimals = max(0, 2 - math.floor(math.log10(abs(mean)))) if mean else 0
    text = f"{mean:.{decimals}f}"
    if len(reached) > 1:
        text += f" ± {abs(scale) * stdev(reached):.{decimals}f}"
    return text if len(reached) == len(values) else f"{text} ({len(reached)} of {len(values)})"


@dataclass(frozen=True)
class Form:
    """The form of a unit's numbers for readers.

    Attributes:
        text: Function that writes one number.
        title: The unit at the head of a column of numbers, with the blank before it.
        scale: Factor of the numbers in such a column.
        decimals: Decimals of such numbers; None for three significant digits.
    """

    text: Callable[[float | None], str]
    title: str = ""
    scale: float = 1
    decimals: int | None = None


FORMS: dict[Unit, Form] = {
    "share": Form(percent, " (%)", scale=100, decimals=1),
    "score": Form(score, decimals=3),
    "error": Form(figures),
    "count": Form(count, " (k)", scale=1e-3),
    "seconds": Form(duration, " (s)"),
    "milliseconds": Form(lambda value: DASH if value is None else f"{value:.3g} ms", " (ms)"),
    "megabytes": Form(lambda value: num_bytes(None if value is None else value * 1e6), " (MB)"),
    "number": Form(count),
}


def as_unit(value: float | None, unit: Unit) -> str:
    """Return a number in the form of its unit."""
    return FORMS[unit].text(value)


TEX = str.maketrans({c: rf"\{c}" for c in "&%$#_{}"} | {"±": r"$\pm$", "−": "$-$"})
FORMATS: dict[str, Callable[..., object]] = {  # filters
    **{f.__name__: f for f in (as_unit, count, duration, figures, largest, num_bytes, percent)},
    "epsilon": epsilon_text,
    "literal": lambda value: json.dumps(value, ensure_ascii=False),
    "shell_word": shlex.quote,
    "basename": lambda path: PurePath(str(path)).name,
    "score": score,
    "counted": lambda values: Counter(values).most_common(),
    "summed": lambda events, key: sum(event.get(key) or 0 for event in events),
    "tex": lambda text: text.translate(TEX),
    "total": lambda parts: sum(parts.values() if isinstance(parts, dict) else parts),
}


def render(name: str, **context: object) -> str:
    """Return a template of ``page/``, filled in."""
    finalize = _markdown if name.endswith(".md.j2") else None
    return _environment(True, finalize).get_template(name).render(context)


def paragraphs(name: str, *values: object) -> list[str]:
    """Return one macro of ``sentences.j2``, filled in, with a line of text per paragraph."""
    macros = _environment(False, _on_one_line).get_template("sentences.j2").module
    text = str(getattr(macros, name)(*values))
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentence(name: str, *values: object) -> str:
    """Return one macro of ``sentences.j2``, filled in, as one line of text not yet escaped."""
    return " ".join(paragraphs(name, *values))


@cache
def _environment(autoescape: bool, finalize: Callable[[Any], Any] | None) -> Environment:
    """Return an environment, which compiles each template once: that takes longer than filling."""
    environment = Environment(  # noqa: S701
        loader=FunctionLoader(read_part),
        undefined=StrictUndefined,
        trim_blocks=True,
        autoescape=autoescape,
        finalize=finalize,
    )
    environment.filters |= FORMATS
    environment.tests |= {"noised": is_noised, "guess": GUESSES.__contains__}
    environment.globals.update(DASH=DASH, QUANTILES=QUANTILES, overall=overall, wilson=wilson)
    environment.globals.update(sentence=sentence, paragraphs=paragraphs)
    return environment


def read_part(name: str) -> str:
    """Return a file of ``page/``: template, style or script."""
    return (resources.files("fednas_flwr.report") / "page" / name).read_text(encoding="utf-8")


def render_page(name: str, figures: object, **context: object) -> str:
    """Return a page with style, scripts and its figures, as JSON that cannot end their element."""
    files = {"style": "style.css", "script": "script.js", "drawing": "figures.js"}
    parts = {part: read_part(name) for part, name in files.items()}
    text = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    parts["figures_json"] = text.replace("<", "\\u003c")
    safe = {part: Markup(text) for part, text in parts.items()}  # noqa: S704
    return render(name, figures=figures, zip=zip, **safe, **context)


def _markdown(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(value))


def _on_one_line(value: object) -> str:
    """Return text in which no word begins a paragraph."""
    return " ".join(str(value).split())
