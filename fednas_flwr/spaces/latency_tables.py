"""Latency tables: the time of every layer of a search space, measured on the machine at hand.

:func:`measure_latency` times modules with torch.utils.benchmark, :func:`to_json` and
:func:`from_json` are the table's file. A network's predicted latency is the sum over its layers
(Cai et al. 2019, ProxylessNAS, arXiv 1812.00332, section 3.3).
"""

from __future__ import annotations

import functools
import json
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import nn

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.base.foreign import load_json

FORMAT = "fednas-latency"
VERSION = 1
RUN_BEFORE = 5  # layers, before each measurement
LONGEST_TEXT, LARGEST_NUMBER = 200, 2**31 - 1  # in a table
LONGEST_MS = 1e9  # whose sum over a network is finite


class LayerKey(NamedTuple):
    """Key that a layer's latency depends on; equal to any tuple of the same values."""

    op: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    expansion: int
    kernel: int
    stride: int


Sized = tuple[nn.Module, tuple[int, ...]]  # a module and the shape of one example
Key = tuple[str, tuple[int, ...], tuple[int, ...], int, int, int]


class Timing(NamedTuple):
    """Milliseconds of one forward of a batch, over repeated runs.

    Attributes:
        median_ms: Median.
        spread_ms: Distance between the quartiles.
    """

    median_ms: float
    spread_ms: float


@dataclass(frozen=True)
class LatencyTable:
    """Measured layers and what they were measured with.

    Attributes:
        machine: Processor or GPU, as the system names it.
        device: ``cpu`` or ``cuda``.
        clock: ``process_time`` (one thread on the CPU) or ``timer``: wall time.
        threads: Of torch, on the CPU.
        batch_size: Examples of one forward.
        norm: Of the layers.
        torch: Its version.
        timings: By layer.
    """

    machine: str
    device: str
    clock: str
    threads: int
    batch_size: int
    norm: str
    torch: str
    timings: dict[Key, Timing]

    def latency_ms(self, layer: Key) -> float:
        """Return the median time of a layer.

        Raises:
            ConfigError: It was not measured.
        """
        if layer not in self.timings:
            shown = ", ".join(
                f"{name} {value}" for name, value in zip(LayerKey._fields, layer, strict=True)
            )
            raise ConfigError(
                f"the latency table of {self.machine} lacks the layer {shown}: measure the search "
                "space and the input shape of this run with `fednas latency measure`."
            )
        return self.timings[layer].median_ms


def measure_latency(
    layers: Iterable[Key],
    make: Callable[[Any], nn.Module],
    *,
    device: torch.device,
    threads: int,
    batch_size: int,
    norm: str,
    passes: int,
    networks: Sequence[Sized] = (),
) -> tuple[LatencyTable, list[Timing]]:
    """Return the table of all different layers, and the times of whole networks.

    Both are measured in the same passes: compared with a table of another hour, a network would
    differ by what else the machine does.

    Args:
        layers: What to time; duplicates are measured once.
        make: Returns the module of a layer.
        device: Where to run.
        threads: Of torch; the number is set for the time of the measurement only.
        batch_size: Examples of one forward, 1 or more.
        norm: What ``make`` builds with; for the record.
        passes: Measurements of each layer, 2 or more.
        networks: What else to time.
    """
    different = list(dict.fromkeys(layers))
    timings = time_modules(
        [*((make(layer), layer[1]) for layer in different), *networks],
        batch_size=batch_size,
        device=device,
        threads=threads,
        passes=passes,
    )
    table = LatencyTable(
        machine=machine_name(device),
        device=device.type,
        clock=_clock(device, threads).__name__,
        threads=threads,
        batch_size=batch_size,
        norm=norm,
        torch=torch.__version__,
        timings=dict(zip(different, timings, strict=False)),
    )
    return table, timings[len(different) :]


def time_modules(
    modules: Sequence[Sized],
    *,
    batch_size: int,
    device: torch.device,
    threads: int,
    passes: int,
) -> list[Timing]:
    """Return the times of modules' forwards in evaluation mode, without gradients.

    One run at a time, right after some of the other modules: a layer that is repeated finds its
    code and data in the processor's caches, and the sum of such times is 20 to 35 % below a
    network's (measured; as done here 0 to 8 %). Every pass measures all modules, so that a slow
    moment of the machine hits all alike and the median forgets it.

    Args:
        modules: Each with the shape of one example.
        batch_size: Examples of one forward.
        device: Where to run; modules are moved there.
        threads: Of torch.
        passes: Measurements of each, 2 or more.
    """
    from torch.utils.benchmark import Timer  # looks for CUDA, and warns, when it is imported

    runs = []
    for module, shape in modules:
        x = torch.randn(batch_size, *shape, device=device)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)  # as inside the networks
        runs.append(functools.partial(module.to(device).eval(), x))
    times: list[list[float]] = [[] for _ in runs]
    with torch.inference_mode():
        for _ in range(passes):
            for index, found in enumerate(times):
                others = [runs[index - 1 - k] for k in range(min(RUN_BEFORE, len(runs) - 1))]
                timer = Timer(
                    "run()",
                    setup="for other in others: other()",
                    globals={"run": runs[index], "others": others},
                    num_threads=threads,
                    timer=_clock(device, threads),
                )
                found.append(1e3 * timer.timeit(1).mean)
    return [summarise(found) for found in times]


def _clock(device: torch.device, threads: int) -> Callable[[], float]:
    """Return the processor time of one thread, which other programs do not stretch, else the time.

    torch's own timer waits for a GPU.
    """
    from torch.utils.benchmark import timer

    return process_time if device.type == "cpu" and threads == 1 else timer


def summarise(times_ms: list[float]) -> Timing:
    """Return median and spread of two or more times, to the nanosecond."""
    first, median, third = statistics.quantiles(times_ms, n=4, method="inclusive")
    return Timing(round(median, 6), round(third - first, 6))


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU or of the processor, as far as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def to_json(table: LatencyTable) -> str:
    """Return the table as JSON, one layer to a line; :func:`from_json` gives an equal one back."""
    head = {"format": FORMAT, "version": VERSION} | asdict(table)
    del head["timings"]
    layers = [LayerKey(*key)._asdict() | t._asdict() for key, t in table.timings.items()]
    lines = ",\n  ".join(json.dumps(layer) for layer in layers)
    return json.dumps(head, indent=1)[:-2] + f',\n "layers": [\n  {lines}\n ]\n}}\n'


def from_json(text: str, *, origin: str = "latency table") -> LatencyTable:
    """Return the table that ``text`` holds.

    Raises:
        ConfigError: The text is not such a table, of another version, names a layer twice, or a
            time is no positive number.
    """
    try:
        document = load_json(text)
    except ValueError as error:
        raise ConfigError(f"{origin} is not valid JSON: {error}.") from error
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise ConfigError(f"{origin}: format must be {FORMAT!r}; see `fednas latency measure`.")
    if document.get("version") != VERSION:
        raise ConfigError(
            f"{origin}: version must be {VERSION}, got {show(document.get('version'))}: measure "
            "anew."
        )
    try:
        timings = dict(_timings(document["layers"]))
        head = {key: kind(document[key]) for key, kind in _HEAD.items()}
        table = LatencyTable(**head, timings=timings)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{origin}: a field is missing or wrong: {error}.") from error
    if len(timings) != len(document["layers"]):
        raise ConfigError(f"{origin}: a layer appears twice.")
    return table


def median_table(tables: Sequence[LatencyTable]) -> LatencyTable:
    """Return the table of all layers that every table has, with the medians of their times.

    What the tables were measured with is that of the first, but all machines are named, and the
    number of threads is the median one.

    Args:
        tables: One or more.
    """
    first, machines = tables[0], dict.fromkeys(table.machine for table in tables)
    shared = [key for key in first.timings if all(key in table.timings for table in tables)]
    timings = {
        key: Timing(*map(statistics.median, zip(*(t.timings[key] for t in tables), strict=True)))
        for key in shared
    }
    threads = statistics.median_low(table.threads for table in tables)
    return replace(first, machine=", ".join(machines), threads=threads, timings=timings)


def _text(value: Any) -> str:
    if not (isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable()):
        raise ValueError(f"expected a line of text, got {show(value)}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_NUMBER:
        raise ValueError(f"expected a whole number up to {LARGEST_NUMBER}, got {show(value)}")
    return value


_HEAD: dict[str, Callable[[Any], Any]] = {
    **{"machine": _text, "device": _text, "clock": _text, "norm": _text, "torch": _text},
    **{"threads": _number, "batch_size": _number},
}


def _timings(layers: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Key, Timing]]:
    for layer in layers:
        timing = Timing(float(layer["median_ms"]), float(layer["spread_ms"]))
        if not (0 < timing.median_ms <= LONGEST_MS and 0 <= timing.spread_ms <= LONGEST_MS):
            raise ValueError(f"times must be above 0, at most {LONGEST_MS:g} ms, got {timing}")
        yield (
            LayerKey(
                _text(layer["op"]),
                tuple(map(_number, layer["input_shape"])),
                tuple(map(_number, layer["output_shape"])),
                *(_number(layer[key]) for key in ("expansion", "kernel", "stride")),
            ),
            timing,
        )
