"""Tables of several sites: compared side by side, and joined by names and meanings.

Columns are joined by name and cells by meaning (1 and 1.0, TRUE and True are one code). A
``dataset.yaml`` beside the tables lists other differences; :func:`proposals` drafts it:

    all: {missing_values: ["?"]}
    va: {rename: {cholesterol: chol}, scale: {chol: 38.67}, map: {sex: {M: 1, F: 0}}}
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.base.errors import ConfigError, listed, unknown_choice
from fednas_flwr.base.foreign import read_yaml
from fednas_flwr.data.decoding import beside, sites_in
from fednas_flwr.data.notation import YES_NO, Cells, distinct, iso_date, number_of
from fednas_flwr.data.records import CATEGORY, DATE, NUMBER, Column, Records, agreed
from fednas_flwr.data.table_files import SITES_FILE, Form, Texts, unused
from fednas_flwr.data.tables import column_kind, form_of, label_columns, read_cells, records_of
from fednas_flwr.settings.data_settings import CSV, TableForm
from fednas_flwr.settings.names import MISSING_RULES, TABLE_SUFFIXES
from fednas_flwr.settings.parser import parse_changes

_EVERYWHERE = "all"
# Factors between units: of cholesterol, glucose, creatinine, length, mass; and powers of ten
_UNITS = (38.67, 18.02, 88.42, 2.54, 2.205, 10.0, 12.0, 100.0, 365.25, 1000.0)
# Ratio of medians from which units may differ; the second if most numbers are above most others'
_FAR, _APART = 3.0, 1.8
_CODES = {*range(-1, 11)}  # numbers that are more likely codes or counts
_MOST_SHOWN = 5


@dataclass(frozen=True)
class SiteTable:
    """A site's table.

    Attributes:
        texts: Its cells in common form, by column.
        settings: Settings by which it was read, including those found in it.
        notes: Sentences about what was found.
    """

    texts: Texts
    settings: CSV
    notes: tuple[str, ...]

    def kind(self, column: str) -> str | None:
        """Return the kind of a column; None if it is missing or empty."""
        cells = self.texts.get(column)
        if cells is None or cells.missing.all():
            return None
        return column_kind(cells, self.settings)[0]

    def with_iso_dates(self) -> SiteTable:
        """Return the table with dates as 2024-05-31, whatever their order was."""
        iso = partial(iso_date, order=self.settings.date_order)
        dates = [name for name in self.texts if self.kind(name) == DATE]
        changed = {name: self.texts[name].changed(iso) for name in dates}
        return replace(self, texts={**self.texts, **changed})


def read_site_tables(settings: CSV, root: Path) -> dict[str, SiteTable]:
    """Return the tables in a folder by site, each read with its settings in ``dataset.yaml``.

    Raises:
        ConfigError: There are none, or one cannot be read.
    """
    sites = site_files(settings, root)
    return {site: SiteTable(*read_cells(form, path)) for site, (path, form) in sites.items()}


def site_files(settings: Form, root: Path) -> dict[str, tuple[Path, Form]]:
    """Return the files in a folder by site, each with the settings that ``dataset.yaml`` changes.

    Raises:
        ConfigError: There are none, or two have the same name.
    """
    paths = sites_in(root, TABLE_SUFFIXES)
    file = _settings_file(root)
    written = (read_yaml(file, "sites' settings") if file else None) or {}
    written = written if isinstance(written, Mapping) else {_EVERYWHERE: written}
    said = {str(site): changes for site, changes in written.items()}
    for site in said:
        if site not in (*paths, _EVERYWHERE):
            raise unknown_choice(f"{root / SITES_FILE}, site", site, [*paths, _EVERYWHERE])

    def form(part: str, before: Form) -> Form:
        where = f"{root / SITES_FILE}, {part}"
        return parse_changes(before, said.get(part, {}), TableForm, key=where)

    everywhere = form(_EVERYWHERE, settings)
    return {site: (path, form(site, everywhere)) for site, path in paths.items()}


def _settings_file(root: Path) -> Path | None:
    """Return the file of sites' settings in a folder, with either suffix, if there is one."""
    return next(iter(sorted(root.glob("dataset.y*ml"))), None)


def join_tables(tables: Mapping[str, SiteTable], settings: CSV, root: Path) -> Records:
    """Return the records of all sites, with a column ``site``.

    Raises:
        ConfigError: The sites do not have the same label, or their cells do not fit together.
    """
    labels = {site: label_columns(table.settings) for site, table in tables.items()}
    (first, label), *others = labels.items()
    for site, other in others:
        if other != label:
            raise ConfigError(
                f"the last column of site {first} is {', '.join(label)}, and that of site {site} "
                f"{', '.join(other)}: name the label in dataset.label, and let {SITES_FILE} "
                "rename it where it has another name."
            )
    sizes = {site: len(next(iter(table.texts.values()))) for site, table in tables.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table.texts))
    texts: Texts = {}
    told = Counter(note for table in tables.values() for note in table.notes)
    maps = [of for table in tables.values() for of in table.settings.map.items()]
    asked = Counter(unused(name, code) for name, codes in maps for code in codes)
    notes = [note for note, times in told.items() if times >= asked[note]]  # the code is at no site
    read = [*sites_in(root, TABLE_SUFFIXES).values(), _settings_file(root) or root]
    notes += beside(root, read, "expected .csv, .xlsx and the like")
    said = proposals(tables)
    spellings = {site: of.get("map", {}).get(label[0]) for site, of in said.items()}
    spelled = {site: {"map": {label[0]: codes}} for site, codes in spellings.items() if codes}
    cells = [table.texts.get(label[0], Cells([])) for table in tables.values()]
    words = {code.lower() for of in cells for code in of.different}
    if spelled and not settings.labels and words <= {*YES_NO}:
        raise ConfigError(
            f"sites say yes and no in {label[0]} by other words than others: join them by "
            f"{root / SITES_FILE} with {'; '.join(as_yaml(spelled))}."
        )
    if said:
        notes.append(
            f"{listed(list(said), 5)}: other names, units or codes than most, it seems; "
            f"fednas data {root} partition=sites proposes what would join them"
        )
    if len({table.settings.date_order for table in tables.values()}) > 1:
        tables = {site: table.with_iso_dates() for site, table in tables.items()}
    for name in names:
        lacking = [site for site, table in tables.items() if name not in table.texts]
        if name in label and lacking:
            raise ConfigError(f"site {lacking[0]} has no column {name}, which is the label.")
        if lacking:
            notes.append(f"{', '.join(lacking)}: no column {name}, which counts as missing there")
        columns = [t.texts.get(name, Cells([""] * sizes[site])) for site, t in tables.items()]
        texts[name] = Cells([text for cells in columns for text in cells.tolist()])
    common = replace(settings, **agreed(form_of(table.settings) for table in tables.values()))
    if not settings.labels:
        common = replace(common, label=label[0])
    joined = records_of(common, texts, root)
    site_of = np.repeat(np.array(list(tables)), list(sizes.values()))
    by_site = {name: cells for name, cells in joined.columns.items() if name != "site"}
    return replace(joined, columns={**by_site, "site": site_of}, notes=(*notes, *joined.notes))


def side_by_side(tables: Mapping[str, SiteTable]) -> list[tuple[str, ...]]:
    """Return the rows of a comparison: the sites' names, then each column's contents per site."""
    names = dict.fromkeys(name for table in tables.values() for name in table.texts)
    sizes = [f"{len(next(iter(t.texts.values()))):,}" for t in tables.values()]
    contents = [(name, *(_contents(table, name) for table in tables.values())) for name in names]
    return [("", *tables), ("records", *sizes), *contents]


def _contents(table: SiteTable, column: str) -> str:
    """Return a column's contents in a few words."""
    cells = table.texts.get(column)
    if cells is None:
        return "-"
    missing = float(cells.missing.mean()) if len(cells) else 0.0
    end = f", {missing:.0%} missing" if missing else ""
    if (kind := table.kind(column)) is None:
        return "all missing"
    if kind == NUMBER and column not in label_columns(table.settings):
        low, middle, high = np.nanquantile(cells.numbers, [0, 0.5, 1])
        return f"{low:g} to {high:g}, median {middle:g}{end}"
    codes = distinct(cells.different)
    if kind == CATEGORY or column in label_columns(table.settings):
        more = ", ..." if len(codes) > _MOST_SHOWN else ""
        return f"{', '.join(codes[:_MOST_SHOWN])}{more}{end}"
    return f"{kind}, {codes[0]} to {codes[-1]}{end}"


def proposals(tables: Mapping[str, SiteTable]) -> dict[str, dict[str, Any]]:
    """Return settings by site, for ``dataset.yaml``, that would join tables that differ.

    They are guesses by names, codes and medians, for people to check; ``?`` stands where nothing
    similar was found.
    """
    found: dict[str, dict[str, Any]] = {site: {} for site in tables}

    def propose(site: str, setting: str, column: str, value: Any) -> None:
        found[site].setdefault(setting, {})[column] = value

    times = Counter(name for table in tables.values() for name in table.texts)
    usual_case = {name.lower(): name for name, _ in reversed(times.most_common())}
    holders = Counter(key for table in tables.values() for key in {*map(str.lower, table.texts)})
    first = next(iter(tables.values())).texts  # decides if sites are in two equal halves
    common = [
        name
        for name in times
        if name == usual_case[low := name.lower()]
        and (2 * holders[low] > len(tables) or 2 * holders[low] == len(tables) and name in first)
    ]
    for site, table in tables.items():
        lacking = [name for name in common if name not in table.texts]
        spare = [name for name in table.texts if name not in common]
        for spelled, name in _respelled(lacking, spare).items():
            propose(site, "rename", spelled, name)
    for name in common:
        kinds = {site: table.kind(name) for site, table in tables.items()}
        usual = Counter(kind for kind in kinds.values() if kind).most_common(1)
        if not usual:
            continue
        settings = next(iter(tables.values())).settings
        codes = [t.texts[name].different for site, t in tables.items() if kinds[site]]
        is_class = name in label_columns(settings) and not settings.is_regression
        is_class &= max(map(len, codes)) <= 2 * _MOST_SHOWN  # more codes may be quantities
        of_numbers = {s: t for s, t in tables.items() if kinds[s] == NUMBER}
        numbers = [t.texts[name].numbers for t in of_numbers.values()]
        are_codes = {*kinds.values()} <= {NUMBER, None}
        are_codes = are_codes and all({*x[x == x].tolist()} <= _CODES for x in numbers)
        if usual[0][0] == NUMBER and not (is_class or are_codes):
            _propose_units(name, of_numbers, propose)
        if is_class or are_codes or CATEGORY in kinds.values():
            _propose_codes(name, tables, propose, only_recoded=are_codes and not is_class)
    return {site: said for site, said in found.items() if said}


def _respelled(lacking: Sequence[str], spare: Sequence[str]) -> dict[str, str]:
    """Return names that a site lacks, by its own names of the most similar spelling."""
    lower = {other.lower(): other for other in spare}
    near = {n: difflib.get_close_matches(n.lower(), lower, n=1, cutoff=0.5) for n in lacking}
    return {lower[found[0]]: name for name, found in near.items() if found}


def difference(columns: Sequence[Column], usual: Sequence[Column]) -> str:
    """Return the differences of a site's columns from most sites', with lines of ``dataset.yaml``.

    Args:
        columns: Columns that the site declares or has found.
        usual: Columns of most sites.
    """
    ours, theirs = ({column.name: column for column in schema} for schema in (columns, usual))
    lacking, spare = ([n for n in a if n not in b] for a, b in ((theirs, ours), (ours, theirs)))
    said = [f"it lacks {name}" for name in lacking] + [f"it has {name} besides" for name in spare]
    lines: dict[str, dict[str, Any]] = {"rename": _respelled(lacking, spare)}
    for name, column in ours.items():
        other = theirs.get(name, column)
        if column.kind != other.kind:
            said.append(f"{name} is a {column.kind} there and a {other.kind} at the others")
        elif column.indicator != other.indicator:
            said.append(f"{name} has missing={MISSING_RULES[column.indicator]} there alone")
        elif column.categories != other.categories:
            codes, known = column.categories, other.categories
            said.append(f"{name} has {listed(codes)} there and {listed(known)} at the others")
            free = [code for code in known if code not in codes]
            if spelled := {c: _nearest(c, free) for c in codes if c not in known and free}:
                lines.setdefault("map", {})[name] = spelled
            else:
                lines.setdefault("categories", {})[name] = distinct([*codes, *known])
    joining = ", ".join(f"{setting}: {json.dumps(of)}" for setting, of in lines.items() if of)
    end = f"; lines of its dataset.yaml that would join it, to be checked: {joining}"
    said = said or [f"their order must be {', '.join(theirs)}"]
    return "; ".join(said) + (end if joining else "")


def _propose_units(name: str, tables: Mapping[str, SiteTable], propose: Any) -> None:
    """Propose meanings of zeros, and factors where a median is far from those of most sites."""
    numbers = {s: (x := t.texts[name].numbers)[~np.isnan(x)] for s, t in tables.items()}
    zeros = {site: bool((x == 0).any()) for site, x in numbers.items()}
    without = [x for site, x in numbers.items() if not zeros[site]]
    above = [x.min() > np.median(x) / 10 for x in without]
    for site in [site for site, some in zeros.items() if some]:
        if sum(above) >= len(numbers) / 2:
            propose(site, "missing_in", name, ["0", *tables[site].settings.missing_values])
            numbers[site] = numbers[site][numbers[site] != 0]
    spans = {s: np.quantile(x, [0.1, 0.5, 0.9]) for s, x in numbers.items() if len(x)}
    spans = {site: span for site, span in spans.items() if span[1] > 0}
    medians = np.array([span[1] for span in spans.values()])
    num_near = [(abs(np.log(medians / median)) < np.log(_FAR)).sum() for median in medians]
    model = num_near.index(max(num_near)) if spans else 0  # like most sites, or the first
    low, middle, high = [*spans.values(), (0, 0, 0)][model]
    for site, (least, median, most) in spans.items():
        ratio, apart = middle / median, least > high or most < low
        if max(ratio, 1 / ratio) > (_APART if apart else _FAR):
            factors = [f for unit in _UNITS for f in (unit, 1 / unit)]
            near = min(factors, key=lambda f: max(f / ratio, ratio / f))
            fits = low <= near * median <= high
            propose(site, "scale", name, float(f"{near:.4g}") if fits else "?")


def _propose_codes(
    name: str, tables: Mapping[str, SiteTable], propose: Any, *, only_recoded: bool
) -> None:
    """Propose spellings where a site's few codes differ from those of most sites."""
    codes = {s: distinct(t.texts[name].different) for s, t in tables.items() if t.kind(name)}
    if max(map(len, codes.values())) > 2 * _MOST_SHOWN:
        return
    times = Counter(code for found in codes.values() for code in found)
    usual = distinct(code for code, number in times.items() if number > len(codes) / 2)
    usual = usual or max(codes.values(), key=len)
    model = usual if usual in codes.values() else next(iter(codes.values()))
    for site, found in codes.items():
        if _are_recoded(found, model):
            pairs = zip(sorted(found, key=number_of), sorted(model, key=number_of), strict=True)
            propose(site, "map", name, dict(pairs))
        elif not only_recoded:
            new = [code for code in found if len(distinct([*usual, code])) > len(usual)]
            free = [code for code in usual if len(distinct([*found, code])) > len(found)]
            if new and free:
                propose(site, "map", name, {code: _nearest(code, free) for code in new})


def _are_recoded(codes: Sequence[str], others: Sequence[str]) -> bool:
    """Return true if codes are others shifted by one, or two numbers for two others."""
    pairs = zip(codes, others, strict=True) if 1 < len(codes) == len(others) else ()
    steps = [number_of(a) - number_of(b) for a, b in pairs]
    return {*steps} in ({1}, {-1}) or (len(steps) == 2 and any(steps) and sum(steps) == sum(steps))


def _nearest(code: str, codes: Sequence[str]) -> str:
    """Return the code most like another by yes or no, beginning or spelling; ``?`` if none is."""
    code, lower = code.lower(), {other.lower(): other for other in codes}
    near = [other for other in lower if YES_NO.get(other) == YES_NO.get(code, "?")]
    near += [other for other in lower if other[:1] == code[:1]]
    near += difflib.get_close_matches(code, lower, n=1)
    return lower[near[0]] if near else "?"


def as_yaml(said: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines of a ``dataset.yaml``, one per site."""
    return [f"{json.dumps(site)}: {json.dumps(dict(s))}" for site, s in said.items()]
