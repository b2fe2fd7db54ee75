"""Composes settings from overrides, and runs Hydra's command line; no other module uses Hydra."""

import argparse
import itertools
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.base.foreign import check_resolved, read_yaml
from fednas_flwr.settings import conf_folder, expanded
from fednas_flwr.settings.unused import UserSettings

EXTRAS = "pip install -e '.[sweeps]' (joblib, submitit, optuna) or '.[sweeps-ray]'"
NOT_SETTINGS = ("hydra", "sweep.", "config", "experiment")  # overrides for Hydra itself
PRIMARY = "config"  # the file that composition begins with
SEARCH_PATH = "hydra.searchpath="


def quoted(value: str | float) -> str:
    """Return a text, number or truth value, also of numpy, as an override spells it."""
    if isinstance(value, str):
        text = str(QuotedString(value, Quote.double).with_quotes())
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return json.dumps(value, default=lambda number: number.item())


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """Let Hydra compose ``conf/`` with ``overrides`` and return the tree as plain values.

    An override replaces single values; ``key={}`` empties a mapping. ``hydra.run.dir`` is another
    name of ``run_dir``. Unknown settings are left to the parser of settings. ``config=<file>``
    takes the settings of a finished run in place of ``conf/``. If a backbone is named, the search
    space is that of its pooled features, unless another is chosen.

    Raises:
        ConfigError: An override is malformed, or names a file that does not exist.
    """
    _check_overrides(overrides)
    overrides = [re.sub(r"^(\+\+)?hydra\.run\.dir=", "run_dir=", text) for text in overrides]
    files = [text for text in overrides if text.startswith("config=")]
    if files:
        return _repeated(files[-1].removeprefix("config="), overrides)
    named = any(text.startswith("dataset.backbone") and text[-5:] != "=null" for text in overrides)
    chosen = any(re.search(r"^search_space=|\boutput[=:] ?map\b", text) for text in overrides)
    of_features = ["search_space=mlp_small"] if named and not chosen else []
    with _composing(overrides):
        tree = _plain(compose(PRIMARY, for_hydra([*overrides, *of_features])))
    tree.pop("sweep", None)  # for Hydra only
    for text in overrides:
        key, value = _parse(text).key_or_group, _parse(text).value()
        *parents, last = key.split(".")
        if value == {}:
            reduce(operator.getitem, parents, tree)[last] = {}
        _check_holds(key, text, tree)
    return tree


def _check_holds(key: str, text: str, tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for an override inside a mapping that another override has replaced."""
    node: Any = tree
    *parents, _ = key.split(".")
    for depth, part in enumerate(parents, 1):
        node = node.get(part, {}) if isinstance(node, Mapping) else {}
        if node is None or isinstance(node, bool):
            whole = ".".join(parents[:depth])
            raise ConfigError(f"{show(text)} is lost with {whole}={show(node)}: leave one out.")


def _composition_error(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Return the sentence for an error of Hydra, which is often a wrong name."""
    groups = _groups(overrides)
    where = getattr(error, "full_key", None) or "the configuration"
    reason = str(error).splitlines()[0].rstrip(".")[:200]
    for text in overrides:
        group, _, name = text.partition("=")
        if group in groups and name not in groups[group]:
            return unknown_choice(group, name, groups[group])
        if group in ("hydra/launcher", "hydra/sweeper") and name in reason:
            there = GlobalHydra.instance().config_loader().get_group_options(group)
            return unknown_choice(group, name, there, f"; others are extras: {EXTRAS}")
    return ConfigError(f"{where}: {reason}.")


def for_hydra(overrides: Sequence[str], known: Mapping[str, Any] | None = None) -> list[str]:
    """Return overrides as Hydra accepts them: new keys, as of a null mapping, get ``++``.

    Args:
        overrides: The overrides as the user writes them.
        known: A tree whose keys Hydra knows; None if it knows none.
    """
    groups, forced = _groups(overrides), []
    for text in overrides:
        key, _, value = text.partition("=")
        is_key = re.fullmatch(r"(?!hydra)[\w.]+", key) and key not in groups
        is_new = known is None or value.startswith("{") or not _has(known, key)
        forced.append(f"++{text}" if is_key and is_new else text)
    return forced


def _has(tree: Any, key: str) -> bool:
    """Return true if a tree has a dotted key."""
    first, _, rest = key.partition(".")
    return isinstance(tree, Mapping) and first in tree and (not rest or _has(tree[first], rest))


def _repeated(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings in a run's config.yaml, with single values replaced.

    Only typed overrides may hold ``${...}``: in a file of somebody else's it would read this
    environment.
    """
    content = read_yaml(expanded("config", path), f"config={path}")
    check_resolved(content)
    groups = _groups()
    try:
        tree: Any = OmegaConf.create(content)
        tree["run_dir"] = None
        for override in map(_parse, overrides):
            text, key = str(override.input_line), override.key_or_group
            if key in groups or text[0] in "+~":
                raise ConfigError(f"{show(text)} with config={path}: only single values are set.")
            if key != "config":
                OmegaConf.update(tree, key, override.value(), force_add=True)
        return _plain(tree)
    except ConfigError:
        raise
    except (ValueError, TypeError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"config={path}: it is no configuration of a run: {reason}.") from error


@contextmanager
def _initialized() -> Iterator[None]:
    """Initialise Hydra with ``conf/``, also inside a job that Hydra has called."""
    shared = GlobalHydra.instance()
    outer = shared.hydra
    shared.clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder().resolve())):
            yield
    finally:
        if outer is not None:
            GlobalHydra.instance().clear()
            GlobalHydra.instance().initialize(outer)


@contextmanager
def _composing(overrides: Sequence[str]) -> Iterator[None]:
    """Initialise Hydra, and raise ConfigError where it cannot compose the overrides."""
    with _initialized():
        try:
            yield
        except (HydraException, OmegaConfBaseException, OSError) as error:
            raise _composition_error(error, overrides) from error


def _plain(tree: Any, *, resolve: bool = True) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(tree, resolve=resolve)
    return dict(values)


def user_settings(overrides: Sequence[str]) -> UserSettings:
    """Return the settings that the user has given by overrides or a chosen experiment file."""
    typed: list[str] = []
    groups = _groups(overrides).keys() - _groups().keys()  # the user's own groups
    for override in map(_parse, overrides):
        key = override.key_or_group
        if not key.startswith(NOT_SETTINGS) and key not in groups:
            typed += _leaves(key, override.value())
    names = [text.partition("=")[2] for text in overrides if text.startswith("experiment=")]
    chosen = _experiment_settings(names[-1], _folders(overrides)) if names else []
    return UserSettings(typed, chosen, any(text.startswith("config=") for text in overrides))


def _experiment_settings(name: str, folders: Sequence[Path]) -> list[str]:
    """Return the dotted names of settings and groups that an experiment and its bases set."""
    paths = [folder / "experiment" / f"{name}.yaml" for folder in folders]
    files = [path for path in paths if path.is_file()]
    if files:
        tree: Any = read_yaml(files[0], str(files[0])) or {}
    elif f"{name}.yaml" in ConfigStore.instance().repo.get("experiment", {}):
        tree = OmegaConf.to_container(ConfigStore.instance().load(f"experiment/{name}.yaml").node)
    else:  # it is null, or in a package of hydra.searchpath
        return []
    names: list[str] = []
    for default in tree.pop("defaults", []):
        if isinstance(default, Mapping):
            names += [key.rpartition("/")[2] for key in default]
        elif default != "_self_":
            names += _experiment_settings(default.removeprefix("/experiment/"), folders)
    return list(dict.fromkeys(names + [leaf for key in tree for leaf in _leaves(key, tree[key])]))


def _leaves(key: str, value: Any) -> list[str]:
    """Return the dotted names of the single values in a setting, which may be a mapping."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, item in value.items() for leaf in _leaves(f"{key}.{name}", item)]


def without_sweeps(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that have one value.

    Raises:
        ConfigError: An override is malformed.
    """
    return [text for text in overrides if not _parse(text).is_sweep_override()]


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job that Hydra's own sweeper makes, in its order.

    Raises:
        ConfigError: A sweep has an interval instead of a list of values.
    """
    choices: dict[str, list[str]] = {}
    with _initialized():
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        for override in parser.parse_overrides(list(overrides)):
            key, text = override.get_key_element(), str(override.input_line)
            if override.is_sweep_override() and not override.is_discrete_sweep():
                raise ConfigError(
                    f"{show(text)}: Hydra's own sweeper does not support sweep type interval: "
                    "write the values out, as in seed=1,2,3, or set hydra/sweeper=optuna."
                )
            if override.is_sweep_override():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            elif not key.startswith("hydra") or text.startswith(SEARCH_PATH):
                choices[key] = [text]
    return [list(job) for job in itertools.product(*choices.values())]


@dataclass(frozen=True)
class Arguments:
    """A parsed command line of Hydra.

    Attributes:
        overrides: Overrides of settings.
        flags: The options, each followed by its value.
        multirun: True if it is a sweep.
        informs: True if it asks for information and begins no run.
        completes: True if it asks for shell completion.
    """

    overrides: list[str]
    flags: list[str]
    multirun: bool
    informs: bool
    completes: bool


def _hydras_parser() -> argparse.ArgumentParser:
    """Return a parser of the options of Hydra's command line."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("--package", "-p")
    flags = "--multirun,-m --shell-completion,-sc --hydra-help --resolve --run,-r --version"
    for names in flags.split():
        parser.add_argument(*names.split(","), action="store_true")
    return parser


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Parse Hydra's options and overrides of a command line.

    Raises:
        ConfigError: An option does not exist, lacks its value, or excludes another.
    """
    parser = _hydras_parser()
    try:
        asked, unknown = parser.parse_known_intermixed_args(arguments)
    except (argparse.ArgumentError, TypeError) as error:
        raise ConfigError(f"{error}: see `fednas run --help`.") from error
    for text in unknown:
        raise ConfigError(
            f"{show(text)!r} is no option: settings are written as key=value, as in clients=5, and "
            "a folder of files of your own as hydra.searchpath=[file://<folder>]."
        )
    flags = list(arguments)
    for text in asked.overrides:
        flags.remove(text)
    informs = any((asked.cfg, asked.info, asked.shell_completion, asked.hydra_help, asked.version))
    if asked.multirun and informs:
        raise ConfigError("--multirun only runs: leave it out to be informed.")
    if not informs and (asked.resolve or asked.package):
        raise ConfigError("--resolve and --package say how --cfg job prints: add that.")
    return Arguments(asked.overrides, flags, asked.multirun, informs, asked.shell_completion)


OmegaConf.register_new_resolver(
    "without_slash", lambda text: str(text).replace("/", "_"), replace=True
)


def run_hydra(job: Callable[[Any], Any], arguments: Sequence[str]) -> None:
    """Let Hydra execute its command line: call ``job`` for every run of a sweep, or print.

    Args:
        job: Function of the composed configuration; launchers pickle it.
        arguments: Options and overrides as Hydra takes them.

    Raises:
        ConfigError: Hydra refuses them.
    """
    conf = str(conf_folder().resolve())
    app = hydra.main(version_base="1.3", config_path=conf, config_name=PRIMARY)
    known = sys.argv
    sys.argv = [known[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors arrive here unchanged
    try:
        app(job)()
    except HydraException as error:
        raise ConfigError(f"{str(error).splitlines()[0].rstrip('.')}.") from error
    finally:
        sys.argv = known


def current_job() -> tuple[list[str], Path]:
    """Return the overrides and the folder of the job that Hydra has called."""
    running = HydraConfig.get()
    paths = [text for text in running.overrides.hydra if text.startswith(SEARCH_PATH)]
    return [*running.overrides.task, *paths], Path(running.runtime.output_dir)


@dataclass(frozen=True)
class Sweep:
    """A sweep that Hydra is about to run.

    Attributes:
        folder: Folder of the jobs' folders.
        sweeper: Class of Hydra's sweeper.
        metrics: Metrics that the sweeper optimises.
        known: Tree of the chosen groups, without other overrides.
        tree: All settings, without those that the sweep varies.
    """

    folder: Path
    sweeper: str
    metrics: list[str]
    known: dict[str, Any]
    tree: dict[str, Any]


def compose_sweep(fixed: Sequence[str]) -> Sweep:
    """Return the sweep that has the overrides with one value, Hydra's own included.

    Raises:
        ConfigError: An override is wrong, or a plugin is not installed.
    """
    with _composing(fixed):
        names = {*_groups(fixed), SEARCH_PATH.removesuffix("=")}
        chosen = [text for text in fixed if text.partition("=")[0] in names]
        known = _plain(compose(PRIMARY, chosen), resolve=False)
        whole = compose(PRIMARY, for_hydra(fixed, known), return_hydra_config=True)
        folder = Path(str(whole.hydra.sweep.dir)).expanduser().resolve()
        tree = _plain(whole, resolve=False)
        del tree["hydra"]
    metric = tree.pop("sweep").get("metric")
    metrics = [str(name) for name in (metric if isinstance(metric, list) else [metric])]
    return Sweep(folder, str(whole.hydra.sweeper._target_), metrics, known, tree)


def add_choice(group: str, name: str, tree: Mapping[str, Any]) -> None:
    """Make ``group=name`` choose a tree, as if it were a file ``conf/<group>/<name>.yaml``."""
    ConfigStore.instance().store(group=group, name=name, node=dict(tree))


def check_free_name(group: str, name: str) -> None:
    """Raise ConfigError if there is a file ``conf/<group>/<name>.yaml``.

    A name from :func:`add_choice` is free: Hydra's launchers carry such names to their processes,
    where the entry is not registered yet.
    """
    if (conf_folder() / group / f"{name}.yaml").is_file():
        raise ConfigError(f"{group}={name} exists: choose another name for your own.")


def _folders(overrides: Sequence[str]) -> list[Path]:
    """Return ``conf/`` and the folders that overrides add to Hydra's search path.

    Raises:
        ConfigError: One of these folders does not exist.
    """
    paths: list[Any] = []
    for override in (_parse(text) for text in overrides if text.startswith(SEARCH_PATH)):
        value: Any = override.value()
        paths += value if isinstance(value, list) else [value]
    texts = [str(path) for path in paths]
    folders = [Path(text.removeprefix("file://")) for text in texts if text.startswith("file://")]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{SEARCH_PATH}[file://{folder}]: that is no folder; correct it.")
    return [conf_folder(), *folders]


def _groups(overrides: Sequence[str] = ()) -> dict[str, set[str]]:
    """Return the names to choose from in each group; a file ``_<name>`` is no choice."""
    groups: dict[str, set[str]] = {}
    for conf in _folders(overrides):
        for folder in (path for path in conf.iterdir() if path.is_dir()):
            groups.setdefault(folder.name, set()).update(
                path.relative_to(folder).with_suffix("").as_posix()
                for path in folder.rglob("*.yaml")
                if not path.name.startswith("_")
            )
    for name, added in ConfigStore.instance().repo.items():
        if name in groups:
            groups[name] |= {file.removesuffix(".yaml") for file in added}
    return groups


@lru_cache(maxsize=1024)  # Hydra's parser takes a millisecond, and each text is parsed often
def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(
            f"{show(text)!r} is not of the form key=value; a value with special characters needs "
            "quotes of its own, as in 'key=\"a=b\"'."
        ) from None
    except ValueError as error:  # raised by Python for thousands of digits
        raise ConfigError(f"{show(text)!r} holds a number that is too long: {error}.") from None


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError unless each override sets one value or chooses a file that exists."""
    groups = _groups(overrides)
    for text in overrides:
        override = _parse(text)
        key, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            raise ConfigError(
                f"{show(text)} lists several values: add -m for a sweep over them, or put quotes "
                f"around a single value with a comma, as in '{key}=\"a,b\"'."
            )
        group, _, last = key.rpartition(".")
        if last == "name" and group in groups:
            raise ConfigError(
                f"{show(text)}: a group is chosen by its own name; write {group}=<name>."
            )
        if key not in groups or text[0] == "~" or (key, value) == ("experiment", None):
            continue
        if not isinstance(value, str | list) or str(value).rpartition("/")[2].startswith("_"):
            raise unknown_choice(key, text.partition("=")[2], groups[key])
