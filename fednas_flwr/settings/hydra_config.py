"""Overrides to settings, and Hydra's own command line: the only module that knows Hydra."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.base.foreign import check_resolved, read_yaml
from fednas_flwr.settings import conf_folder, expanded
from fednas_flwr.settings.parser import MISSING
from fednas_flwr.settings.unused import Given

EXTRAS = "pip install -e '.[sweeps]' (joblib, submitit, optuna) or '.[sweeps-ray]'"
CFG_KINDS = (["job"], ["hydra"], ["all"])
NOT_SETTINGS = ("hydra", "sweep.", "config")  # of a run: what overrides say to Hydra


@dataclass(frozen=True)
class Source:
    """Starting point of Hydra's composition.

    Attributes:
        name: Of the primary file, as Hydra's ``--config-name``.
        folder: A folder whose files come before those of ``conf/``, as ``--config-dir``.
    """

    name: str = "config"
    folder: str | None = None

    def folders(self) -> list[Path]:
        """Return the folders in the order of their precedence.

        Raises:
            ConfigError: The given folder does not exist.
        """
        if self.folder is None:
            return [conf_folder()]
        folder = expanded("--config-dir", self.folder).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={show(self.folder)} is no folder: correct it.")
        return [folder, conf_folder()]


CONF = Source()


def compose_tree(overrides: Sequence[str], source: Source = CONF) -> dict[str, Any]:
    """Let Hydra compose ``conf/`` with ``overrides`` and return the tree as plain values.

    An override replaces single values; ``key={}`` empties a mapping. Where a group of an experiment
    is chosen anew, what the experiment sets in it and the new choice lacks goes: with
    ``experiment=dp_fnas/fashion_mnist privacy=none`` its budget. ``config=<file>`` takes the
    settings of a finished run in place of ``conf/``.

    Raises:
        ConfigError: An override is malformed, or names a file or key that does not exist.
    """
    groups = _groups(source)
    for text in overrides:
        _check_override(text, groups)
    files = [text for text in overrides if text.startswith("config=")]
    if files:
        return _repeated(files[-1].removeprefix("config="), overrides)
    with _initialized(source):
        try:
            tree = _composed_within_null(overrides, source)
            _drop_overruled(tree, overrides, source)
        except (HydraException, OmegaConfBaseException, OSError) as error:
            raise _composition_error(error, overrides, source) from error
    for text in overrides:
        if _parse(text).value() == {}:
            *parents, last = _parse(text).key_or_group.split(".")
            reduce(getitem, parents, tree)[last] = {}
    for text in overrides:
        _check_holds(_parse(text).key_or_group, text, tree)
    tree.pop("sweep", None)  # is Hydra's business
    for text in overrides:
        if text.startswith("hydra.run.dir="):
            folder = str(_parse(text).value())
            if tree["run_dir"] not in (None, folder):
                raise ConfigError(
                    f"run_dir={show(tree['run_dir'])} and hydra.run.dir={show(folder)} name two "
                    "folders for one run: leave one out."
                )
            tree["run_dir"] = folder
    return tree


def _check_holds(key: str, text: str, tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for an override within a mapping that another one has replaced."""
    node: Any = tree
    *parents, _ = key.split(".")
    for depth, part in enumerate(parents, 1):
        node = node.get(part, {}) if isinstance(node, Mapping) else {}
        if node is None or isinstance(node, bool):
            whole = ".".join(parents[:depth])
            raise ConfigError(f"{show(text)} is lost with {whole}={show(node)}: leave one out.")


def _composition_error(error: Exception, overrides: Sequence[str], source: Source) -> ConfigError:
    """Return the sentence for an error of Hydra's, which often is a wrong name."""
    try:
        _check_choices(overrides, source)
        known = _known(overrides, source)
        for text in overrides:
            if not text.startswith(("+", "hydra")):
                _check_key(text.lstrip("~").partition("=")[0], known, source)
    except ConfigError as found:
        return found
    except HydraException:  # the file to begin with is none
        pass
    where = getattr(error, "full_key", None) or "the configuration"
    reason = str(error).splitlines()[0].rstrip(".")[:200]
    for text in overrides:
        group, _, name = text.partition("=")
        if group in ("hydra/launcher", "hydra/sweeper") and name in reason:
            there = GlobalHydra.instance().config_loader().get_group_options(group)
            told = str(unknown_choice(group, name, there)).removesuffix(".")
            return ConfigError(f"{told}; others are extras: {EXTRAS}.")
    return ConfigError(f"{where}: {reason}.")


def for_hydra(overrides: Sequence[str], known: Any = None) -> list[str]:
    """Return overrides as Hydra takes them.

    It knows no key inside of a mapping that is empty so far, or null in the tree ``known``; the
    parser of settings knows them all.
    """
    return [
        f"++{text}"
        if re.match(r"[\w.]+=\{", text) or _is_in_null(text.partition("=")[0], known)
        else text
        for text in overrides
    ]


def _is_in_null(key: str, tree: Any) -> bool:
    """Return whether a key is inside of a mapping that is null in a tree."""
    *parents, _ = key.split(".")
    for part in parents:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return bool(parents) and tree is None


def _composed_within_null(overrides: Sequence[str], source: Source) -> dict[str, Any]:
    """Return Hydra's tree, composed anew where the first trial does not know a mapping's keys."""
    try:
        return _composed(for_hydra(overrides), source)
    except (HydraException, OmegaConfBaseException):
        forced = for_hydra(overrides, _known(overrides, source))
        if forced == for_hydra(overrides):
            raise
        return _composed(forced, source)


def _repeated(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings in a run's config.yaml, with single values replaced.

    Only what is typed may hold ``${...}``: in somebody's file it would read this environment.
    """
    given = read_yaml(expanded("config", path), f"config={path}")
    check_resolved(given)
    try:
        tree: Any = OmegaConf.create(given)
        tree["run_dir"] = None
        for text in overrides:
            override = _parse(text)
            key = override.key_or_group
            if key == "config":
                continue
            if key in _groups(CONF) or text[0] in "+~":
                raise ConfigError(f"{show(text)} with config={path}: only single values are set.")
            there = OmegaConf.select(tree, key, default=MISSING) != MISSING
            if not there and not _is_in_null(key, given):
                _check_key(key, _plain(tree), CONF)
            OmegaConf.update(tree, key, override.value())
        return _plain(tree)
    except (ValueError, TypeError, OmegaConfBaseException) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"config={path}: it is no configuration of a run: {reason}.") from error


@contextmanager
def _initialized(source: Source) -> Iterator[None]:
    """Let Hydra search the folders of ``source``, also within a job that Hydra has called."""
    shared = GlobalHydra.instance()
    outer = shared.hydra
    shared.clear()
    first, *others = (str(folder.resolve()) for folder in source.folders())
    try:
        with initialize_config_dir(version_base="1.3", config_dir=others[0] if others else first):
            inner = GlobalHydra.instance()
            if others:
                path = inner.config_loader().get_search_path()
                path.prepend("command-line", f"file://{first}")
                assert inner.hydra is not None
                inner.hydra.config_loader = ConfigLoaderImpl(path)
            yield
    finally:
        if outer is not None:
            GlobalHydra.instance().clear()
            GlobalHydra.instance().initialize(outer)


def _composed(
    overrides: Sequence[str], source: Source = CONF, *, resolve: bool = True
) -> dict[str, Any]:
    """Return Hydra's tree; within :func:`_initialized`."""
    tree = _plain(compose(source.name, list(overrides)), resolve=resolve)
    first = {name: tree[name] for name in ("algorithm",) if name in tree}
    return {**first, **tree}  # although it is composed last, by what it needs of the others


def _plain(tree: Any, *, resolve: bool = True) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(tree, resolve=resolve)
    return dict(values)


def given_settings(overrides: Sequence[str], source: Source = CONF) -> Given:
    """Return what the user has set: by overrides, or by the experiment file that they choose."""
    typed = []
    for text in overrides:
        override = _parse(text)
        if not override.key_or_group.startswith(NOT_SETTINGS):
            typed += _leaves(override.key_or_group, override.value())
    name = _experiment_of(overrides)
    if name is None:
        return Given(typed)
    paths = [text for text in overrides if text.startswith("hydra.searchpath=")]
    alone = compose_tree([f"experiment={name}", *paths], source)
    return Given(typed, _experiment_settings(name, source), name, alone)


def _experiment_of(overrides: Sequence[str]) -> str | None:
    """Return the name of the chosen experiment."""
    names = [text.partition("=")[2] for text in overrides if text.startswith("experiment=")]
    return names[-1] if names and names[-1] != "null" else None


def _experiment_settings(name: str, source: Source) -> list[str]:
    """Return the dotted names of all that an experiment and its bases set; groups by their own."""
    paths = [folder / "experiment" / f"{name}.yaml" for folder in source.folders()]
    found = [path for path in paths if path.is_file()]
    if found:
        tree: Any = read_yaml(found[0], str(found[0])) or {}
    elif f"{name}.yaml" in ConfigStore.instance().repo.get("experiment", {}):
        stored = ConfigStore.instance()
        tree = OmegaConf.to_container(stored.load(f"experiment/{name}.yaml").node)
    else:  # in a folder of hydra.searchpath
        return []
    names: list[str] = []
    for default in tree.pop("defaults", []):
        if isinstance(default, Mapping):
            names += [key.rpartition("/")[2] for key in default]
        elif default != "_self_":
            names += _experiment_settings(default.removeprefix("/experiment/"), source)
    return list(dict.fromkeys(names + [leaf for key in tree for leaf in _leaves(key, tree[key])]))


def _leaves(key: str, value: Any) -> list[str]:
    """Return the dotted names of the single values of a setting that may be a mapping."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, item in value.items() for leaf in _leaves(f"{key}.{name}", item)]


def _drop_overruled(tree: dict[str, Any], overrides: Sequence[str], source: Source) -> None:
    """Take out what the experiment sets in a group that is chosen anew and has no such setting."""
    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    groups = _groups(source)
    chosen = [text for text, key in zip(overrides, keys, strict=True) if key in groups]
    name = _experiment_of(overrides)
    if name is None or len(chosen) < 2:
        return
    others = [text for text in chosen if not text.startswith("experiment=")]
    plain = _composed(others, source, resolve=False)
    for setting in _experiment_settings(name, source):
        group, _, rest = setting.partition(".")
        own = rest.partition(".")[0]
        typed = any(key.startswith(f"{group}.{own}") for key in keys)
        if own and group in keys and own not in plain[group] and not typed:
            tree[group].pop(own, None)


def split_sweep(overrides: Sequence[str], source: Source = CONF) -> tuple[list[str], list[str]]:
    """Return the overrides that have one value, and those that a sweep varies.

    Raises:
        ConfigError: One is malformed.
    """
    fixed: list[str] = []
    varied: list[str] = []
    for text in overrides:
        (varied if _parse(text).is_sweep_override() else fixed).append(text)
    return fixed, varied


def expand_sweep(overrides: Sequence[str], source: Source = CONF) -> list[list[str]]:
    """Return the overrides of the jobs that Hydra's own sweeper makes, in its order.

    Raises:
        ConfigError: A value is no list of values.
    """
    with _initialized(source):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        parsed = [
            override
            for override in parser.parse_overrides(for_hydra(overrides))
            if not override.key_or_group.startswith("hydra")
        ]
        try:
            (jobs,) = BasicSweeper.split_arguments(parsed, None)
        except HydraException as error:
            raise ConfigError(
                f"{error}: write the values out, as in seed=1,2,3, or set hydra/sweeper=optuna."
            ) from error
    return jobs


@dataclass(frozen=True)
class Arguments:
    """A command line of Hydra's.

    Attributes:
        overrides: What sets something.
        flags: The options, each followed by its value.
        source: What ``--config-name`` and ``--config-dir`` say.
        multirun: Whether it is a sweep.
        informs: Whether it asks for information, and begins no run.
        completes: Whether that is for a shell's completion.
    """

    overrides: list[str]
    flags: list[str]
    source: Source
    multirun: bool
    informs: bool
    completes: bool


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Return what Hydra's own parser makes of a command line.

    Raises:
        ConfigError: An option does not exist, lacks its value, or excludes another.
    """
    arguments = list(arguments)
    for place, text in enumerate(arguments):
        if text in ("--cfg", "-c") and arguments[place + 1 : place + 2] not in CFG_KINDS:
            arguments.insert(place + 1, "job")
            break
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        asked, unknown = parser.parse_known_intermixed_args(arguments)
    except (argparse.ArgumentError, TypeError) as error:
        raise ConfigError(f"{error}: see `fednas run --help`.") from error
    for text in unknown:
        raise ConfigError(
            f"{show(text)!r} is no option: settings are written as key=value, as in clients=5."
        )
    if asked.config_path is not None or asked.experimental_rerun is not None:
        raise ConfigError(
            "--config-path and --experimental-rerun are not taken: set --config-dir=<folder> for "
            "files of your own, config=<run folder>/config.yaml to repeat a run."
        )
    flags = list(arguments)
    for text in asked.overrides:
        flags.remove(text)
    informs = bool(asked.cfg or asked.info or asked.shell_completion or asked.hydra_help)
    if asked.multirun and informs:
        raise ConfigError("--multirun only runs: leave it out to be informed.")
    if not informs and (asked.resolve or asked.package):
        raise ConfigError("--resolve and --package say how --cfg job prints: add that.")
    return Arguments(
        asked.overrides,
        flags,
        Source(asked.config_name or CONF.name, asked.config_dir),
        multirun=asked.multirun,
        informs=informs,
        completes=asked.shell_completion,
    )


def run_hydra(job: Callable[[Any], Any], arguments: Sequence[str]) -> None:
    """Let Hydra do what its command line says: call ``job`` for every run of a sweep, or inform.

    Args:
        job: Called with the composed configuration; can be pickled, for launchers.
        arguments: Options and overrides as Hydra takes them.

    Raises:
        ConfigError: Hydra finds fault with them.
    """
    conf = str(conf_folder().resolve())
    app = hydra.main(version_base="1.3", config_path=conf, config_name=CONF.name)
    known = sys.argv
    sys.argv = [known[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come as they are, to be told in a sentence
    try:
        app(job)()
    except HydraException as error:
        raise ConfigError(f"{str(error).splitlines()[0].rstrip('.')}.") from error
    finally:
        sys.argv = known


def current_job() -> tuple[list[str], Source, Path]:
    """Return the overrides, source and folder of the job that Hydra has called."""
    running = HydraConfig.get()
    folders = [
        source.path
        for source in running.runtime.config_sources
        if source.provider == "command-line"
    ]
    source = Source(str(running.job.config_name), folders[0] if folders else None)
    return list(running.overrides.task), source, Path(running.runtime.output_dir)


@dataclass(frozen=True)
class Sweep:
    """A sweep that Hydra is about to run.

    Attributes:
        folder: Holds the folders of the jobs.
        sweeper: The class of Hydra's sweeper.
        metrics: What a sweeper that optimises is told of a job.
        known: The tree of the chosen groups alone.
    """

    folder: Path
    sweeper: str
    metrics: list[str]
    known: dict[str, Any]


def compose_sweep(fixed: Sequence[str], source: Source) -> Sweep:
    """Return the sweep of overrides that have one value, those of Hydra's own among them.

    Raises:
        ConfigError: One of them is wrong, or a plugin is not installed.
    """
    with _initialized(source):
        try:
            known = _known(fixed, source)
            whole = compose(source.name, for_hydra(fixed, known), return_hydra_config=True)
            folder = Path(str(whole.hydra.sweep.dir)).expanduser().resolve()
            settings: Any = OmegaConf.to_container(whole.get("sweep", OmegaConf.create()))
        except (HydraException, OmegaConfBaseException) as error:
            raise _composition_error(error, fixed, source) from error
    metric = settings.get("metric")
    metrics = [str(name) for name in (metric if isinstance(metric, list) else [metric])]
    return Sweep(folder, str(whole.hydra.sweeper._target_), metrics, known)


def add_choice(group: str, name: str, tree: Mapping[str, Any]) -> None:
    """Let ``group=name`` choose a tree, as if it were a file ``conf/<group>/<name>.yaml``."""
    ConfigStore.instance().store(group=group, name=name, node=dict(tree))


def check_free_name(group: str, name: str) -> None:
    """Raise ConfigError if there is such a file.

    A name that was only added is free: Hydra's launchers bring what was added to their processes,
    where its entry has yet to be registered.
    """
    if name in _files(CONF)[group]:
        raise ConfigError(f"{group}={name} exists: choose another name for your own.")


def _groups(source: Source) -> dict[str, set[str]]:
    """Return the groups and the names that each offers."""
    added = ConfigStore.instance().repo
    return {
        name: names | {file.removesuffix(".yaml") for file in added.get(name, {})}
        for name, names in _files(source).items()
    }


def _files(source: Source) -> dict[str, set[str]]:
    """Return the groups and the files of each; ``_<name>`` is no choice."""
    groups: dict[str, set[str]] = {}
    for conf in source.folders():
        for folder in (path for path in conf.iterdir() if path.is_dir()):
            groups.setdefault(folder.name, set()).update(
                path.relative_to(folder).with_suffix("").as_posix()
                for path in folder.rglob("*.yaml")
                if not path.name.startswith("_")
            )
    return groups


def _known(overrides: Sequence[str], source: Source) -> dict[str, Any]:
    """Return the tree of the chosen groups alone, whose keys are known."""
    groups = _groups(source)
    chosen = [text for text in overrides if text.partition("=")[0] in groups]
    return _composed(chosen, source, resolve=False)


@lru_cache(maxsize=1024)  # Hydra's parser takes a millisecond, and each is asked for often
def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(
            f"{show(text)!r} is not of the form key=value; a value with special characters needs "
            "quotes of its own, as in 'key=\"a=b\"'."
        ) from None
    except ValueError as error:  # Python's, of thousands of digits
        raise ConfigError(f"{show(text)!r} holds a number that is too long: {error}.") from None


def _check_override(text: str, groups: Mapping[str, set[str]]) -> None:
    """Raise ConfigError unless ``text`` sets one value of one key, or chooses a file there is."""
    override = _parse(text)
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(
            f"{show(text)} lists several values: add -m for a sweep over them, or put quotes "
            f"around a single value with a comma, as in '{key}=\"a,b\"'."
        )
    group, _, last = key.rpartition(".")
    if last == "name" and group in groups:
        raise ConfigError(f"{show(text)}: a group is chosen by its own name; write {group}=<name>.")
    value = override.value()
    named = isinstance(value, str | list) or (key, value) == ("experiment", None)
    if key in groups and (not named or str(value).rpartition("/")[2].startswith("_")):
        raise unknown_choice(key, text.partition("=")[2], groups[key])


def _check_choices(overrides: Sequence[str], source: Source) -> None:
    """Raise ConfigError for a name that a group does not have, or a group's own setting."""
    groups = _groups(source)
    for text in overrides:
        override = _parse(text)
        key = override.key_or_group
        if key not in groups or text[0] == "~":
            continue
        if override.value() is not None and str(override.value()) not in groups[key]:
            raise unknown_choice(key, override.value(), groups[key])


def _check_key(key: str, tree: dict[str, Any], source: Source) -> None:
    """Raise ConfigError, with the nearest spelling of all keys, unless ``key`` is in ``tree``."""
    if key in _groups(source):
        return
    node: Any = tree
    parent = ""
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node, parent = node[part], f"{parent}{part}."
            continue
        if node == {}:
            parent = parent.rstrip(".")
            raise ConfigError(f"{key}: {parent} is set as a whole; write {parent}={{{part}: ...}}.")
        group = key.partition(".")[0]
        others = _choices_with(key, group, source) if group in _groups(source) else []
        if others:
            raise ConfigError(
                f"{show(key)} is a setting of {', '.join(others)}, and "
                f"{group}={tree[group].get('name')} has none of that name: choose the former, or "
                "remove it."
            )
        names = ", ".join(f"{parent}{name}" for name in node) if isinstance(node, dict) else "none"
        raise ConfigError(
            f"{show(key)} is no setting: {parent.rstrip('.') or 'the top level'} has {names} "
            f"(nearest: {', '.join(_nearest(key, tree))})."
        )


def _choices_with(key: str, group: str, source: Source) -> list[str]:
    """Return the choices of a group that have a setting; within :func:`_initialized`."""
    found = []
    for name in sorted(_groups(source)[group]):
        try:
            node: Any = _composed([f"{group}={name}"], source, resolve=False)
            is_in_null = _is_in_null(key, node)
        except (HydraException, OmegaConfBaseException):  # of a file of the user's
            continue
        *parents, last = key.split(".")
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if is_in_null or (isinstance(node, dict) and last in node):
            found.append(f"{group}={name}")
    return found


def _nearest(key: str, tree: dict[str, Any]) -> list[str]:
    """Return all keys of the tree that end in ``key``, or else the one spelt most like it."""
    keys = list(_dotted(tree))
    same_end = [name for name in keys if name.endswith(f".{key}")]

    def likeness(name: str) -> tuple[float, float]:
        end = ".".join(name.split(".")[-1 - key.count(".") :])
        whole = SequenceMatcher(None, key, name).ratio()
        return max(SequenceMatcher(None, key, end).ratio(), whole), whole

    return same_end or [max(keys, key=likeness)]


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every node."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
