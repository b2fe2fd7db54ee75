"""Warnings about a data set that looks wrong, before training; never at private sites.

Each sentence depends on records, so that whoever reads it learns something about them.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.data.notation import AFFIXED, YES_NO, are_numbers, number_of
from fednas_flwr.data.records import CATEGORY, DATE, NUMBER, Column, Records, count_labels, keys_of

_FEWEST = 50  # records from which on a column may be reported to give the label away or be an id
_SAMPLE = 10_000  # records, about, that are examined for it, evenly spaced
_FEWEST_NUMBERS, _MOSTLY = 10, 0.7  # values, and their share, that may be numbers with a sign
_TOTAL = re.compile(r"(grand |sub)?-?totals?|sums?|gesamt|summe|insgesamt", re.I)
_OF_EXCEL = re.compile(r"[-\d]+T00:00:00")  # a date that was a text
# Codes that mean missing, with or without a minus, and others that occur beside such codes
_CODES = [9, 99, 888, 999, 8888, 9999]
_MORE_CODES = [*_CODES, 1, 7, 8, 77, 88, 97, 98, 777, 998, 7777, 9998]
_MOST_CODES = 3
_UNKNOWN = re.compile(
    r"[?.*#]+|-+|\\N|-?9{2,}|(un|not )known|not (tested|done)|missing|unbekannt|n\.?[adks]\.?|nil"
    r"|nan|null",
    re.I,
)
_OF_LISTS = " []'\""  # signs in a list such as ['a', 'b']
_FRACTION = re.compile(r"-?\d*\.0*[1-9]\d*")
_PLACE = re.compile(r"[NSEW] ?\d+\.\d\d")
_WORD = re.compile(r"[^\W\d_]{2}")
# Cyrillic and Greek letters that look like Latin ones, small or large
_LOOK = str.maketrans("авекмнорстухіјѕαβεζηικμνορτυχ", "abekmhopctyxijsabezhikmnoptyx")
_FAR_DAYS = 84_006  # from 1970 to 2200
_FIRST_DAYS = {-719_162, -25_567, 0}  # of the years 1, 1900 and 1970, which may mean missing
_TELLS = 0.995  # AUROC of a single column that is suspicious
_DARK = 32  # of 255: a span of values so small that it is hardly intended
_MOST_CLASSES, _FEWEST_GRADES = 20, 6  # classes that are numbers
_ID_NAME = re.compile(
    r"(^|[^a-z])(id|ids|nr|no|number|key|index|uuid|mrn|case|record|obs|seqn|rownames?)$", re.I
)
_PERSON = re.compile(
    r"(?i:patient|subject|participant|person|u?subjid|[pu]id)|.*[a-z]I[dD]"
    r"|(?i:(patient|subject|participant|person|customer|user)s?[ _-]?(nr|no|num|number))"
    r"|(.*[^A-Za-z])?(?i:id|mrn|nbr|uuid)"
)
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}
_SPLIT_NAME = re.compile(
    r"is.?(train|test|val)(ing|id|idation)?|(train|test|val)\w*.(set|split)|split|(cv|k)?.?fold|hold.?out",
    re.I,
)
_APART, _SHARE = 10, 0.05  # ratio of neighbouring numbers, and share of records beyond each
_ALONE = 1000  # distance of a slip from the others, in units of their range
_FAR_OFF, _FEWEST_FAR = 10, 5  # standard deviations beyond which fewer numbers than this may be
_OUTSIDE = 0.1  # share of targets that may be outside their declared range
_FEWEST_PIXELS = 64
_DENSE = 2  # whole numbers per record; a column of fewer counts records, without those of a test
_COARSE = 1e-5  # range over distance from 0; float32 then has fewer than 200 values
_FLOAT32 = 2**24  # float32 does not distinguish larger whole numbers


def oddities(
    records: Records, test: Records | None = None, *, clients: Sequence[str] = ()
) -> list[str]:
    """Return sentences about what looks wrong.

    Args:
        records: Training records.
        test: A test set beside them.
        clients: Values of the column that divides the records over clients.

    Raises:
        ConfigError: All images are one picture.
    """
    found = list(_of_images(records) if records.features.dim() == 4 else _of_columns(records))
    found += _spelled_alike("the column of clients", clients, "in the data")
    if test is not None:
        found += [f"test set: {words}" for words in _of_test(records, test)]
    if not records.is_regression:
        return [*_of_labels(records), *found]
    values, counts = np.unique(records.labels.numpy(), return_counts=True)
    said = _set_apart(values, counts) or _blurred(values[0], values[-1])
    if len(values) == 1:
        said = f"it is {values[0]:g} in every record (as float32): there is nothing to predict"
    told = [said] if said else []
    exact = len(records) >= _FEWEST and abs(values).max() < _FLOAT32
    if exact and _is_id(records.label, records.labels.numpy(), len(values)):
        told.append(f"{records.label} is another whole number in every record: the right one?")
    return [*(f"the number to predict: {sentence}" for sentence in told), *found]


def _of_test(records: Records, test: Records) -> Iterator[str]:
    tested, known = (np.sort(keys_of(part.ids)) for part in (test, records))
    places = np.searchsorted(known, tested).clip(max=len(known) - 1)
    if number := int((known[places] == tested).sum()):
        yield f"{number} of its {len(test)} records or persons are among those to train on"
    if not test.is_regression and len(test) >= _FEWEST_NUMBERS:
        parts = [count_labels(part.labels, len(part.class_names)) for part in (records, test)]
        counts = zip(records.class_names, *parts, strict=True)
        if lacking := [name for name, known, number in counts if known and not number]:
            yield f"no record has the label {listed(lacking, 5)}, of which its scores say nothing"
    if test.features.dtype == torch.uint8:
        yield from of_brightness(test.features)
    if records.schema:
        some = records.features[:: max(1, len(records) // _SAMPLE)]
        mean = some.nanmean(0)
        std = (some - mean).square().nanmean(0).sqrt()
        yield from off_scale(test.features, records.schema, mean.tolist(), std.tolist())


def off_declared(
    test: Records, mean: Sequence[float], std: Sequence[float], target: Sequence[float]
) -> Iterator[str]:
    """Yield sentences on a public test set that is far from what settings declare.

    No other record is read, so that private runs have them, too.

    Args:
        test: The test set.
        mean: Declared mean of each feature; empty if none is declared.
        std: Declared standard deviations, likewise.
        target: As ``Inputs.target``; its ends are the declared range of a number to predict.
    """
    if mean and test.schema:
        yield from off_scale(test.features, test.schema, mean, std)
    if len(target) > 2:
        *_, low, high = target
        outside = int(((test.labels < low) | (test.labels > high)).sum())
        if outside > _OUTSIDE * len(test):
            ends = f"dataset.target_range=[{low:g}, {high:g}]"
            yield f"the number to predict is outside {ends} in {outside} of its {len(test)} records"


def off_scale(
    features: Tensor, schema: Sequence[Column], mean: Sequence[float], std: Sequence[float]
) -> Iterator[str]:
    """Yield a sentence on columns whose median, or some of whose numbers, are far from usual.

    Args:
        features: Rows of a table, float32 ``[N, F]``.
        schema: Their columns.
        mean: Mean of each feature, in training or declared.
        std: Standard deviation of each feature, likewise.
    """
    names = [c.name if c.kind == NUMBER else "" for c in schema if c.kind != CATEGORY]
    if len(features) < _FEWEST_NUMBERS or not names:
        return
    found = []
    for column, (name, usual, spread) in enumerate(zip(names, mean, std, strict=False)):
        values, rounding = features[:, column], 1e-3 * abs(usual)  # of means
        middle = float(values.nanmedian())
        others = float((~values.isnan() & (values != middle)).double().mean())
        # a share p of others that are v off has a variance of about p * v^2
        reach = _FAR_OFF * spread / (math.sqrt(others) if 0 < others < 0.5 else 1)
        far = values[(abs(values - usual) > reach + rounding) & (abs(values) > 1)]
        if name and abs(middle - usual) > 2 * spread + rounding:
            found.append(f"{name} ({middle:.3g}, and not {usual:.3g})")
        elif name and len(far) >= max(_FEWEST_FAR, len(values) / 100):
            found.append(f"{name} (in {len(far)} records, as {far[0]:.3g})")
    if found:
        yield f"numbers far from the usual ones, as in another unit or scale: {listed(found, 5)}"


def _of_labels(records: Records) -> Iterator[str]:
    counts = count_labels(records.labels, len(records.class_names))
    empty = [name for name, n in zip(records.class_names, counts, strict=True) if not n]
    if empty and (len(records) >= _FEWEST or not records.schema):
        asked = ": do labels begin at 1?" if empty[0].isdecimal() else ""
        yield f"no record to train on has the label {listed(empty, 5)}{asked}"
    if records.multi_label and bool((records.labels.sum(1) == 1).all()):
        yield (
            f"every record has exactly one of {len(counts)} labels: for one class per record give "
            "class numbers, or one column of classes"
        )
    if len(counts) > max(_FEWEST, len(records)) / 2:
        yield f"the label has {len(counts)} classes in {len(records)} records: is it the right one?"
    elif 1 in counts and len(records) >= _FEWEST:
        yield f"one record only has the label {records.class_names[counts.index(1)]}: is it one?"
    if len(counts) == 1:
        yield f"every record has the label {records.class_names[0]}: there is nothing to tell apart"
    cure = "by dataset.map" if records.schema else "in the data"
    yield from _spelled_alike("the label", records.class_names, cure)
    beside = [number_of(name) for name in records.class_names if name != "9"]
    many = len(counts) > 4 or any(number > 4 for number in beside)
    codes = [] if many else ["9"]  # codes that may mean missing
    codes += ["-1"] if {*records.class_names} == {"-1", "0", "1"} else []
    codes += _marks(records.class_names)
    for name in [name for name in records.class_names if name in codes][:1]:
        yield f"the label holds {name}: if it means that the label is missing, remove these records"
    are_many = len(counts) > _MOST_CLASSES or any(map(_FRACTION.fullmatch, records.class_names))
    are_many &= len(counts) > 2 and bool(are_numbers(records.class_names).all())
    if records.label and not records.multi_label and (are_many or _are_counts(records, counts)):
        yield (
            f"the label has {len(counts)} classes that are numbers: if it is a number to predict, "
            "set dataset.task=regression"
        )


def _are_parts(name: str, codes: Sequence[object]) -> bool:
    """Return true if a column divides records into train and test."""
    if not 1 < len(codes) <= _FEWEST_NUMBERS:
        return False
    return bool(_SPLIT_NAME.fullmatch(name)) or {str(code).lower() for code in codes} <= _SPLITS


def _marks(codes: Sequence[str]) -> list[str]:
    """Return the codes that may mean a missing cell; a minus beside a plus does not."""
    return [] if "+" in codes else [code for code in codes if _UNKNOWN.fullmatch(code)]


def _are_counts(records: Records, counts: Sequence[int]) -> bool:
    """Return true if classes may be counts or grades, in steps of 1 or .5, with one usual value."""
    codes = np.array([*map(number_of, records.class_names)])
    often = np.array(counts, dtype=float)[codes.argsort()]
    steps = np.diff(np.sort(codes))
    if len(codes) < _FEWEST_GRADES or steps[0] not in (0.5, 1) or (steps != steps[0]).any():
        return False
    rises = np.diff(often) * np.where(np.arange(1, len(codes)) <= often.argmax(), 1, -1)
    by_chance = 2 * np.sqrt(often[1:] + often[:-1])
    return bool((rises >= -by_chance).all() and often.max() > _APART * often.min())


def _spelled_alike(what: str, codes: Sequence[str], how: str = "by dataset.map") -> Iterator[str]:
    """Yield sentences on codes that may be the same, all mean yes or no, or are lists of others."""
    alike: dict[str, list[str]] = {}
    spoken = YES_NO if all(code.lower() in YES_NO for code in codes) else {}
    for code in codes:
        shown = "".join(sign for sign in code if unicodedata.category(sign) != "Cf")
        plain = " ".join(unicodedata.normalize("NFKC", shown).lower().translate(_LOOK).split())
        plain = plain.rstrip(".,;:") or plain
        plain = str(int(plain)) if plain.isdecimal() else plain
        alike.setdefault(spoken.get(plain, plain), []).append(code)
    for spellings in [found for found in alike.values() if len(found) > 1][:1]:
        yield f"{what} holds {' and '.join(spellings)}: join them {how} if they are one"
    for code in codes:
        parts = {part.strip(_OF_LISTS).lower() for part in re.split("[,;|/+ ]", code)} - {""}
        if len(parts) > 1 and parts <= {plain.strip(_OF_LISTS) for plain in alike}:
            cure = ": several labels? Set dataset.label_separator" if what == "the label" else ""
            yield f"{what} holds {code} beside its parts, as one more of its kind{cure}"
            return


def _of_images(records: Records) -> Iterator[str]:
    images = records.features
    if len(images) > 1 and all(torch.equal(image, images[0]) for image in images):
        raise ConfigError(
            f"all {len(images)} images are one picture once they are read: see whether they are "
            "drawn in transparency, on a later page, or in a range that dataset.intensity cuts."
        )
    if images.dtype == torch.uint8:
        yield from of_brightness(images)
    for name, cells in records.columns.items():
        if _are_parts(name, codes := np.unique(cells).tolist()):
            yield f"{name} says {listed(codes)}, and is not read: use folders train and test"
    if records.labels.dim() == 1 and not records.by_person:
        pairs = {*zip(records.ids.tolist(), records.labels.tolist(), strict=True)}
        if more := len(pairs) - len({name for name, _ in pairs}):
            yield f"{more} images occur under more than one label: which one is right?"


def of_brightness(images: Iterable[Tensor]) -> Iterator[str]:
    """Yield a sentence on uint8 images that are all dark or of one shade; none without images."""
    darkest, brightest = 255, -1
    for image in images:
        low, high = image.aminmax()
        darkest, brightest = min(darkest, int(low)), max(brightest, int(high))
        if brightest >= darkest + _DARK:
            return
    if brightest >= 0:
        yield (
            f"the pixels are from {darkest} to {brightest} of 255: set dataset.intensity=[low,high]"
            " of gray images of more than 8 bits, or write others anew so that they reach 255"
        )


def _of_columns(records: Records) -> Iterator[str]:
    if len(records) < _FEWEST:
        return
    names = list(records.feature_names)
    side = math.isqrt(len(names))
    whole = side**2 == len(names) >= _FEWEST_PIXELS and not (records.features % 1).any()
    if whole and records.features.min() >= 0 and records.features.max() > 127:
        yield (
            f"{len(names)} columns of whole numbers look like images of {side}x{side} pixels: "
            "networks of images take an npz file of [N, H, W]"
        )
    rows = slice(None, None, max(1, len(records) // _SAMPLE))
    features, labels = records.features[rows].double().numpy(), records.labels[rows].numpy()
    tells: list[str] = []
    unusual: dict[str, list[str]] = {}
    for column in records.schema:
        yield from _spelled_alike(column.name, column.categories)
        if column.kind == CATEGORY:
            places = [names.index(f"{column.name}={value}") for value in column.categories]
            codes, marks = column.categories, _marks(column.categories)
            others = [code for code in codes if code not in marks]
            affixed = codes if all(map(_PLACE.match, codes)) else [*filter(AFFIXED.match, codes)]
            odd = [code for code in others if not are_numbers([code]).all()]
            are_affixed = len(affixed) > max(_FEWEST_NUMBERS, _MOSTLY * len(codes))
            if odd and (are_affixed or are_numbers(map(_with_usual_signs, others)).all()):
                yield (
                    f"{column.name} has {len(codes)} categories such as {odd[0]}: write "
                    "numbers, dates and times plainly"
                )
                continue
            for mark in [m for m in marks if not (odd and _WORD.search(m))][:1]:
                yield (
                    f"{column.name} holds {mark}: if it means that a cell is missing, name it in "
                    "dataset.missing_values"
                )
            for code in [*filter(_TOTAL.fullmatch, codes)][:1]:
                yield f"{column.name} holds {code}: if that row adds up others, remove it"
            for code in [*filter(_OF_EXCEL.fullmatch, codes)][:1]:
                yield f"{column.name} holds {code}: if a text became a date, write it again"
            cells = features[:, places] @ np.arange(1, len(places) + 1)
            if len(column.categories) > len(records) / 2:
                yield f"{column.name} has a value of its own in most rows: {_IGNORE}"
                continue
        else:
            cells = features[:, names.index(column.name)]
            texts = records.columns[column.name][rows] if column.name in records.columns else cells
            is_id = column.kind == NUMBER and _is_id(column.name, cells, len(np.unique(texts)))
            if is_id and not _are_dates(cells):
                yield f"{column.name} has another whole number in every row: {_IGNORE}"
                continue
        if _are_parts(column.name, column.categories or np.unique(cells).tolist()):
            cure = "name it in dataset.ignore, and put the rows of a test set into test.csv"
            yield f"{column.name} may say which records are to test on, and is a feature: {cure}"
            continue
        named = _PERSON.fullmatch(column.name) and not (cells % 1 > 0).any()
        if named and len(np.unique(cells)) > len(cells) / 10:
            yield f"{column.name} has few rows of each value, as a person has: {_IGNORE}"
            continue
        if said := _unusual(column.kind, cells):
            unusual.setdefault(said, []).append(column.name)
        if not records.multi_label and _tells(cells, labels, column.kind == CATEGORY):
            tells.append(column.name)
    yield from (f"{said}: {listed(columns, 5)}" for said, columns in unusual.items())
    if tells:
        tell, are = ("tells", "it is") if len(tells) == 1 else ("tell", "they are")
        yield (
            f"{listed(tells, 5)} alone {tell} the label: if {are} known only afterwards, use "
            "dataset.ignore"
        )


def _with_usual_signs(text: str) -> str:
    """Return a number in the form 1e-5 that has other digits, a typographic minus, or 1.D-5."""
    usual = re.sub(r"\d", lambda digit: str(int(digit[0])), text.replace("\u2212", "-"))
    return re.sub(r"(?<=[\d.])[dD](?=[+-]\d)", "e", usual)


def _unusual(kind: str, cells: np.ndarray) -> str:
    """Return what is unusual about a column: it is uninformative, or not what it seems."""
    values, counts = np.unique(cells[~np.isnan(cells)], return_counts=True)
    if len(values) < 2:
        return "one value, or none, in all records (as float32), which says nothing about the label"
    if kind == CATEGORY:
        return ""
    low, high = values[0], values[-1]
    if kind == DATE and high > _FAR_DAYS:
        return "dates after 2200, which may mean missing (dataset.missing_in)"
    if kind == DATE and counts[0] > 1 and low in _FIRST_DAYS:
        return f"{_date(low)} in {counts[0]} records, which may mean missing"
    show = _date if kind == DATE else "{:g}".format
    if said := _set_apart(values, counts, show):
        return said
    for places in ([0, 1, -1], [-1, -2, 0]):  # equal numbers, if there are only two
        far, near, end = values[places]
        if counts[places[0]] == 1 and abs(near - far) > _ALONE * abs(end - near) > 0:
            return f"{show(far)} is far from all others: a slip?"
    if kind == DATE:
        return _blurred(low, high)
    few = 1 < counts[0] < counts.sum() / 2
    if low == 0 and few and values[1] > np.median(values) / 3 and len(values) > 10:
        return f"0 in {counts[0]} records, which may mean missing (dataset.missing_in)"
    if low > 0 and len(values) > _FEWEST_NUMBERS:
        place = int((values[1:] / values[:-1]).argmax())
        below = counts[: place + 1].sum() / counts.sum()
        if values[place + 1] > _APART * values[place] and _SHARE < below < 1 - _SHARE:
            return f"numbers up to {values[place]:g} and from {values[place + 1]:g} on: two units?"
    if _are_dates(values):
        return "dates written as 20241231, which are read as numbers: write 2024-12-31"
    return _blurred(low, high)


def _date(days: float) -> str:
    return str(np.datetime64(int(days), "D"))


def _set_apart(
    values: np.ndarray, counts: np.ndarray, show: Callable[[float], str] = "{:g}".format
) -> str:
    """Return a sentence on numbers that may mean missing: up to 3 at an end, far from all others.

    Args:
        values: The distinct numbers of a column, ascending.
        counts: Number of occurrences of each.
        show: Returns a number as text.
    """
    for number, order in product(range(min(_MOST_CODES, len(values) - 1), 0, -1), (1, -1)):
        codes, others = values[::order][:number], values[::order][number:]
        times, code, other = counts[::order][:number], codes[-1], others[0]
        if order == 1:
            is_far = code < 0 and other >= (2 if code == -1 else 0)
        else:
            is_far = other <= code / (2 if code > 99 else 4)
        is_far |= abs(other - code) > abs(other - others[-1]) and len(others) > 1
        known = np.isin(abs(codes), _CODES) | (codes == -1)
        if number > 1:
            is_known = known[0] and times.min() > 1 and np.isin(abs(codes), _MORE_CODES).all()
        else:
            many = len(values) > _FEWEST_NUMBERS < abs(code) and times > 3 * counts.mean()
            is_known = (known | many)[0] and (times[0] > 1 or abs(others).max() < abs(code) / 5)
        if is_far and is_known:
            named = " and ".join(map(show, sorted(codes)))
            return f"{named} in {times.sum()} records, which may mean missing (dataset.missing_in)"
    return ""


def _blurred(low: float, high: float) -> str:
    """Return a sentence on numbers from low to high if they differ too little for float32."""
    if high - low >= _COARSE * max(high, -low):
        return ""
    return f"numbers from {low:.9g} to {high:.9g}, which float32 blurs: subtract a constant"


def _are_dates(cells: np.ndarray) -> bool:
    """Return true if numbers are dates as 20241231, which float32 rounds to even numbers."""
    years, months, days = cells // 10_000, cells // 100 % 100, cells % 100
    dated = (1900 <= years) & (years <= 2100) & (1 <= months) & (months <= 12) & (days <= 32)
    return bool(dated.all())


_IGNORE = "if it says whose a record is, name it in dataset.id_column, or else in dataset.ignore"


def _is_id(name: str, cells: np.ndarray, different: int) -> bool:
    """Return true if a column with ``different`` distinct numbers counts or names records."""
    if different < len(cells) or np.isnan(cells).any() or (cells % 1).any():
        return False
    large = abs(cells).max() > _FLOAT32
    steps = np.diff(np.sort(cells))
    counts = (steps == steps[0]).all() or steps.sum() < _DENSE * len(cells)
    return bool(large or _ID_NAME.search(name) or counts)


def _tells(cells: np.ndarray, labels: np.ndarray, is_category: bool) -> bool:
    """Return true if a column alone ranks the records of each class above all others."""
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2 or counts.min() < 2 or len(classes) > _MOST_CLASSES:
        return False
    values, at = np.unique(np.nan_to_num(cells), return_inverse=True)
    if is_category and len(values) > len(cells) / 10:
        return False  # each value has so few records that its share of a class says little
    for one in classes:
        hits = np.bincount(at, labels == one)
        others = np.bincount(at) - hits
        if is_category:
            order = np.argsort(hits / (hits + others))
            hits, others = hits[order], others[order]
        area = hits @ (others.cumsum() - others / 2) / (hits.sum() * others.sum())
        if max(area, 1 - area) < _TELLS:
            return False
    return True
