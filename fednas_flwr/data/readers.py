"""The data sets there are: the settings of each, where its files lie, and how it is read.

A kind of data set is a class of settings, a reader and an entry of :data:`DATA_SETS`, with a file
of ``conf/dataset``. Readers are imported when they are called, since torch takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, make_dataclass
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
        reader: Called with the settings and the file or folder to read, which is the settings' own
            or a site's; returns the train part and the official test part, None where there is
            none. Or its place in this package, ``<module>:<function>``, which is imported then.
        roots: Kinds of places that ``dataset.root`` may be, ``file`` and ``folder``; empty if it
            needs none.
        sites: Endings of the sites in a folder, one of which ``read`` then gets; empty if the set
            cannot be divided by sites.
        folder: Folder of its files below the root.
        by_content: True if the records decide if a cached copy is the same, and not the files.
    """

    settings: type[ds.Dataset]
    reader: str | Callable[[Any, Path], RecordsPair]
    roots: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    folder: str = ""
    by_content: bool = False

    def read(self, settings: ds.Dataset, path: Path) -> RecordsPair:
        """Train part and official test part in a file or folder."""
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
    """Raise ConfigError unless a data set can be divided by sites."""
    if not DATA_SETS[name].sites:
        *others, last = (name for name, entry in DATA_SETS.items() if entry.sites)
        raise ConfigError(
            f"partition=sites does not fit dataset.name={name}: use {', '.join(others)} or {last}."
        )


def data_settings(name: str, values: Mapping[str, Any]) -> ds.Dataset:
    """Settings of a data set, checked; what is not given is neutral (:func:`_neutral`)."""
    values = {**_neutral(name), "name": name, **values}
    return parse(DATA_SETS[name].settings, values, key="dataset", defaults=True)


def _neutral(name: str) -> dict[str, Any]:
    """Settings in a file of ``conf/dataset`` without what it recommends in place of its bases'."""
    path = conf_folder() / "dataset" / f"{name}.yaml"
    tree: dict[str, Any] = read_yaml(path, "the defaults of data sets")
    for base in tree.pop("defaults", ()):
        tree |= _neutral(base)
    return tree


def site_dataset(path: Path, *, cache: str) -> ds.Dataset:
    """Return a private site's settings of its own data, from its file, whatever the run says.

    A setting that the server could choose would be a question to the records: whether they can be
    read, augmented or cached with it. One that is found in the records would let each of them
    change all others: a table is UTF-8 with decimal points unless its file says otherwise. A record
    that cannot be read is left out by itself (``corrupt: skip``).

    Args:
        path: A YAML file of ``dataset`` settings; what it leaves out is as in the files
            ``conf/dataset/_*.yaml``, but for ``corrupt``, and ``encoding`` and ``decimal`` of a
            table.
        cache: Where prepared records go.

    Raises:
        ConfigError: The file cannot be read, a setting is wrong, or that of a table does not say
            which column gives ids.
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
    """Settings of a data set that is read by a function from outside the package."""


def own_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> tuple[DataSet, dict[str, Any]]:
    """Entry and defaults of a data set of arrays as an npz file has them."""

    def read(settings: ds.Arrays, path: Path) -> RecordsPair:
        from fednas_flwr.data.npz import records_from_npz

        return records_from_npz(settings, arrays, origin=f"dataset={name}")

    defaults = {"defaults": ["_encoded"], "statistics": {}, "ranges": {}}
    return DataSet(ds.Arrays, read, by_content=True), defaults


def _from_torch(parts: tuple[Any, ...]) -> RecordsPair:
    """Records of the train part and, unless it is None, the test part: data sets or loaders.

    Raises:
        ConfigError: They are not, or not of (example, class) with a length.
    """
    import numpy as np

    from fednas_flwr.data.npz import records_from_npz

    arrays: dict[str, np.ndarray] = {}
    classes: list[str] = []
    for part, part_data in zip(("train", "test"), parts, strict=False):
        if part_data is None:
            continue
        data = getattr(part_data, "dataset", part_data)  # of a loader
        try:
            items = (data[index] for index in range(len(data)))
            pairs = (item.values() if isinstance(item, Mapping) else item for item in items)
            examples, labels = zip(*pairs, strict=True)
            arrays[f"x_{part}"] = np.stack([np.asarray(example) for example in examples])
            arrays[f"y_{part}"] = np.stack([np.asarray(label) for label in labels])
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"the reader of your own returns {type(part_data).__name__} ({error}): expected "
                "Records, or torch data sets whose items are (example, class) of one shape."
            ) from error
        classes = classes or list(map(str, getattr(data, "classes", ())))
    settings: Any = data_settings("npz", {"class_names": classes})
    return records_from_npz(settings, arrays, origin="the reader of your own")


def own_reader(reader: Callable[..., Any], names: Iterable[str]) -> tuple[DataSet, dict[str, Any]]:
    """Entry and defaults of a data set that a function reads.

    Args:
        reader: Called with the path ``dataset.root`` and the named settings as keyword arguments.
        names: Settings of other data sets that it takes.

    Raises:
        ConfigError: There is no such setting.
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
            found = found["train"], found.get("test")
        parts = found if isinstance(found, tuple) else (found, None)
        return parts if isinstance(parts[0], Records) else _from_torch(parts)

    shared = get_type_hints(OwnSettings)
    more = [setting for setting in taken if setting not in shared]
    settings = make_dataclass(
        "ReaderSettings", [(s, hints[s]) for s in more], bases=(OwnSettings,), frozen=True
    )
    defaults = {"root": None, "statistics": {}, "ranges": {}, **{s: neutral[s] for s in more}}
    return DataSet(settings, read, by_content=True), {"defaults": ["_images"], **defaults}
