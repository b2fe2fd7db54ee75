"""Estimators with scikit-learn's conventions: a federated run from a DataFrame or from arrays.

``FedClassifier(clients="hospital").fit(df, label="died")`` does the same as ``fednas run``, by the
same code, and leaves the same run folder. The fitted estimator holds the bytes of the exported
model, and predicts without that folder.
"""

import io
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.inspection import permutation_importance
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fednas_flwr.api import Result, compose, run, with_clients
from fednas_flwr.base.errors import ConfigError, check_choice, listed
from fednas_flwr.base.files import make_folder, write_atomically
from fednas_flwr.client.rehearsal import SELF_TESTS
from fednas_flwr.data.notation import are_numbers, merging_key
from fednas_flwr.data.npz import plain
from fednas_flwr.data.table_files import texts_of
from fednas_flwr.models.networks import load, load_description
from fednas_flwr.models.prediction import MODEL_FILE, Model
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.model_card import export_model
from fednas_flwr.report.templates import paragraphs
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import expanded, hydra_config, registry

FAST = ["experiment=search/data_free", "algorithm.draws=20", "algorithm.shortlist=null"]
FAST += ["retrain=recommended", "evaluation.baselines=0", "trackers=[]"]
PLAIN, PRIVATE = "experiment=search/recommended", "experiment=search/recommended_private"
PRIVATE_TABLES = {  # replaces the private preset for tables, by task: without a search
    "classification": "experiment=fedavg/private_table",
    "regression": "experiment=fedavg/private_numbers",
}
MORE = "evaluation.baselines=4"
PRESETS = {  # without and with privacy
    "fast": (FAST, FAST),
    "default": ([PLAIN], [PRIVATE]),
    "best": ([PLAIN, MORE, "algorithm.pool.keep=16"], [PRIVATE, MORE]),
}


@dataclass(kw_only=True, eq=False, repr=False)
class _Federated(BaseEstimator):  # type: ignore[misc]
    """Base of both estimators, whose parameters are those of :class:`FedClassifier`.

    Attributes:
        feature_names_in_: Names of the features in a DataFrame.
        n_features_in_: Number of features.
        run_folder_: The run folder, with report, events and models.
    """

    task: ClassVar[str]
    _target: ClassVar[Callable[..., Any]]  # converts targets to the form of the run

    clients: str | int | None = None
    metric: str | None = None
    epsilon: float | None = None
    time_limit: str | None = None
    preset: str = "default"
    settings: Sequence[str] = ()
    random_state: int | np.random.RandomState | np.random.Generator | None = None
    verbose: bool = False

    def fit(self, X: Any, y: Any = None, *, label: str | None = None, groups: Any = None) -> Self:
        """Search, train and export a network in a run folder.

        Records are written below ``dataset.cache`` and removed at the end. They are kept if the run
        is interrupted or cut short and can go on by ``fednas run resume=<run folder>``; its
        ``config.yaml`` names their folder, which you must then remove yourself.

        Args:
            X: A table, as a DataFrame of pandas or another library or an array [N, F]; or images,
                as an array in a form of ``dataset=npz``.
            y: The target [N]; None if it is a column of ``X``.
            label: Name of that column.
            groups: The client of each record [N].

        Raises:
            ValueError: The data is not of this form.
            ConfigError: The run is not possible with these settings and records.
        """
        X, site = plain(X), None
        if y is not None and label in getattr(X, "columns", ()):
            raise ValueError(f"X has a column {label} beside y: give y, or label={label!r} alone.")
        if y is None and label is not None:
            y, X = _taken(X, label)
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None: give y, or label.")
        if isinstance(self.clients, str) and groups is None:
            site = self.clients
            groups, X = _taken(X, site)
        X = self._checked(X, reset=True)
        if isinstance(y, pd.Series):  # of pandas' own types, too
            y = y.to_numpy(na_value=np.nan)
        y = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=None, input_name="y")
        y = pd.Series(y).infer_objects().to_numpy()
        groups = None if groups is None else column_or_1d(groups)
        check_consistent_length(X, y, groups)
        result = self._run(X, self._target(y), groups, label=label, site=site)
        load_description(result.folder)  # refuses a run that had no time for a model
        self._content = (result.folder / MODEL_FILE).read_bytes()
        self.run_folder_ = str(result.folder.resolve())
        return self

    def leaderboard(self) -> pd.DataFrame:
        """Return the delivered network and all models compared with it (``Result.leaderboard``)."""
        return pd.DataFrame(Result(self.run_folder).leaderboard())

    def report(self) -> Path:
        """Write the run's report, one offline page, and return its path."""
        return write_report(self.run_folder)

    def importance(self, X: Any, y: Any = None, *, label: str | None = None) -> pd.DataFrame:
        """Return the drop of the score when a column is shuffled, one row each, largest first.

        It uses five permutations (Breiman 2001); give records that training has not seen.

        Args:
            X: As in :meth:`fit`.
            y: As in :meth:`fit`.
            label: As in :meth:`fit`.
        """
        X = plain(X)
        y = X[label] if y is None else y
        X = self._checked(X)
        found = permutation_importance(self, X, y, random_state=self.random_state)
        names = getattr(self, "feature_names_in_", range(self.n_features_in_))
        columns = {"importance": found.importances_mean, "deviation": found.importances_std}
        return pd.DataFrame(columns, index=names).sort_values("importance", ascending=False)

    def export(self, path: str | Path) -> list[Path]:
        """Put the model, as safetensors and ONNX, and its card into a folder; return the files."""
        return export_model(self.run_folder, Path(path))

    @property
    def run_folder(self) -> Path:
        """The run folder; ConfigError if it is gone."""
        check_is_fitted(self)
        folder = Path(self.run_folder_)
        if not folder.is_dir():
            raise ConfigError(f"the run folder {folder} is gone: only predictions work without it.")
        return folder

    def _run(self, X: Any, y: Any, groups: Any, *, label: str | None, site: str | None) -> Result:
        """Run the settings on the records, which are in a file as long as the run takes."""
        check_choice("preset", self.preset, PRESETS)
        if X.ndim == 2:
            records = _table(X, y, groups, label=label, site=site, task=self.task)
        else:
            records = _images(X, y, groups, task=self.task)
        more = [self.settings] if isinstance(self.settings, str) else self.settings
        config = compose(*self._preset_for(records, more), *more)
        folder = _folder_of_a_fit(expanded("dataset.cache", config.dataset.cache))
        try:
            root = str(write_atomically(folder / "records", records.content))
            data: Any = replace(config.dataset, root=root, cache=str(folder))  # type: ignore[call-arg]
            if records.table is not None and not config.dp:  # privacy needs public facts declared
                data = replace(data, categories=_categories(records.table, data, records.named))
            if records.named:  # a class may be called NA, or as codes of other columns
                whole: dict[str, Any] = {column: [] for column in records.named}
                data = replace(data, missing_in=whole | data.missing_in)
            config = with_clients(replace(config, dataset=data), ())
            result = run(config, quiet=not self.verbose)
        except (KeyboardInterrupt, OSError, QuorumError):  # a run that can go on
            raise
        except ConfigError as error:
            shutil.rmtree(folder)
            text = str(error).replace(f"dataset.root={root}", root).replace(root, "the data")
            error.args = (text,)
            raise
        except BaseException:
            shutil.rmtree(folder)
            raise
        done = read_run(result.folder)
        for note in [*done.last("data").get("odd", ()), *paragraphs("left_out", done)]:
            warnings.warn(note, stacklevel=3)
        if done.status == "completed":
            shutil.rmtree(folder)
        else:
            go_on = f"fednas run resume={result.folder}"
            warnings.warn(f"the time limit has cut the fit short: {go_on}", stacklevel=3)
        return result

    def _preset_for(self, records: "_Records", more: Sequence[str]) -> list[str]:
        """Return the overrides of the preset and of the parameters for these records.

        Args:
            records: The records of the fit.
            more: The user's own overrides, which follow.
        """
        is_table, clients = records.table is not None, 1 if self.clients is None else self.clients
        follows = is_table and self.epsilon is None  # rounds follow from the records
        chosen: dict[str, Any] = {
            "seed": _seed(self.random_state),
            "privacy": None if self.epsilon is None else "dp",
            "privacy.epsilon": self.epsilon,
            "evaluation.metric": self.metric,
            "runtime.time_limit": self.time_limit,
            "retrain.rounds": 10 if self.preset == "fast" and not follows else None,
            "search_space": "mlp_small" if is_table else None,
            "clients": None if "partition" in records.settings else clients,
            **records.settings,
        }
        settings = [*PRESETS[self.preset][self.epsilon is not None]]
        named = [t.removeprefix("algorithm=") for t in more if t.startswith("algorithm=")]
        entry = registry.algorithms().get(named[-1]) if named else None
        if entry and named[-1] != "zero_cost":  # the preset's settings are for zero_cost
            settings = [text for text in settings if not text.startswith("algorithm.")]
        if entry and entry.search is None:  # for a given network
            chosen["search_space"] = None
        if settings == [PRIVATE] and is_table:
            settings, chosen["search_space"] = [PRIVATE_TABLES[self.task]], None
        given = {name: value for name, value in chosen.items() if value is not None}
        return settings + [f"{name}={hydra_config.quoted(value)}" for name, value in given.items()]

    def _checked(self, X: Any, *, reset: bool = False) -> Any:
        """Return features checked by scikit-learn; columns of a DataFrame may be of any kind."""
        X = plain(X)
        if isinstance(X, pd.DataFrame):
            known = getattr(self, "feature_names_in_", X.columns)
            if not reset and {*known} <= {*X.columns}:
                X = X.drop(columns=X.columns.difference(known, sort=False))
            if not X.columns.is_unique:
                twice = listed([*map(str, X.columns[X.columns.duplicated()].unique())], 5)
                raise ValueError(f"X has several columns {twice}: give each a name of its own.")
            validate_data(self, X, reset=reset, skip_check_array=True)
            return X
        form = {"ensure_all_finite": "allow-nan", "allow_nd": True, "ensure_min_samples": 1 + reset}
        X = validate_data(self, X, reset=reset, **form)
        return X.astype(np.uint8) if X.dtype == bool else X

    def _predicted(self, X: Any) -> Any:
        check_is_fitted(self)
        model, X = _loaded(self._content), self._checked(X)
        names = [column.name for column in model.inputs.schema]
        if X.ndim == 2 and names != [*map(str, range(self.n_features_in_))]:  # some are left out
            X = pd.DataFrame(X).add_prefix("")
        return model.predict(X)

    def __sklearn_tags__(self) -> Any:
        """Return the tags: missing values are allowed."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.target_tags.required = True
        return tags


class FedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    """A classifier that several clients train without showing their records.

    Args:
        clients: Division of records: a name divides by the values of that column, a number evenly
            among so many clients; None does not divide. ``fit(..., groups=...)`` overrules it.
        metric: Score by which networks are compared, see ``evaluation.metric`` of ``conf``.
        epsilon: Differential privacy of each client's records, as ``privacy.epsilon``; None is no
            privacy. With privacy, a table's ``dataset.ranges`` must be in ``settings``.
        time_limit: Time limit of the run, such as ``10min``, kept to within a round and the export;
            a warning says what was left out.
        preset: ``fast`` takes seconds and compares nothing. ``default`` is the recommended search;
            for a private table, ``fedavg/private_table``, or ``private_numbers`` to predict a
            number. ``best`` compares more networks, trained for as long.
        settings: Further settings, as for ``fednas run``; they overrule all others.
        random_state: Seed of the run, or a generator that draws one; None is 1.
        verbose: True shows the output of ``fednas run``.

    Attributes:
        classes_: Values of the target, in order.

    Example:
        ``FedClassifier(clients="hospital", preset="fast").fit(df, label="died").predict(df)``
    """

    task = "classification"

    def predict(self, X: Any) -> np.ndarray:
        """Return each record's class [N]: the most likely one, or by the report's threshold."""
        labels = self._predicted(X).labels
        places = {str(name): place for place, name in enumerate(self.classes_)}
        return np.asarray(self.classes_[[places[name] for name in labels]])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities, float [N, classes], in the order of ``classes_``."""
        found = self._predicted(X)
        columns = [found.class_names.index(str(name)) for name in self.classes_]
        return np.asarray(found.probabilities[:, columns])

    def _target(self, y: Any) -> Any:
        empty = np.flatnonzero(pd.isna(y) | (y.astype(str) == ""))
        if len(empty):
            raise ValueError(f"y has no class in record {empty[0]}: leave it out, or name one.")
        try:
            self.classes_ = np.unique(y)
        except TypeError:
            raise ValueError("y mixes numbers and texts as classes: use texts.") from None
        check_classification_targets(y)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]}: a classifier needs two or more."
            )
        names = [*map(str, self.classes_)]
        if padded := [name for name in names if name != name.strip()]:
            raise ValueError(f"the class {padded[0]!r} has outer blanks: change it.")
        return y.astype(str)


class FedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """A model of a number that several clients train without showing their records.

    Its parameters are those of :class:`FedClassifier`.

    Example:
        ``FedRegressor(clients="hospital", preset="fast").fit(df, label="days").predict(df)``
    """

    task = "regression"

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted target of each record [N], in its own unit."""
        return np.asarray(self._predicted(X).labels, dtype=float)

    def _target(self, y: Any) -> Any:
        if y.dtype.kind in "mM":
            raise ValueError(f"y holds times ({y[0]}): give a number of days, hours or the like.")
        return y.astype(float)


class _Records(NamedTuple):
    """The records of a fit.

    Attributes:
        content: Bytes of the file that the run reads.
        settings: Settings of the run that say what the file holds.
        table: The table in the file; None for images.
        named: The columns of classes and clients.
    """

    content: bytes
    settings: dict[str, Any]
    table: pd.DataFrame | None = None
    named: Sequence[str] = ()


def _table(
    X: Any, y: Any, groups: Any, *, label: str | None, site: str | None, task: str
) -> _Records:
    """Return the records of a table [N, columns] with its target and, if given, its clients."""
    table = pd.DataFrame(X).add_prefix("")
    names = [n if n is None else " ".join(str(n).split()) for n in (label, site)]
    label, site = (n if n in (label, site) else _free(str(n), table) for n in names)
    label = label or _free("label", [*table, site])
    settings, named = {"dataset": "csv", "dataset.label": label, "dataset.task": task}, [label]
    if groups is not None:
        site = site or _free("site", table)
        table[site] = groups
        named.append(site)
        settings |= {"partition": "column", "partition.column": site}
    table[label] = y  # the last column, which the name "last" stands for
    classes = [*map(str, np.unique(y))] if task == "classification" else []
    if len({*map(merging_key(classes), classes)}) < len(classes):
        alike = "some are read as one: give them other names"
        raise ValueError(f"of the classes {listed(classes, 5)} {alike}.")
    return _Records(_parquet(table), settings, table, named)


def _images(X: Any, y: Any, groups: Any, *, task: str) -> _Records:
    """Return the records of images with their classes."""
    if groups is not None or task == "regression":
        raise ValueError(
            f"images (shape {X.shape}) take no groups and no numbers as targets: give "
            "clients=<number>; classes go to FedClassifier."
        )
    arrays = io.BytesIO()
    np.savez(arrays, x_train=X, y_train=y)
    return _Records(arrays.getvalue(), {"dataset": "npz"})


def _seed(random_state: Any) -> int:
    """Return the seed of a run, drawn from a generator if that is given; 1 for None."""
    if draw := getattr(random_state, "integers", getattr(random_state, "randint", None)):
        return int(draw(2**31))
    return 1 if random_state is None else random_state


def _taken(frame: pd.DataFrame, column: str) -> tuple[pd.Series, pd.DataFrame]:
    """Return a column of a table, and the others."""
    if column not in getattr(frame, "columns", ()):
        have = listed(map(str, getattr(frame, "columns", ("no named columns",))), 8)
        raise ValueError(f"X has no column {column}: it has {have}.")
    return frame[column], frame.drop(columns=column)


def _free(name: str, columns: Collection[object]) -> str:
    """Return a name that no column has."""
    return name if name not in columns else _free(f"{name}_", columns)


def _categories(table: pd.DataFrame, data: Any, others: Collection[str | None]) -> dict[str, Any]:
    """Return the categories of features: as set, or numeric ones of pandas' type, as in cells.

    Args:
        table: Table of the records.
        data: Settings of the data; if they list the features, pandas' types do not count.
        others: Columns that are no features.
    """
    if data.numeric or data.dates or data.categorical:
        return dict(data.categories)
    found: dict[str, Any] = {}
    others = {*others, data.id_column, *data.ignore, *data.rename, *data.map, *data.scale}
    for name, kind in table.dtypes.items():
        name = " ".join(str(name).split())
        if isinstance(kind, pd.CategoricalDtype) and name not in others:
            cells = texts_of(pd.DataFrame({"x": kind.categories}))["x"]
            codes = cells.without({*data.missing_in.get(name, data.missing_values)}).different
            found |= {name: list(codes)} if codes and are_numbers(codes).all() else {}
    return found | dict(data.categories)


def _parquet(table: pd.DataFrame) -> bytes:
    """Return the Parquet file of a table; columns that mix numbers and texts become texts.

    So do complex numbers, and those of more digits than a double.
    """
    from pyarrow import ArrowException

    kinds = table.dtypes.items()
    table = table.astype({n: of.subtype for n, of in kinds if isinstance(of, pd.SparseDtype)})
    try:
        return bytes(table.to_parquet(index=False))
    except (ArrowException, OverflowError):
        columns = table[[n for n, of in table.dtypes.items() if of.kind in "Oc" or of.itemsize > 8]]
        texts = {n: cells.texts.to_pylist() for n, cells in texts_of(columns).items()}
        return bytes(table.assign(**texts).to_parquet(index=False))


def _folder_of_a_fit(cache: Path) -> Path:
    """Return a folder for the records and the cache of one fit, with all runs' self-tests."""
    make_folder(cache / SELF_TESTS)
    folder = Path(tempfile.mkdtemp(prefix="fit-", dir=cache))
    (folder / SELF_TESTS).symlink_to((cache / SELF_TESTS).resolve())
    return folder


@lru_cache(maxsize=8)
def _loaded(content: bytes) -> Model:
    """Return the model in the bytes of an exported file."""
    with tempfile.TemporaryDirectory() as folder:
        write_atomically(Path(folder) / MODEL_FILE, content)
        return load(folder)
