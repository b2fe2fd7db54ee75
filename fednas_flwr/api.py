"""The Python interface: compose a configuration, run it, register parts of your own.

``run(compose("algorithm=fed_darts", "rounds=2"))`` does the same as ``fednas run
algorithm=fed_darts rounds=2``, by the same code.

torch is imported when a run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednas_flwr.base.errors import ConfigError, check_choice, show
from fednas_flwr.data.readers import own_arrays, own_reader
from fednas_flwr.settings import Config, configuration, hydra_config, incompatible, run_settings
from fednas_flwr.settings.names import NO_SKIP
from fednas_flwr.settings.registry import Algorithm, algorithms, carry, register
from fednas_flwr.spaces import OpEntry, SpaceEntry

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from fednas_flwr.algorithms.base import RoundStrategy
    from fednas_flwr.data.records import RecordsPair
    from fednas_flwr.models.prediction import Model
    from fednas_flwr.report.html_report import Picture
    from fednas_flwr.runs.events import Listener
    from fednas_flwr.spaces.genotype import Genotype
    from fednas_flwr.spaces.space import SearchSpace


@dataclass(frozen=True)
class Result:
    """Result of a run, read from its folder.

    Attributes:
        folder: The run folder, with ``model.onnx``, ``report.html`` and all other files.
    """

    folder: Path

    @cached_property
    def model(self) -> Model:
        """The trained model, on the CPU; it takes raw data. ConfigError if none is exported."""
        from fednas_flwr.models.networks import load

        return load(self.folder)

    def leaderboard(self) -> list[dict[str, Any]]:
        """Return a row of numbers for the delivered network, then for each model compared with it.

        Networks come first, ordered by their scores on validation records, the best first; then
        models that need no search.
        """
        from fednas_flwr.runs.leaderboard import compared
        from fednas_flwr.runs.numbers import read_run

        return compared(read_run(self.folder))

    def plot(self, name: str = "leaderboard") -> Picture:
        """Return a picture of the report for Jupyter: ``clients``, ``roc``, ``retrain_loss``, ...

        Raises:
            ConfigError: The run has no such picture; the message names those that it has.
        """
        from fednas_flwr.report.html_report import Picture
        from fednas_flwr.report.plots import all_figures
        from fednas_flwr.runs.numbers import read_run

        figures = all_figures(read_run(self.folder))
        check_choice("plot", name, figures)
        return Picture(figures[name])

    @cached_property
    def genotype(self) -> Genotype | None:
        """The architecture that was found or given; None for a network that is given by name."""
        from fednas_flwr.runs.run_folder import GENOTYPE_FILE
        from fednas_flwr.spaces.genotype import load_genotype

        path = self.folder / GENOTYPE_FILE
        return load_genotype(path) if path.exists() else None

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Results of the evaluation, by kind: ``central``, ``linear``, ``trees``, ...

        ``central`` has loss, accuracy and scores on the server's test set, ``linear`` those of
        logistic regression, ``trees`` those of boosted trees; each is None if it was not measured.
        ``clients``, ``personalised`` and ``copies`` have a dict for each client. Empty if the run
        has not been evaluated.
        """
        from fednas_flwr.runs.numbers import read_run

        event = read_run(self.folder).last("evaluated")
        return {
            name: event[name]
            for name in ("central", "linear", "trees", "clients", "personalised", "copies")
            if name in event
        }


def compose(*overrides: str) -> Config:
    """Return the checked configuration of ``conf/`` with the overrides of ``fednas run``.

    Raises:
        ConfigError: An override is malformed, a value is wrong, or two exclude each other.

    Example:
        >>> compose("algorithm=fed_darts", "rounds=2").rounds
        2
    """
    user = hydra_config.user_settings(overrides)
    return with_clients(
        configuration.parse_config(hydra_config.compose_tree(overrides), user=user), user.typed
    )


def with_clients(config: Config, typed: Collection[str]) -> Config:
    """Return a configuration with one client for each site, or value of the dividing column.

    Args:
        config: Settings of a run.
        typed: Names of the settings that the user has set; ``clients`` stays if it is among them.
    """
    divided = config.partition.name in ("sites", "column") and config.runtime.name != "deployment"
    if not divided or "clients" in typed:
        return config
    from fednas_flwr.data.prepared import client_names, prepare_run

    with suppress(ConfigError):  # the checks before a run report it
        names = client_names(prepare_run(config).train, config.partition)
        return replace(config, clients=len(names) or config.clients)
    return config


def run(
    config: Config | str | Path,
    *,
    strategy: type[RoundStrategy[Any]] | None = None,
    listeners: Iterable[Listener] = (),
    quiet: bool = True,
) -> Result:
    """Search, retrain, evaluate, export and report, and return the result.

    A ``strategy`` is constructed like the algorithm's own class. If neither it nor the class that
    it derives from names a class of settings, as ``RoundStrategy[<settings>]``, it has no settings,
    and the run has none of the algorithm's settings.

    Args:
        config: A configuration from :func:`compose`; or the folder of a run to continue, whose own
            configuration is then used.
        strategy: Class that replaces the algorithm's search strategy, also to continue a run that
            was started with it. Not with ``runtime=deployment``, whose server does not have it.
        listeners: Functions called with every event.
        quiet: False shows the output of ``fednas run``.

    Raises:
        ConfigError: Settings, data, device or folder do not allow the run; no folder was made.
        QuorumError: Too few clients answered.
    """
    from fednas_flwr.runs.run_folder import check_whole, create_run_folder, open_run_folder

    resumed = not isinstance(config, Config)
    if isinstance(config, Config):
        config = config if strategy is None else _with_strategy(config, strategy)
        check(config)
        config = create_run_folder(config)
    else:
        if strategy is not None:
            _register_again(strategy, str(config))
        config = open_run_folder(str(config))
        check_whole(config)
    execute(config, resumed=resumed, listeners=listeners, quiet=quiet)
    return Result(config.folder)


def check(config: Config) -> None:
    """Raise ConfigError if settings, files, data or device rule out the run, in this order."""
    from fednas_flwr.report.trackers import check_trackers
    from fednas_flwr.runs.run_folder import check_free

    here = config.runtime.name != "deployment"  # in a deployment all of these are elsewhere
    incompatible.check_combinations(config)
    check_free(config)
    from fednas_flwr.deploy.grids import check_cluster

    check_cluster(config)
    if here:
        from fednas_flwr.pipeline.feasible import check_run

        check_trackers(config.trackers)
        check_run(config)


def execute(
    config: Config, *, resumed: bool, listeners: Iterable[Listener] = (), quiet: bool = False
) -> None:
    """Run a configuration whose folder exists; unless quiet, show progress and a final table.

    An error that stops a run that can go on has a note that says how.
    """
    from fednas_flwr.deploy.whole_run import run_whole
    from fednas_flwr.server.cohort import QuorumError

    try:
        if quiet:
            run_whole(config, listeners=listeners, resumed=resumed)
            return
        from fednas_flwr.report.terminal import ProgressDisplay, print_summary

        print(f"run folder: {config.run_dir}", flush=True)
        with ProgressDisplay() as display:
            run_whole(config, listeners=[display, *listeners], resumed=resumed, tell=display)
    except (KeyboardInterrupt, OSError, QuorumError) as error:  # such as a full disk
        error.add_note(f"to go on: fednas run resume={config.run_dir}")
        raise
    print_summary(config.folder)


def register_algorithm(
    name: str, algorithm: Algorithm, *, defaults: Mapping[str, Any] | None = None
) -> None:
    """Let ``algorithm=<name>`` choose an algorithm of your own, in this process and its workers.

    Args:
        name: Name of letters, digits and underscores.
        algorithm: Its entry; ``settings`` is a frozen dataclass derived from
            :class:`~fednas_flwr.settings.AlgorithmSettings`.
        defaults: Values of all settings, as in a file of ``conf/algorithm``;
            ``{"defaults": ["fed_darts"], ...}`` adds those of ``fed_darts``.

    Raises:
        ConfigError: The name exists.

    Example:
        ``register_algorithm("mine", Algorithm(MySettings, MyStrategy), defaults={"mu": 0.1})``
    """
    takes_network = issubclass(algorithm.settings, run_settings.GivenNetwork)
    neutral = {"weights": None, "image_size": None} if takes_network else {}
    _register("algorithm", name, algorithm, {**neutral, **(defaults or {})})


def register_search_space(
    name: str,
    make: Callable[..., SearchSpace],
    *,
    settings: type[run_settings.SearchSpaceSettings] = run_settings.CellSpace,
    defaults: Mapping[str, Any],
) -> None:
    """Let ``search_space=<name>`` choose a space of your own, in this process and its workers.

    Args:
        name: Name of letters, digits and underscores; also the ``name`` of the space itself.
        make: Function of ``input_shape``, ``num_classes``, ``norm`` and the settings except the
            name, as keyword arguments, which returns the space; may be a space's class.
        settings: A frozen dataclass derived from
            :class:`~fednas_flwr.settings.SearchSpaceSettings`. Unless it is ``CellSpace``, derived
            networks have the supernet's sizes, and ``retrain.channels`` and ``retrain.num_cells``
            are null.
        defaults: Values of all settings, as in a file of ``conf/search_space``; ``skip`` and
            ``own_ops`` may be left out, and there are then none.

    Raises:
        ConfigError: The name exists.
    """
    neutral = {"skip": NO_SKIP, "own_ops": []}
    _register("search_space", name, SpaceEntry(settings, make), {**neutral, **defaults})


def register_data_set(
    name: str,
    data: Mapping[str, np.ndarray]
    | Callable[..., RecordsPair | Dataset[Any] | tuple[Dataset[Any], Dataset[Any]]],
    *,
    settings: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Let ``dataset=<name>`` choose records of your own, in this process and its workers.

    Args:
        name: Name of letters, digits and underscores.
        data: Arrays named as in an npz file: ``x_train``, ``y_train`` and optionally ``x_test``,
            ``y_test``. Or a reader, a function of the path ``dataset.root`` and of ``settings`` as
            keyword arguments. It returns train and test
            :class:`~fednas_flwr.data.records.Records`, the latter None if there are none; or in
            their place torch's data sets of (example, class), or their loaders. Of more parts, or
            of a dict of ``train``, ``validation`` and ``test``, the last is the test set.
        settings: Names of settings of other data sets that a reader takes. The settings of all
            images, and ``statistics`` and ``ranges`` of tables, can always be set. Arrays have the
            settings of ``dataset=npz``.
        defaults: Values that differ from the defaults in ``conf/dataset``.

    Raises:
        ConfigError: The name exists, or there is no such setting.
    """
    if isinstance(data, Mapping):
        entry, neutral = own_arrays(name, data)
    else:
        entry, neutral = own_reader(data, settings)
    _register("dataset", name, entry, {**neutral, **(defaults or {})})


def register_op(name: str, make: Callable[[int, int], nn.Module]) -> None:
    """Let ``search_space.own_ops=[<name>]`` add an op of your own to those of a search space.

    Supernets compute it as it is, beside their own ops. With privacy its layers must be
    convolutions, linear layers and group norms, and no record may depend on another.

    Args:
        name: Name of letters, digits and underscores.
        make: Function of a number of channels and a stride, 1 or 2. It returns a new module from
            ``[B, channels, H, W]`` to ``[B, channels, ceil(H / stride), ceil(W / stride)]``; in a
            space for tables both are ``[B, channels]``. The space adds a norm after it.

    Raises:
        ConfigError: The name exists, or the function fails.

    Example:
        ``register_op("wide", lambda width, stride: nn.Conv2d(width, width, 7, stride, 3))``
    """
    import torch

    try:
        with torch.random.fork_rng(devices=[]):
            weights = list(make(8, 1).parameters())
    except Exception as error:
        raise ConfigError(
            f"op={name} fails at 8 channels and a stride of 1 ({error}): expected a function of "
            "both that returns a module."
        ) from error
    _own("op", name, OpEntry(make, bool(weights)))


def register_loss(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let ``training.loss=<name>`` train supernets and networks by a loss of your own.

    Networks are still tested by cross-entropy, and for numbers by the squared difference.

    Args:
        name: Name of letters, digits and underscores.
        loss: Function of the logits [1, classes] and the label int64 [1] of one record, or its
            labels [1, classes] of 0 and 1; for a number to predict, of the output [1, 1] and the
            standardised target [1]. It returns one number, 0 or more. It runs under ``torch.vmap``,
            so that no record's loss can depend on another record.

    Raises:
        ConfigError: The name exists.
    """
    _own("loss", name, loss)


def register_network(name: str, make: Callable[[tuple[int, ...], int], nn.Module]) -> None:
    """Let ``algorithm=fedavg algorithm.network=<name>`` train a network of your own.

    Args:
        name: Name of letters, digits and underscores.
        make: Function of the shape of one example and the number of classes, which returns a new
            module from examples [B, ...] to logits [B, classes].

    Raises:
        ConfigError: The name exists.
    """
    _own("network", name, make)


def register_metric(name: str, metric: Callable[[np.ndarray, np.ndarray], float]) -> None:
    """Let reports show a metric of your own, of the trained network on the server's test set.

    No choice depends on it. It is computed in the server's process, which in a deployment is on
    another machine.

    Args:
        name: Its name in reports.
        metric: Function of the probabilities float64 [N, classes] and the labels int64 [N], or
            [N, classes] of 0 and 1 if records can have several. For numbers to predict, of the
            predictions [N, 1] and the true numbers, float32 [N]. It returns a finite number.

    Raises:
        ConfigError: The name exists.
    """
    from fednas_flwr.runs.numbers import SCORES

    if any(name in (score.name, score.label) for score in SCORES):
        raise ConfigError(f"metric={name} exists: choose another name for your own.")
    _own("metric", name, metric)


def _own(group: str, name: str, entry: Any) -> None:
    """Let a name stand for an entry of the user."""
    register(group, name, entry)
    carry(group, name, entry)


def _register(group: str, name: str, entry: Any, defaults: Mapping[str, Any]) -> None:
    hydra_config.check_free_name(group, name)
    _own(group, name, entry)
    hydra_config.add_choice(group, name, {**defaults, "name": name})


def _with_strategy(config: Config, strategy: type[RoundStrategy[Any]]) -> Config:
    """Return a configuration with a registered strategy as its algorithm."""
    if config.runtime.name == "deployment":
        raise ConfigError(
            f"runtime=deployment with strategy={strategy.__name__}: the machine of the SuperLink "
            "runs the fednas_flwr that is installed there and has no such class; set "
            "runtime=inline or runtime=ray."
        )
    if "search" not in config.stages:
        raise ConfigError(
            f"stages={show(config.stages)} with strategy={strategy.__name__}: it is for the "
            "search; add search, or leave it out."
        )
    name = _register_strategy(strategy, config.algorithm.name.partition(".")[0])
    if algorithms()[name].settings is run_settings.AlgorithmSettings:
        return replace(config, algorithm=run_settings.AlgorithmSettings(name))
    return replace(config, algorithm=replace(config.algorithm, name=name))


def _register_strategy(strategy: type[RoundStrategy[Any]], algorithm: str) -> str:
    """Register a class in place of an algorithm's own search strategy; return the new name.

    Its settings are the algorithm's, and the name is ``<algorithm>.<class>``. A class that names no
    settings has none, and the name is ``own.<class>``. A class replaces an earlier one of the same
    name.

    Raises:
        ConfigError: It is no :class:`RoundStrategy`; or the algorithm does not search, has other
            settings, or is CFDNAS, whose searches are FDNAS'.
    """
    from fednas_flwr.algorithms.base import RoundStrategy, settings_of

    if not (isinstance(strategy, type) and issubclass(strategy, RoundStrategy)):
        raise ConfigError(
            f"strategy={getattr(strategy, '__name__', strategy)} must be a class that derives from "
            "an algorithm's own, such as algorithms.fed_darts.strategy.FedDARTS, or from "
            "algorithms.base.RoundStrategy: Flower's strategies train one model and know no search "
            "(its averages and optimisers are settings, aggregate= and server_optimizer=)."
        )
    needed = settings_of(strategy)
    if needed is run_settings.AlgorithmSettings:
        name = f"own.{strategy.__name__}"
        carry("algorithm", name, Algorithm(run_settings.AlgorithmSettings, strategy))
        return name
    entry = algorithms().get(algorithm)
    if entry is None or entry.search is None or not issubclass(entry.settings, needed):
        raise ConfigError(
            f"algorithm={algorithm} with strategy={strategy.__name__}: the class takes the place "
            "of one search; set algorithm=fed_darts, or another whose settings it takes."
        )
    name = f"{algorithm}.{strategy.__name__}"
    carry("algorithm", name, replace(entry, search=strategy))
    return name


def _register_again(strategy: type[RoundStrategy[Any]], folder: str) -> None:
    """Register the strategy of the run in a folder."""
    from fednas_flwr.runs.run_folder import read_config_file

    algorithm = read_config_file(folder).get("algorithm")
    earlier = str(algorithm.get("name")) if isinstance(algorithm, dict) else ""
    name = _register_strategy(strategy, earlier.partition(".")[0])
    if name != earlier:
        raise ConfigError(f"{folder} holds a run of algorithm={earlier}, which is not {name}.")
