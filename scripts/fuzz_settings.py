"""Runs with generated settings: each must be refused in a sentence or complete with all results.

    scripts/fuzz_settings.sh --runs 1000 [--seed 1] [--limit-s 180]

Choices and values are drawn by Hypothesis from the files of ``conf/`` and from the settings
classes and their constraints, so that a new choice or setting is drawn without further work. Data
and networks are the smallest. Each run has its own process and time limit; runs that failed or hung
are listed with the overrides that repeat them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import hypothesis
from bits import write_data
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from settings_page import names_of

from fednas_flwr import api
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.cli import main
from fednas_flwr.settings import Config
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree, user_settings
from fednas_flwr.settings.parser import Between, Length, OneOf, constraints
from fednas_flwr.settings.unused import without_effect

LARGEST = 3  # largest value of every count that can be reduced, if nothing is drawn
SPAN = 8  # drawn whole numbers are up to this far above the least one
MOST_DRAWN = 3  # settings of a run that are drawn besides its choices; with more, most are refused
MISFITS = 0.15  # share of the draws whose choices need neither fit nor follow a refusal's advice
NEEDED = {  # settings that a partition or an algorithm requires
    "column": ["partition.column=sex"],
    "label_groups": ["partition.groups=[[0,1],[2]]", "partition.clients_per_group=[1,1]"],
    "quantity": ["partition.fractions=[0.6,0.4]"],
    "cfdnas": ["algorithm.client_tags=[a,b]"],
}
KEPT = {  # fixed, to keep a run small, separate and on this machine
    *("run_dir", "dataset.cache", "dataset.root", "dataset.download", "trackers", "runtime.device"),
    *("runtime.name", "runtime.deadline_s", "runtime.connect_s"),
}
# If drawn, these take much time.
SIZES = {"dataset.limit_train", "search_space.width", "runtime.threads"}
WIDE = {"batch_size": 8, "min_size": 1, "search_space.channels": 8, "retrain.channels": 8}
WIDE["search_space.width"] = 0.25
RATES = ("lr", "min_lr", "alpha_lr")  # above 1 every training diverges
TEXTS = ("", "a", "0", "nothing", "~/nothing", "a b", "é")
MOST_CHARACTERS = 1500  # in a refusal
SHARING = 10  # wall seconds that a second on the CPU may take
LOADED = ("fednas_flwr.deploy.server_app", "flwr_datasets", "onnxruntime", "sklearn.linear_model")
KINDS = ("completed", "refused", "failed", "hung")  # of outcomes
MEMORY = 6 * 2**30  # bytes of address space that a run may add to its initial ones


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        kind: ``completed``, ``refused``, ``failed`` or ``hung``.
        reason: The sentence, or the fault.
        overrides: Overrides that repeat it.
    """

    kind: str
    reason: str
    overrides: list[str]


def make_data(folder: Path) -> dict[str, list[str]]:
    """Write small data sets; return the overrides of each by name."""
    write_data(folder)
    made = {
        "npz": ["dataset=npz", f"dataset.root={folder / 'images.npz'}"],
        "csv": [
            *("dataset=csv", f"dataset.root={folder / 'table'}", "dataset.ignore=[sex]"),
            "dataset.statistics={age: [55, 20], dose: [5, 3]}",
        ],
        "digits": ["dataset=digits", "dataset.limit_train=90", "dataset.limit_test=40"],
        "image_folder": ["dataset=image_folder", f"dataset.root={folder / 'folder'}"],
    }
    return {n: [*given, f"dataset.cache={folder / 'cache'}"] for n, given in made.items()}


@st.composite
def overrides(draw: st.DrawFn, data: Mapping[str, list[str]]) -> list[str]:
    """Draw a run: choices that fit or do not, smallest sizes, and some drawn settings."""
    fits = draw(st.integers(0, 99)) >= 100 * MISFITS
    name = draw(st.sampled_from(sorted(data)))
    spaces = names_of("search_space")
    if fits:
        spaces = [space for space in spaces if space.startswith("mlp") == (name == "csv")]
    space = draw(st.sampled_from(spaces))
    retrain = [file for file in names_of("retrain") if space.startswith(file)] or ["small"]
    partitions = names_of("partition")
    if fits:  # the unfit need a folder of sites, a file, or a column of a table
        unfit = ("sites", "saved", "label_groups" if name in ("csv", "digits") else "column")
        unfit += ("column",) if name == "digits" else ()
        partitions = [other for other in partitions if other not in unfit]
    partition = draw(st.sampled_from(partitions))
    algorithm = draw(st.sampled_from(names_of("algorithm")))
    needed = NEEDED.get(partition, []) + NEEDED.get(algorithm, [])
    chosen = [
        f"algorithm={algorithm}",
        *data[name],
        f"search_space={space}",
        f"retrain={draw(st.sampled_from(retrain))}",
        f"partition={partition}",
        f"privacy={draw(st.sampled_from(['none', 'none', *names_of('privacy')]))}",
        *("runtime.device=cpu", "trackers=[]", "clients=2"),
        *(needed if fits else []),
    ]
    tree = _composed(tuple(advised(chosen) if fits else chosen))
    if isinstance(tree, ConfigError):
        return chosen
    chosen, config = tree
    idle = tuple(f"{name}." for name in without_effect(config))
    keys = (override.partition("=")[0] for override in chosen)
    given = tuple(f"{key}." for key in keys if "." in key)
    for key, value in smallest(config).items():
        if not f"{key}.".startswith((*idle, *given)):
            chosen = [*chosen, f"{key}={value}"]
    known = {
        key: (hint, value)
        for key, (hint, value, _) in leaves(config)
        if key not in SIZES and not (fits and f"{key}.".startswith(idle))
    }
    for key in draw(st.lists(st.sampled_from(sorted(known)), max_size=MOST_DRAWN, unique=True)):
        hint, value = known[key]
        chosen.append(f"{key}={written(draw(values(hint, key, value)))}")
    return chosen


def advised(chosen: list[str]) -> list[str]:
    """Return the overrides after following the advice in the refusals of them."""
    for _ in range(8):
        error = _composed(tuple(chosen))
        if not isinstance(error, ConfigError):
            return chosen
        if idle := re.match(r"([\w.]+)=.* has no effect .*remove it", str(error)):
            chosen = [text for text in chosen if text.partition("=")[0] != idle[1]]
            continue
        advice = str(error)
        advice = advice[max(advice.rfind(action) for action in (" set ", "choose one of ")) :]
        if "algorithm=" in str(error) and advice.startswith("choose"):
            named = [f"algorithm={re.findall(r'[a-z_]+', advice)[-1]}"]
        else:
            named = re.findall(r"[a-z_]+(?:\.[a-z_]+)*=[\w.]*\w", advice)
        if not named or set(named) <= set(chosen):
            return chosen
        chosen = [*chosen, *named]
    return chosen


@cache
def _composed(chosen: tuple[str, ...]) -> tuple[list[str], Config] | ConfigError:
    try:
        return list(chosen), parse_config(compose_tree(chosen), user=user_settings(chosen))
    except ConfigError as error:
        return error


def smallest(config: Config) -> dict[str, Any]:
    """Return all counts that can be reduced, as small as is allowed, up to ``LARGEST``."""
    small: dict[str, Any] = {}
    for key, (_, value, bounds) in leaves(config):
        name = key.rpartition(".")[2]
        least = max([c.low for c in bounds if isinstance(c, Between)], default=0)
        if value is None:
            continue
        if key in WIDE or name in WIDE:
            small[key] = WIDE.get(key, WIDE.get(name))
        elif type(value) is int and value > LARGEST and name != "seed":
            small[key] = max(LARGEST, math.ceil(least))
        elif name == "widths":
            small[key] = written([2, 2, 4])
    return small


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
    """Yield key, type, value and constraints of every setting that is not a group."""
    hints, bounds = get_type_hints(type(settings), include_extras=True), constraints(type(settings))
    for field in fields(settings):
        key, value = f"{prefix}{field.name}", getattr(settings, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        elif field.name != "name" and key not in KEPT:
            yield key, (hints[field.name], value, bounds[field.name])


def values(hint: Any, key: str, value: Any = None, bounds: tuple[Any, ...] = ()) -> Any:
    """Return the strategy for a setting's values; ``value`` is the present one."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values(arguments[0], key, value, (*bounds, *arguments[1:]))
    if origin in (Union, UnionType):
        parts = [part for part in arguments if part is not NoneType]
        found = st.one_of([values(part, key, value, bounds) for part in parts])
        return st.none() | found if NoneType in arguments else found
    names = [c.names for c in bounds if isinstance(c, OneOf)]
    if names:
        return st.sampled_from(names[0])
    between = next((c for c in bounds if isinstance(c, Between)), Between(-2, 10))
    if hint is bool:
        return st.booleans()
    if hint is int:
        low = math.ceil(between.low)
        return st.integers(low, int(min(between.high, low + SPAN)))
    if hint is float:
        return numbers(between, key.rpartition(".")[2], value)
    if hint is str:
        known = value if isinstance(value, str) else "a"
        return st.sampled_from([known, *TEXTS])
    sizes = next((c.size for c in bounds if isinstance(c, Length)), Between(0, 4))
    least, most = int(sizes.low), int(min(sizes.high, sizes.low + 4))
    if origin in (list, tuple):
        entries = values(arguments[0], key, value[0] if value else None)
        return st.lists(entries, min_size=least, max_size=most, unique_by=str)
    if origin is dict and key.endswith("fractions"):  # which sum to 1
        cuts = st.lists(st.integers(0, 10), min_size=len(value) - 1, max_size=len(value) - 1)
        return cuts.map(lambda drawn: shares(list(value), sorted(drawn)))
    if origin is dict:
        known = list(value) if isinstance(value, dict) else []
        entries = values(arguments[1], key, next(iter(value.values())) if known else None)
        if known:
            return st.fixed_dictionaries(dict.fromkeys(known, entries))
        keys = st.sampled_from(["a", "0", "1", "age"])
        return st.dictionaries(keys, entries, min_size=least, max_size=most)
    if is_dataclass(hint):
        own = get_type_hints(hint, include_extras=True)
        return st.fixed_dictionaries({n: values(own[n], f"{key}.{n}") for n in own})
    return st.just(value)


def shares(names: list[str], cuts: list[int]) -> dict[str, float]:
    """Return tenths that sum to 1, by name: the distances between cuts of a line."""
    ends = zip([0, *cuts], [*cuts, 10], strict=True)
    return {name: (end - start) / 10 for name, (start, end) in zip(names, ends, strict=True)}


def numbers(between: Between, name: str, value: Any) -> Any:
    """Return the strategy for a number: near its value, at its bounds, or anywhere on its scale."""
    high = min(between.high, 1.0 if name in RATES else 100.0)
    low = max(between.low, -10.0)
    scaled = st.floats(-3, 3).map(lambda power: float(f"{10**power:.3g}"))
    if isinstance(value, float) and value:
        scaled |= st.floats(-1, 1).map(lambda power: float(f"{value * 10**power:.3g}"))
    ends = [float(end) for end in (low, high) if end in between]
    chosen = scaled.filter(lambda number: low <= number <= high and number in between)
    return chosen | st.sampled_from(ends) if ends else chosen


def written(value: Any) -> str:
    """Return a value in the form of an override."""
    if isinstance(value, dict):
        inside = ", ".join(f"{name}: {written(item)}" for name, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def draws(number: int, seed: int, data: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Yield the overrides of ``number`` runs, drawn independently."""
    for run_seed in range(seed * 10**6, seed * 10**6 + number):
        yield _drawn(run_seed, data)


def _drawn(seed: int, data: Mapping[str, list[str]]) -> list[str]:
    found: list[list[str]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2,  # the first is always the simplest
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(overrides(data))
    def collect(drawn: list[str]) -> None:
        found.append(drawn)

    collect()
    return found[-1]


def run(drawn: list[str], folder: Path) -> Outcome:
    """Run once in this process, and check everything that it has left."""
    outcome = partial(Outcome, overrides=drawn)
    try:
        config = api.compose(*drawn, f"run_dir={folder}")
        api.run(config)
    except ConfigError as error:
        sentence = str(error)
        if folder.exists():
            return outcome("failed", f"refused when the run had begun: {sentence}")
        if "\n" in sentence or len(sentence) > MOST_CHARACTERS or not sentence.endswith("."):
            return outcome("failed", f"refused, but not in a sentence: {sentence!r}")
        return outcome("refused", sentence)
    except Exception as error:
        return outcome("failed", f"{type(error).__name__}: {error}")
    wrong = flaw(config, folder)
    return outcome("failed", wrong) if wrong else outcome("completed", "")


def flaw(config: Config, folder: Path) -> str | None:
    """Return what a completed run lacks; None if it lacks nothing."""
    from safetensors.torch import load_file

    from fednas_flwr.runs.events import read_events

    events = read_events(folder / "events.jsonl")
    if events[-1]["event"] != "run_finished" or events[-1]["status"] != "completed":
        return f"its last event is {events[-1]}"
    for event in events:
        for name, value in event.get("metrics", {}).items():
            if value is None or not math.isfinite(value):
                return f"{event['event']} of {event.get('stage')} has {name}={value}"
    models = list(folder.rglob("model.safetensors"))
    if {"retrain", "export"} <= set(config.stages) and not models:
        return "it exported no network"
    for model in models:
        if not all(tensor.isfinite().all() for tensor in load_file(model).values()):
            return f"{model.name} is not finite"
    if main(["report", str(folder)]) != 0:
        return "fednas report refuses its folder"
    return None


def _child(drawn: list[str], folder: Path, limit_s: float, sender: Any) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 5))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        sender.send(run(drawn, folder))


def run_apart(drawn: list[str], folder: Path, limit_s: float) -> Outcome:
    """Run in a separate process for at most ``limit_s`` seconds on a CPU, which may be shared."""
    context, outcome = multiprocessing.get_context("fork"), partial(Outcome, overrides=drawn)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(drawn, folder, limit_s, sender))
    child.start()
    sender.close()
    try:
        if not receiver.poll(SHARING * limit_s):
            return outcome("hung", f"not done after {SHARING * limit_s:g} s")
        found: Outcome = receiver.recv()
        return found
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            return outcome("hung", f"not done after {limit_s:g} s of CPU time")
        return outcome("failed", f"its process died, exit code {child.exitcode}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()


def fuzz() -> int:
    """Run what the command line asks for; return 1 if any run failed or hung."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=180.0, help="of CPU time, a run")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        data = make_data(Path(place))
        for module in LOADED:  # once for all processes
            import_module(module)

        for number, drawn in enumerate(draws(options.runs, options.seed, data)):
            folder = Path(place) / "run"
            outcome = run_apart(drawn, folder, options.limit_s)
            shutil.rmtree(folder, ignore_errors=True)
            counts[outcome.kind] += 1
            if outcome.kind in ("failed", "hung"):
                print(f"- {outcome.kind} (run {number}): {outcome.reason}\n    {drawn}", flush=True)
            summary = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
            if (number + 1) % 50 == 0:
                print(summary, file=sys.stderr, flush=True)
    print(summary)
    return 1 if counts["failed"] or counts["hung"] else 0


if __name__ == "__main__":
    sys.exit(fuzz())
