"""The available data sets: settings, place of the files, and reader of each.

A kind of data set is a class of settings, a reader and an entry of :data:`DATA_SETS`, with a file
in ``conf/dataset``. Readers are imported when they are called, since importing torch takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from fednas_flwr.base.errors import ConfigError, check_choice, show
from fednas_flwr.base.foreign import check_resolved, read_yaml
from fednas_flwr.settings import data_settings as ds
from fednas_flwr.settings.names import TABLE_SUFFIXES, TORCHVISION_SETS
from fednas_flwr.settings.parser import choose_kind, conf_folder, parse
from fednas_flwr.settings.registry import TABLES, imported, register

if TYPE_CHECKING:
    import numpy as np

    from fednas_flwr.data.records import RecordsPair


@dataclass(frozen=True)
class DataSet:
    """Entry behind the ``name`` in a file of ``conf/dataset``.

    Attributes:
        settings: Class of its settings.
        reader: Function of the settings and the file or folder to read, which is the settings' own
            or a site's. It returns the train part and the official test part, None if there is
            none. Or its place in this package, ``<module>:<function>``, imported when needed.
        roots: Kinds of places that ``dataset.root`` may be, ``file`` and ``folder``; empty if it
            needs none.
        sites: Endings of the sites' files or folders, each of which goes to ``read``; empty if the
            data set cannot be divided by sites.
        folder: Folder of its files below the root.
        by_content: True if the records, not the files, decide whether a cached copy is the same.
    """

    settings: type[ds.Dataset]
    reader: str | Callable[[Any, Path], RecordsPair]
    roots: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    folder: str = ""
    by_content: bool = False

    def read(self, settings: ds.Dataset, path: Path) -> RecordsPair:
        """Return the train part and the official test part in a file or folder."""
        place = f"fednas_flwr.data.{self.reader}" if isinstance(self.reader, str) else self.reader
        return imported(place)(settings, path)


_BUILT_IN = {
    "digits": DataSet(ds.Images, "images:read_digits"),
    **{
        name: DataSet(ds.Torchvision, "images:read_torchvision", roots=("folder",), folder=folder)
        for name, (_, folder) in TORCHVISION_SETS.items()
    },
    "image_folder": DataSet(
        ds.ImageFolder, "images:read_image_folder", roots=("folder",), sites=("/",)
    ),
    "labelled_images": DataSet(
        ds.LabelledImages, "images:read_labelled_images", roots=("folder",), sites=("/",)
    ),
    "npz": DataSet(ds.Npz, "npz:read_npz", roots=("file",), sites=(".npz",)),
    "csv": DataSet(ds.CSV, "tables:read_table", roots=("file", "folder"), sites=TABLE_SUFFIXES),
}


for _name, _entry in _BUILT_IN.items():
    register("dataset", _name, _entry)
DATA_SETS: dict[str, DataSet] = TABLES["dataset"]


def check_sites(name: str) -> None:
    """Raise ConfigError unless the data set can be divided by sites."""
    if not DATA_SETS[name].sites:
        *others, last = (name for name, entry in DATA_SETS.items() if entry.sites)
        raise ConfigError(
            f"partition=sites does not fit dataset.name={name}: use {', '.join(others)} or {last}."
        )


def data_settings(name: str, values: Mapping[str, Any]) -> ds.Dataset:
    """Return a data set's settings, checked; those not given are neutral (:func:`_neutral`)."""
    values = {**_neutral(name), "name": name, **values}
    return parse(DATA_SETS[name].settings, values, key="dataset", defaults=True)


def _neutral(name: str) -> dict[str, Any]:
    """Return the settings of a file in ``conf/dataset``, where values of its bases come first."""
    path = conf_folder() / "dataset" / f"{name}.yaml"
    tree: dict[str, Any] = read_yaml(path, "the defaults of data sets")
    for base in tree.pop("defaults", ()):
        tree |= _neutral(base)
    return tree


def site_dataset(path: Path, *, cache: str) -> ds.Dataset:
    """Return a private site's settings of its own data, from its file, regardless of the run's.

    If the server could choose a setting, it could query the records: can they be read, augmented or
    cached with it? If a setting were found in the records, each record could change all others. So
    a table is UTF-8 with decimal points unless its file says otherwise. A record that cannot be
    read is left out by itself (``corrupt: skip``).

    Args:
        path: A YAML file of ``dataset`` settings. Settings that it leaves out are as in the files
            ``conf/dataset/_*.yaml``, except ``corrupt``, and a table's ``encoding`` and
            ``decimal``.
        cache: Folder of prepared records.

    Raises:
        ConfigError: The file cannot be read, a setting is wrong, or the file of a table does not
            name the column that gives ids.
    """
    written = read_yaml(path, f"the site's dataset settings {path}")
    check_resolved(written, str(path))
    if not isinstance(written, Mapping):
        raise ConfigError(f"the site's dataset settings {path} must be a mapping: name: npz, ...")
    choose_kind({"dataset": written}, "dataset", {n: e.settings for n, e in DATA_SETS.items()})
    name = written["name"]
    check_sites(name)
    is_table = issubclass(DATA_SETS[name].settings, ds.CSV)
    if is_table and "id_column" not in written:
        raise ConfigError(
            f"{path} lacks id_column: name the column (of patients, cards, ...) whose value is the "
            "same in every export, which alone keeps records in their parts; null if there is "
            "none: then a new export charges its releases to the budgets of all parts."
        )
    fixed = {"cache": cache, "corrupt": "skip"}
    if is_table:
        fixed |= {"encoding": "utf-8", "decimal": "point", "thousands": "none"}
    leaks = {
        "limit_train": "one record more would put another one out, and two would count",
        "corrupt": "a record that cannot be read would end every run, and so tell that it is there",
    }
    for setting, leak in leaks.items():
        if written.get(setting, fixed.get(setting)) != fixed.get(setting):
            raise ConfigError(
                f"dataset.{setting}={show(written[setting])} in {path}: leave it out, since {leak}."
            )
    return data_settings(name, {**fixed, **written})


@dataclass(frozen=True)
class OwnSettings(ds.Images, ds.Numbers, ds.Stored):
    """Settings of a data set that a function from outside the package reads."""


def own_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> tuple[DataSet, dict[str, Any]]:
    """Return entry and defaults of a data set of arrays, named as in an npz file."""

    def read(settings: ds.Arrays, path: Path) -> RecordsPair:
        from fednas_flwr.data.npz import records_from_npz

        return records_from_npz(settings, arrays, origin=f"dataset={name}")

    defaults = {"defaults": ["_encoded"], "statistics": {}, "ranges": {}}
    return DataSet(ds.Arrays, read, by_content=True), defaults


def _from_torch(train: Any, test: Any) -> RecordsPair:
    """Return the records of torch's data sets or loaders; there may be no test part.

    Raises:
        ConfigError: A part is not a torch data set or loader of (example, class) with a length.
    """
    import numpy as np

    from fednas_flwr.data.npz import plain, records_from_npz

    arrays: dict[str, np.ndarray] = {}
    classes: list[str] = []
    for part, data in {"train": train, "test": test}.items():
        if data is None and arrays:
            continue
        try:
            whole, rows = _chosen(data)
            items = (whole[row] for row in rows)
            pairs = (item.values() if isinstance(item, Mapping) else item for item in items)
            examples, labels = zip(*pairs, strict=True)
            arrays[f"x_{part}"] = np.stack([np.asarray(plain(example)) for example in examples])
            arrays[f"y_{part}"] = np.stack([np.asarray(plain(label)) for label in labels])
        except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
            raise ConfigError(
                f"the reader of your own returns {type(data).__name__} ({error}): expected "
                "Records, or torch data sets whose items are (example, class) of one shape."
            ) from error
        classes = classes or _classes_of(whole)
    settings: Any = data_settings("npz", {"class_names": classes})
    return records_from_npz(settings, arrays, origin="the reader of your own")


def _chosen(data: Any) -> tuple[Any, Sequence[int]]:
    """Return a torch data set, and the examples in it that a loader's sampler chooses.

    Raises:
        TypeError: The sampler draws examples at random.
    """
    import numpy as np
    from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

    if not isinstance(data, DataLoader):
        return data, range(len(data))
    whole: Any = data.dataset
    sampler = getattr(data.batch_sampler, "sampler", data.batch_sampler or data.sampler)
    chosen = getattr(sampler, "indices", sampler)
    if isinstance(sampler, RandomSampler | SequentialSampler) and len(sampler) == len(whole):
        chosen = range(len(whole))
    rows = np.asarray(chosen)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise TypeError(f"{type(sampler).__name__} draws its examples: choose them by a Subset")
    return whole, rows.tolist()


def _classes_of(data: Any) -> list[str]:
    """Return the names of a data set's classes, as torchvision and Hugging Face give them."""
    while not hasattr(data, "classes") and hasattr(data, "dataset"):  # such as a Subset
        data = data.dataset
    features = getattr(data, "features", None)
    columns = features.values() if isinstance(features, Mapping) else ()
    named = [column.names for column in columns if getattr(column, "names", None)]
    return list(map(str, getattr(data, "classes", named[0] if named else ())))


def own_reader(reader: Callable[..., Any], names: Iterable[str]) -> tuple[DataSet, dict[str, Any]]:
    """Return entry and defaults of a data set that a function reads.

    Args:
        reader: Function of the path ``dataset.root`` and of the named settings as keyword
            arguments.
        names: Names of settings of other data sets that it takes.

    Raises:
        ConfigError: There is no setting of such a name.
    """
    hints: dict[str, Any] = {}
    neutral: dict[str, Any] = {}
    for kind in ("npz", "labelled_images", "csv"):
        hints |= get_type_hints(DATA_SETS[kind].settings, include_extras=True)
        neutral |= _neutral(kind)
    taken = list(names)
    for setting in taken:
        check_choice("setting", setting, hints)

    def read(settings: ds.Dataset, path: Path) -> RecordsPair:
        from fednas_flwr.data.records import Records

        found = reader(path, **{setting: getattr(settings, setting) for setting in taken})
        if isinstance(found, Mapping) and "train" in found:
            found = found["train"], found.get("validation", found.get("val")), found.get("test")
        train, *others = found if isinstance(found, tuple) else (found,)
        others = [part for part in others if part is not None]
        test = others[-1] if others else None
        pair = (train, test) if isinstance(train, Records) else _from_torch(train, test)
        if len(others) > 1:
            note = "the last part is the test set, and none between it and the first is read"
            pair = replace(pair[0], notes=(note, *pair[0].notes)), pair[1]
        return pair

    more = [setting for setting in taken if setting not in get_type_hints(OwnSettings)]
    settings = make_dataclass(
        "ReaderSettings", [(s, hints[s]) for s in more], bases=(OwnSettings,), frozen=True
    )
    defaults = {"root": None, "statistics": {}, "ranges": {}, **{s: neutral[s] for s in more}}
    return DataSet(settings, read, by_content=True), {"defaults": ["_images"], **defaults}
