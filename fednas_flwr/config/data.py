"""Settings of the records: which there are, how they are read, and which client holds which."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fednas_flwr.config.parsing import conf_folder
from fednas_flwr.errors import ConfigError, show
from fednas_flwr.foreign import check_resolved, read_yaml
from fednas_flwr.names import CORRUPT_RULES, DECIMALS, MISSING_RULES, NO_TRANSFORM, TRANSFORMS
from fednas_flwr.search.settings import Count, CountOrZero, Positive, Share, ShareAbove0
from fednas_flwr.typed import Between, Checked, Length, OneOf, Text, check_distinct, parse

# of one side, in pixels: an image of more takes 800 MB
ImageSize = Annotated[int, Between(1, 16_384, reason="in pixels")]


@dataclass(frozen=True)
class Scattering(Checked):
    """Sizes of the scattering transform (``data.scattering``).

    Attributes:
        scales: Scales of wavelets (J); each halves the sides of the features.
        angles: Angles of wavelets (L).
    """

    scales: Annotated[int, Between(1, 5, reason="every one halves the sides")]
    angles: Annotated[int, Between(1, 16, reason="channels grow with its square")]


@dataclass(frozen=True)
class CellAccuracies(Checked):
    """A published table of all cells of NAS-Bench-201.

    Attributes:
        file: File of the table.
        columns: Columns of accuracies; a cell's percentile is that of the mean of its ranks.
    """

    file: Text
    columns: Annotated[list[str], Length(Between(1))]


@dataclass(frozen=True)
class Dataset(Checked):
    """Which records there are, how they are read, and how each client splits its own.

    The keys from ``image_size`` on are for some readers only; ``data.datasets.prepare`` explains
    all that it takes and refuses what has no effect.

    Attributes:
        root: File or folder of the data, where the data set needs one.
        download: If true, torchvision may fetch missing files.
        cache: Folder of prepared tensors.
        server_test: If true, the server holds a public test set, the official one or a fifth of the
            records.
        limit_train: At most so many of the clients' records; null for all.
        limit_test: At most so many of the server's test records; null for all.
        fractions: Shares of train, validation and test of each client's records.
        split_key: The site's secret text that fixes which record goes where.
        mean: Per channel of images scaled to 0..1; empty is .5.
        std: Standard deviations per channel, like ``mean``.
        crop_padding: Training images are shifted by up to so many pixels.
        flip: Training images are mirrored at random.
        cutout: Side of the square that is blanked in training images, in pixels.
        linear_baseline: If true, a simulation also reports logistic regression on the pooled
            records.
        table: Published accuracies of all cells (``fednas lookup``), by which the report shows the
            search; no choice depends on them.
        image_size: Side in pixels to which encoded images are resized; null keeps theirs.
        channels: 1 or 3, of encoded images; null is that of the first.
        class_names: Names of the classes in their order; empty finds them in the data.
        labels_file: Name of a table in an image folder whose first column names the images, with
            columns as of tables: ``label``, ``labels``, ``label_separator``, ``id_column``. Null:
            the folders are the classes.
        label: A table's column with the class, ``last`` being the last one.
        labels: A table's columns of 0 and 1, one per label, where a record can have several; in
            place of ``label``.
        label_separator: Separator of several labels in the column ``label``, such as ``;``; null:
            a record has one class.
        id_column: A table's column that names the person a row is of; of an image folder any name
            says that it has ``<class>/<person>/``. The person is then the unit of privacy.
        numeric: A table's columns of numbers; empty finds them.
        dates: A table's columns of dates; empty finds them. They become days since 1970.
        categorical: A table's columns of categories; empty finds them.
        categories: Categories by column, where the data may lack some.
        ignore: A table's columns that are no features.
        statistics: Public ``{column: [mean, std]}``; empty has all clients find them together.
        ranges: Public ``{column: [low, high]}`` in place of statistics, of all or some columns;
            what is usual, as numbers beyond them are kept.
        corrupt: Records that cannot be read: ``refuse`` ends the run and names them, ``skip``
            leaves each out by itself, as private sites always do.
        intensity: Intensities of 16-bit images that become 0 and 255; null is 0 to 65535.
        separator: Separator of a table's cells; null finds it in the file.
        encoding: Encoding of a table's text; null finds it.
        decimal: Sign in a table's numbers; null finds it.
        missing_values: Texts that mean that a cell is missing, such as ``unknown``.
        missing: Replacement for a missing number: the ``mean``, or the mean and a feature that
            flags it (``indicator``).
        transform: Transform of images before anything is learnt: ``none``, or ``scattering`` for
            fixed features, with which private training loses less.
        scattering: Sizes of that transform.
    """

    name: str
    root: Text | None
    download: bool
    cache: Text
    server_test: bool
    limit_train: Count | None
    limit_test: Count | None
    fractions: dict[str, Share]
    split_key: Annotated[str, Length(Between(1, 64))]
    mean: list[float]
    std: list[Positive]
    crop_padding: CountOrZero
    flip: bool
    cutout: CountOrZero
    linear_baseline: bool
    table: CellAccuracies | None
    image_size: ImageSize | None
    channels: Annotated[int, Between(1, 3, reason="1 or 3")] | None
    class_names: list[str]
    labels_file: Text | None
    label: str
    labels: list[str]
    label_separator: Text | None
    id_column: str | None
    numeric: list[str]
    dates: list[str]
    categorical: list[str]
    categories: dict[str, list[str]]
    ignore: list[str]
    statistics: dict[str, list[float]]
    ranges: dict[str, list[float]]
    corrupt: Annotated[str, OneOf(CORRUPT_RULES)]
    intensity: Annotated[list[float], Length(Between(2, 2))] | None
    separator: Annotated[str, Length(Between(1, 1))] | None
    encoding: Text | None
    decimal: Annotated[str, OneOf(DECIMALS)] | None
    missing_values: list[str]
    missing: Annotated[str, OneOf(MISSING_RULES)]
    transform: Annotated[str, OneOf(TRANSFORMS)]
    scattering: Scattering

    def __post_init__(self) -> None:
        """Check the ranges, and that no name is given twice."""
        super().__post_init__()
        if self.intensity and not self.intensity[0] < self.intensity[1]:
            raise ConfigError(f"intensity={self.intensity} must be [low, high], low below high.")
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except LookupError:
                raise ConfigError(
                    f"encoding={show(self.encoding)} is unknown: expected one such as utf-8, "
                    "utf-16 or cp1252, or null to find it."
                ) from None
        for name in (
            "class_names",
            "labels",
            "numeric",
            "dates",
            "categorical",
            "ignore",
            "missing_values",
        ):
            check_distinct(name, getattr(self, name))
        for column, categories in self.categories.items():
            check_distinct(f"categories.{column}", categories)
        columns = [*self.numeric, *self.dates, *self.categorical, *self.ignore]
        check_distinct("numeric, dataset.dates, dataset.categorical and dataset.ignore", columns)

    @property
    def augmentation(self) -> dict[str, Any]:
        """Augmentation of training images, by setting; nothing to features that are made once."""
        names = ("crop_padding", "flip", "cutout")
        return {
            name: 0 if self.transform != NO_TRANSFORM else getattr(self, name) for name in names
        }


@dataclass(frozen=True)
class Partition(Checked):
    """Which client holds which records; see ``data.partitioners.partition``.

    Attributes:
        seed: Seed of random divisions; not the run's seed, so that parties keep their records over
            runs.
        file: A saved partition.json to use instead.
        alpha: Concentration of the Dirichlet draws; the smaller, the more unequal.
        min_size: Fewest records of a client, below which is drawn again.
        groups: Groups of classes, for ``label_groups``; empty is FDNAS' three.
        clients_per_group: Number of clients that share each group of classes.
        fractions: Sizes of the clients, for ``quantity``; empty draws them.
        column: Column whose values name the clients.
    """

    name: str
    seed: int
    file: Text | None
    alpha: Positive
    min_size: Count
    groups: list[list[int]]
    clients_per_group: list[Count]
    fractions: list[ShareAbove0]
    column: str | None


def site_dataset(path: Path, *, cache: str) -> Dataset:
    """Return how a private site reads its own data: whatever the run says, the site's file counts.

    A setting that the server could choose would be a question to the records: whether they can be
    read, augmented or cached with it. One that is found in the records would let each of them
    change all others: a table is UTF-8 with decimal points unless its file says otherwise. A record
    that cannot be read is left out by itself (``corrupt: skip``).

    Args:
        path: A YAML file of ``dataset`` settings; what it leaves out is as in
            ``conf/dataset/_base.yaml``, but for ``corrupt``, and ``encoding`` and ``decimal`` of a
            table.
        cache: Where prepared records go.

    Raises:
        ConfigError: The file cannot be read, a setting is wrong, or that of a table does not say
            which column gives ids.
    """
    given = read_yaml(path, f"the site's dataset settings {path}")
    check_resolved(given, str(path))
    if not isinstance(given, Mapping):
        raise ConfigError(f"the site's dataset settings {path} must be a mapping: name: npz, ...")
    if given.get("name") == "csv" and "id_column" not in given:
        raise ConfigError(
            f"{path} lacks id_column: name the column (of patients, cards, ...) whose value is the "
            "same in every export, which alone keeps records in their parts; null if there is "
            "none: then a new export charges its releases to the budgets of all parts."
        )
    base = read_yaml(conf_folder() / "dataset" / "_base.yaml", "the defaults of data sets")
    base |= {"cache": cache, "corrupt": "skip"}
    if given.get("name") == "csv":
        base |= {"encoding": "utf-8", "decimal": "point"}
    dataset: Dataset = parse(Dataset, {**base, **given}, key="dataset", hints={})
    if dataset.limit_train is not None:
        raise ConfigError(
            f"dataset.limit_train={dataset.limit_train} in {path}: leave it out, since one record "
            "more would put another one out, and two would count."
        )
    if dataset.corrupt != "skip":
        raise ConfigError(
            f"dataset.corrupt={dataset.corrupt} in {path}: leave it out, since one record that "
            "cannot be read would end every run, and so tell that it is there."
        )
    return dataset
