"""Settings of the records: the data set, how it is read, and how clients divide it."""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from fednas_flwr.base.errors import show
from fednas_flwr.settings import names
from fednas_flwr.settings import parser as ps
from fednas_flwr.settings.optimizers import Count, CountOrZero, Positive, Share, ShareAbove0

# One side, in pixels; a larger image takes 800 MB.
ImageSize = Annotated[int, ps.Between(1, 16_384, reason="in pixels")]
Fractions = Annotated[
    dict[str, Share],
    ps.Where(
        lambda shares: shares.keys() == {*names.SPLITS} and abs(sum(shares.values()) - 1) <= 1e-6,
        "shares of train, validation and test that sum to 1",
    ),
]
_ENDS = ps.Where(
    lambda ends: len(ends) == 2 and 0 < ends[1] - ends[0] < math.inf,
    "finite [low, high], low below high",
)
Ends = Annotated[list[float], _ENDS]
Span = Annotated[list[ps.Day], _ENDS]
_MEAN_AND_STD = ps.Where(
    lambda pair: len(pair) == 2 and pair[1] > 0, "[mean, std] with std above 0"
)
_SIGN = ps.Where(lambda sign: len(sign.encode()) == 1 or sign == "tab", "one sign of ASCII, or tab")
_GRAY_OR_COLOUR = ps.Where(lambda channels: channels in (1, 3), "1 or 3")


def uniform(ends: Sequence[float]) -> list[float]:
    """Return mean and standard deviation of the uniform distribution over a range."""
    low, high = ends
    return [(low + high) / 2, (high - low) / math.sqrt(12)]


def _is_encoding(name: str) -> bool:
    try:
        return bool(codecs.lookup(name))
    except LookupError:
        return False


_ENCODING = ps.Where(_is_encoding, "one that Python knows, such as utf-8, utf-16 or cp1252")
_IN_ROOT = ps.Where(
    lambda name: Path(name).name == name,
    "the name of a file in dataset.root, or in its folders train and test",
)


@dataclass(frozen=True)
class Scattering(ps.Checked):
    """Sizes of the scattering transform (``data.features``).

    Attributes:
        scales: Number of scales of wavelets (J); each halves the sides of the features.
        angles: Number of angles of wavelets (L).
    """

    scales: Annotated[int, ps.Between(1, 5, reason="every one halves the sides")]
    angles: Annotated[int, ps.Between(1, 16, reason="channels grow with its square")]


@dataclass(frozen=True)
class Backbone(ps.Checked):
    """A frozen network that was trained on public images (``data.features``).

    Attributes:
        name: Name of its architecture in timm or torchvision, such as ``tf_efficientnet_lite0``;
            ``torchvision/<name>`` if both have one of that name.
        weights: File of its weights, as safetensors or a state dict; null fetches it from the Hub.
        image_size: Side in pixels to which images are resized; null is that of its training.
        output: ``pooled`` features for heads, or the ``map`` of its last stage for spaces of cells.
    """

    name: ps.Text
    weights: ps.Text | None = None
    image_size: ImageSize | None = None
    output: Annotated[str, ps.OneOf(names.OUTPUTS)] = names.POOLED


Transform = Scattering | Backbone


@dataclass(frozen=True)
class Dataset(ps.Checked):
    """Settings that every data set has; the classes below add those of one way of reading.

    Attributes:
        name: Name of the choice, a key of ``data.readers.DATA_SETS``.
        cache: Folder of prepared tensors.
        server_test: If true, the server holds a public test set: the official one, or a fifth of
            the records, chosen by a public keyed hash of their ids. If false, an official test part
            stays unused, and all other records go to clients.
        limit_train: Largest number of the clients' records to use, those of smallest keyed hash;
            null uses all.
        limit_test: Largest number of the server's test records to use; null uses all.
        fractions: Shares of train, validation and test in each client's records.
        split_key: The site's secret text that fixes the split of each record.
        linear_baseline: If true, a simulation also reports logistic regression on the pooled
            records; for a target that is a number, ridge regression.
    """

    name: str
    cache: ps.Text
    server_test: bool
    limit_train: Count | None
    limit_test: Count | None
    fractions: Fractions
    split_key: Annotated[str, ps.Length(ps.Between(1, 64))]
    linear_baseline: bool

    @property
    def place(self) -> Path | None:
        """File or folder of the data; None if it needs none or none is set."""
        return None

    def at(self, root: str) -> "Dataset":
        """The same settings with another place of the data; the same ones if data needs none."""
        return self

    @property
    def division(self) -> dict[str, Any]:
        """Key and fractions that fix which record goes where, as ``assign_splits`` takes them."""
        return {"key": self.split_key.encode(), "fractions": self.fractions}

    @property
    def person_column(self) -> str:
        """Name of the column of persons; empty if every record is a person of its own."""
        return getattr(self, "id_column", None) or ""

    @property
    def transform(self) -> Transform | None:
        """The transform that makes features of images; None if networks take the records."""
        return None

    @property
    def augmentation(self) -> dict[str, Any]:
        """Augmentation of training images, by setting; all zero without images."""
        return {"crop_padding": 0, "flip": False, "cutout": 0}

    @property
    def column_statistics(self) -> dict[str, list[float]]:
        """``{column: [mean, std]}`` of the columns of a table for which it is declared."""
        return {}

    @property
    def has_bounds(self) -> bool:
        """True if records have public bounds: ranges and no statistics, or pooled features."""
        backbone, ranges = (getattr(self, name, None) for name in ("backbone", "ranges"))
        is_pooled = backbone is not None and backbone.output == names.POOLED
        return is_pooled or bool(ranges and not getattr(self, "statistics", None))

    @property
    def declared(self) -> dict[str, bool]:
        """Settings that the records would decide if they are not given; true if given."""
        return {}


@dataclass(frozen=True)
class Stored(Dataset):
    """Data in a file or folder.

    Attributes:
        root: File or folder of the data.
    """

    root: ps.Text | None

    @property
    def place(self) -> Path | None:
        """File or folder of the data; None where none is set."""
        return None if self.root is None else ps.expanded("dataset.root", self.root)

    def at(self, root: str) -> Dataset:
        """The same settings with another place of the data."""
        return replace(self, root=root)


@dataclass(frozen=True)
class Images(Dataset):
    """Images, and how they are changed before and during training.

    Attributes:
        mean: Means per channel, of images scaled to 0..1; empty is .5.
        std: Standard deviations per channel, like ``mean``.
        crop_padding: Largest shift of training images, in pixels.
        flip: If true, training images are mirrored at random, and features of a ``backbone`` are
            the mean of those of an image and of its mirror image.
        cutout: Side of the square that is blanked in training images, in pixels.
        scattering: Fixed features that replace the images before any training; private training
            then loses less. Null keeps the images.
        backbone: Features of a frozen network that was trained on public images, in place of
            ``scattering``; they help most where images are few.
    """

    mean: list[float]
    std: list[Positive]
    crop_padding: CountOrZero
    flip: bool
    cutout: CountOrZero
    scattering: Scattering | None
    backbone: Backbone | None

    @property
    def transform(self) -> Transform | None:
        """The transform that makes features of images; None if networks take the images."""
        return self.backbone or self.scattering

    @property
    def augmentation(self) -> dict[str, Any]:
        """Augmentation in training, by setting; none for features, which are made once."""
        if self.transform is not None:
            return super().augmentation
        return {name: getattr(self, name) for name in super().augmentation}


@dataclass(frozen=True)
class EncodedImages(Images):
    """Images in files of their own, of any size and format, which are converted to one form.

    Attributes:
        image_size: Side in pixels to which encoded images are resized (bilinear, to a square); null
            keeps their size, which must be the same for all. A backbone has its own size.
        channels: Number of channels of encoded images, 1 or 3; null is 3 if any image is in colour.
        class_names: Names of the classes in their order; empty finds them in the data.
        corrupt: Treatment of records that cannot be read: ``refuse`` ends the run and names them,
            ``skip`` leaves out each of them, as private sites always do.
        intensity: Intensities [low, high] that become 0 and 255; values outside are cut. Null is 0
            to 65535 for images of 16 bits, 0 to 1 for floats, and each image's own window for
            DICOM.
    """

    image_size: ImageSize | None
    channels: Annotated[int, _GRAY_OR_COLOUR] | None
    class_names: ps.Words
    corrupt: Annotated[str, ps.OneOf(names.CORRUPT_RULES)]
    intensity: Ends | None

    @property
    def declared(self) -> dict[str, bool]:
        """Settings that the records would decide if they are not given; true if given."""
        size = self.image_size is not None or self.backbone is not None
        sizes = {"image_size": size, "channels": self.channels is not None}
        return {"class_names": bool(self.class_names), **sizes}


@dataclass(frozen=True)
class Numbers(Dataset):
    """Rows of numbers, with what is publicly known of their columns.

    Attributes:
        statistics: Public ``{column: [mean, std]}``, by which all clients standardise; if empty,
            they find these together.
        ranges: Public ``{column: [low, high]}`` for all or some columns, in place of statistics.
            Give the usual range; values outside it are kept, not cut. For dates, give ISO dates.
    """

    statistics: dict[str, Annotated[list[float], _MEAN_AND_STD]]
    ranges: dict[str, Span]

    def conflicts(self) -> ps.Conflicts:
        """Exclude a column that has both."""
        for column in self.ranges:
            yield (
                column in self.statistics,
                f"ranges.{column} has no effect beside dataset.statistics.{column}: remove one",
            )

    @property
    def column_statistics(self) -> dict[str, list[float]]:
        """``{column: [mean, std]}`` of the declared columns, without reading a record.

        A range gives those of :func:`uniform`.
        """
        return {**self.statistics, **{c: uniform(ends) for c, ends in self.ranges.items()}}


@dataclass(frozen=True)
class LabelTable(Dataset):
    """A table with labels, one or several per record.

    Attributes:
        task: What is predicted: a class or several labels (``classification``), or a number
            (``regression``). Null is ``regression`` with ``target_range``; otherwise the label
            column decides: numbers with decimals, or with many different values, are predicted as
            numbers. At private sites null is classification. Ordered classes and survival times
            are not supported.
        target_range: Public [low, high] of a number to predict. Targets in training, and
            predictions, are clipped to it and standardised by it. Needed with privacy, and where
            the statistics or ranges of the features are declared; null lets the clients find mean
            and deviation together.
        class_names: The label's values in class order; empty takes those found, sorted.
        label: Name of the column with the class; ``last`` is the last column.
        labels: Columns of 0 and 1 (or no and yes, false and true), one per label, if a record can
            have several labels; in place of ``label``.
        label_separator: Separator of several labels in the column ``label``, such as ``;``; null
            means that a record has one class.
        id_column: Column that names the person (a patient, a card) of each row, the same in every
            export; it is not a feature. The person is then the unit of privacy.
    """

    task: Annotated[str, ps.OneOf(names.TASKS)] | None
    target_range: Ends | None
    class_names: ps.Words
    label: str
    labels: ps.Names
    label_separator: ps.Text | None
    id_column: str | None

    def conflicts(self) -> ps.Conflicts:
        """Exclude labels that are named in two ways, and ``labels`` with one column."""
        others = {
            "label": self.names_label,
            "label_separator": self.label_separator,
            "class_names": self.class_names,
        }
        for setting, value in others.items():
            yield (
                value and self.labels,
                f"{setting} has no effect with dataset.labels={show(self.labels)}, which names one "
                "column per label: remove one of the two",
            )
        of_classes = self.class_names or self.labels or self.label_separator
        yield (
            self.is_regression and (of_classes or self.task == names.CLASSIFICATION),
            "task=regression and dataset.target_range are for a number to predict, but another of "
            "dataset.task, class_names, labels and label_separator is for classes: remove one",
        )
        yield (
            len(self.labels) == 1,
            f"labels={show(self.labels)} names one column, but is for records that can have "
            f"several labels: set dataset.label={', '.join(self.labels)}",
        )

    @property
    def is_regression(self) -> bool:
        """True if the settings say that a number is predicted."""
        return self.task == names.REGRESSION or self.target_range is not None

    @property
    def names_label(self) -> bool:
        """True if the label column is given by its name."""
        return self.label not in ("", "last")

    @property
    def declared(self) -> dict[str, bool]:
        """Settings that the records would decide if they are not given; true if given."""
        return {
            **super().declared,
            "class_names": bool(self.class_names or self.labels or self.is_regression),
            "label or labels": self.names_label or bool(self.labels),
        }


@dataclass(frozen=True)
class Torchvision(Images, Stored):
    """A data set of torchvision.

    Attributes:
        download: If true, torchvision may download missing files.
    """

    download: bool


@dataclass(frozen=True)
class ImageFolder(EncodedImages, Stored):
    """Images in one folder per class.

    Attributes:
        id_column: Column that names the person of each record; the person is then the unit of
            privacy. Without a table any name, if the images are in ``<class>/<person>/``: the
            records then get a column of this name.
    """

    id_column: str | None


@dataclass(frozen=True, kw_only=True)
class TableForm(ps.Checked):
    """Format of a table's file, and treatment of rows that do not fit it.

    Attributes:
        separator: Separator of cells, one character or ``tab``; null finds it in the file.
        encoding: Python's name of the encoding of a text that is not UTF-8; null finds it.
        header: ``true`` if the first line has the names of columns; null refuses the file if that
            line looks like a record.
        column_names: Names of the columns of a file without a header or, with ``header=true``, in
            place of those in the file; empty takes those in the file.
        decimal: Decimal sign of numbers; null finds it. Labels, ids and categories are never
            changed.
        thousands: Sign between groups of three digits; null finds it.
        date_order: Order of dates such as 5/31/2024; null finds it.
        missing_values: Texts that mean that a cell is missing, such as ``unknown``, besides empty
            cells and pandas' own (NA, null, nan, ...).
        missing_in: The same by column, in place of all these: with ``{country: []}`` NA is a
            country.
        rename: New names of columns, by their names in the file.
        map: New spellings of cells, by column: ``{sex: {M: 1, F: 0}}``; an empty cell is spelled
            ``blank``.
        scale: Factors of numbers, by column, to convert units: ``{chol: 38.67}``.
        corrupt: Treatment of rows with a cell that is not as declared: ``refuse`` ends the run and
            names them, ``skip`` leaves out each of them, as private sites always do.
    """

    separator: Annotated[str, _SIGN] | None = None
    encoding: Annotated[ps.Text, _ENCODING] | None = None
    header: Annotated[bool, ps.Where(bool, "true")] | None = None
    column_names: ps.Names = field(default_factory=list)
    decimal: Annotated[str, ps.OneOf(names.DECIMALS)] | None = None
    thousands: Annotated[str, ps.OneOf(names.THOUSANDS)] | None = None
    date_order: Annotated[str, ps.OneOf(names.DATE_ORDERS)] | None = None
    missing_values: ps.Words = field(default_factory=list)
    missing_in: dict[str, ps.Words] = field(default_factory=dict)
    rename: dict[str, ps.Text] = field(default_factory=dict)
    map: dict[str, dict[str, ps.Word]] = field(default_factory=dict)
    scale: dict[str, Positive] = field(default_factory=dict)
    corrupt: Annotated[str, ps.OneOf(names.CORRUPT_RULES)] = "refuse"

    @property
    def strict(self) -> bool:
        """True if the reading of a row depends on no other row.

        Open quotes and rows of other widths than the header's are then refused, and a table may
        have no rows.
        """
        return self.corrupt == "skip"

    def conflicts(self) -> ps.Conflicts:
        """Exclude one sign for both decimals and thousands."""
        yield (
            self.thousands is not None and self.decimal == self.thousands,
            f"thousands={self.thousands} is the sign of fractions, too (dataset.decimal): correct "
            "one of the two",
        )


ANY_FORM = TableForm()  # everything is found in the file


@dataclass(frozen=True)
class LabelledImages(LabelTable, EncodedImages, Stored, TableForm):
    """Images in a folder, with their labels in a table.

    Attributes:
        labels_file: Name of the table in the folder. Its first column has the images' paths from
            the table's folder, or their bare names if no two images share one.
    """

    labels_file: Annotated[ps.Text, _IN_ROOT]


@dataclass(frozen=True)
class Arrays(EncodedImages, Numbers):
    """Plain arrays of images or of rows of numbers, or encoded images."""


@dataclass(frozen=True)
class Npz(Arrays, Stored):
    """Arrays in an npz file."""


@dataclass(frozen=True)
class CSV(LabelTable, Numbers, Stored, TableForm):
    """A table: CSV in any form, Excel, Parquet, Feather, Stata or JSON, also compressed.

    Attributes:
        numeric: Columns of numbers. If ``numeric``, ``dates`` and ``categorical`` are all empty,
            columns that hold only numbers are numeric, those that hold only dates are dates, and
            all others are categorical; else these three name all features.
        dates: Columns of dates, which become days since 1970.
        categorical: Columns of categories, one feature ``column=value`` per category.
        categories: Categories by column, if the data may lack some; an empty list stands for those
            found, sorted. A column of numbers that is named here is one of categories.
        ignore: Columns to leave out, such as a row number.
        missing: Replacement for a missing number: the ``mean``, or the mean and a feature that
            flags it (``indicator``).
    """

    numeric: ps.Names
    dates: ps.Names
    categorical: ps.Names
    categories: dict[str, ps.Words]
    ignore: ps.Names
    missing: Annotated[str, ps.OneOf(names.MISSING_RULES)]

    def __post_init__(self) -> None:
        """Check that no column has two uses."""
        super().__post_init__()
        label = [self.label] if self.names_label else self.labels
        others = {*self.ignore, *label, self.person_column} - {""}
        columns = [*self.numeric, *self.dates, *self.categorical, *sorted(others)]
        uses = (
            "label, dataset.labels, dataset.id_column, dataset.numeric, dataset.dates, "
            "dataset.categorical and dataset.ignore"
        )
        ps.Distinct().check(uses, columns, "")

    @property
    def declared(self) -> dict[str, bool]:
        """Settings that the records would decide if they are not given; true if given."""
        coded = [*self.categories, *self.categorical]
        return {
            **super().declared,
            "numeric or categorical": bool(self.numeric or self.dates or self.categorical),
            "categories": all(self.categories.get(name) for name in coded),
        }


@dataclass(frozen=True)
class Partition(ps.Checked):
    """``sites``: one folder or file of ``dataset.root`` per client, as at real sites."""

    name: str


@dataclass(frozen=True)
class SavedPartition(Partition):
    """``saved``: the division that another run has written.

    Attributes:
        file: The partition.json of that run.
    """

    file: ps.Text


@dataclass(frozen=True)
class ColumnPartition(Partition):
    """``column``: one client per value of a column of the table.

    Attributes:
        column: Name of the column whose values name the clients.
    """

    column: str | None


@dataclass(frozen=True)
class RandomPartition(Partition):
    """``iid``: equal shares at random.

    Attributes:
        seed: Seed of random divisions; not the run's seed, so that clients keep their records in
            all runs.
    """

    seed: int


@dataclass(frozen=True)
class LabelGroups(RandomPartition):
    """``label_groups``: each group of classes is divided evenly over clients of its own.

    Attributes:
        groups: Groups of classes, every class once; empty is FDNAS' three groups.
        clients_per_group: Number of clients that share each group of classes. Empty makes them as
            even as possible; the last groups may have one more (3, 3, 4 for ten clients).
    """

    groups: list[list[int]]
    clients_per_group: list[Count]


@dataclass(frozen=True)
class DirichletPartition(RandomPartition):
    """``dirichlet``: label skew; each class is divided by a draw from Dirichlet(alpha).

    Attributes:
        alpha: Concentration of the Dirichlet draws; smaller is more unequal.
        min_size: Fewest records of a client; if one has fewer, the division is drawn again.
    """

    alpha: Positive
    min_size: Count


@dataclass(frozen=True)
class QuantityPartition(DirichletPartition):
    """``quantity``: records at random in unequal sizes, drawn from Dirichlet(alpha).

    Attributes:
        fractions: Each client's share of the records; they sum to 1. Empty draws them.
    """

    fractions: list[ShareAbove0]


PARTITIONS: dict[str, type] = {
    "iid": RandomPartition,
    "dirichlet": DirichletPartition,
    "label_groups": LabelGroups,
    "quantity": QuantityPartition,
    "column": ColumnPartition,
    "sites": Partition,
    "saved": SavedPartition,
}
