"""Latency tables: the time of every layer of a search space, measured on this machine.

:func:`measure_latency` times modules with torch.utils.benchmark; :func:`to_json` and
:func:`from_json` write and read a table. A network's predicted latency is the sum over its layers
(Cai et al. 2019, ProxylessNAS, arXiv 1812.00332, section 3.3).
"""

import functools
import json
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from time import process_time
from typing import Annotated, NamedTuple

import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.parser import LONGEST_LINE, Between, Checked, Line, parse
from fednas_flwr.spaces.genotype import read_document
from fednas_flwr.spaces.mbconv import Layer

FORMAT = "fednas-latency"
VERSION = 1
RUN_BEFORE = 5  # layers that run before each measurement
LONGEST_MS = 1e9  # the sum over a network stays finite


Sized = tuple[torch.nn.Module, tuple[int, ...]]  # a module and the shape of one example
Size = Annotated[int, Between(0, 2**31 - 1)]


@dataclass(frozen=True)
class Conditions:
    """The conditions under which layers are timed.

    Attributes:
        device: Device on which they run; modules are moved there.
        threads: Number of torch's threads, set only for the time of the measurement.
        batch_size: Examples in one forward, 1 or more.
        passes: Number of measurements of each module, 2 or more.
    """

    device: torch.device
    threads: int
    batch_size: int
    passes: int


class Timing(NamedTuple):
    """Milliseconds of one forward of a batch, over repeated runs.

    Attributes:
        median_ms: Median.
        spread_ms: Distance between the quartiles.
    """

    median_ms: float
    spread_ms: float


@dataclass(frozen=True)
class MeasuredLayer(Checked):
    """A layer of a network (``mbconv.Layer``), its median time and the spread of its times."""

    op: Line
    input_shape: tuple[Size, ...]
    output_shape: tuple[Size, ...]
    expansion: Size
    kernel: Size
    stride: Size
    median_ms: Annotated[float, Between(0, LONGEST_MS, above=True)]
    spread_ms: Annotated[float, Between(0, LONGEST_MS)]


@dataclass(frozen=True)
class LatencyTable(Checked):
    """Measured layers and the conditions of the measurement.

    Attributes:
        machine: Name of the processor or GPU, as the system gives it.
        device: ``cpu`` or ``cuda``.
        clock: ``process_time`` (one thread on the CPU) or ``timer``: wall time.
        threads: Number of torch's threads on the CPU.
        batch_size: Examples in one forward.
        norm: Norm of the layers.
        torch: Version of torch.
        layers: Each distinct layer once.
    """

    machine: Line
    device: Line
    clock: Line
    threads: Size
    batch_size: Size
    norm: Line
    torch: Line
    layers: list[MeasuredLayer]

    def __post_init__(self) -> None:
        """Refuse a table in which a layer occurs twice."""
        super().__post_init__()
        if len(self.timings) != len(self.layers):
            raise ConfigError("layers: a layer appears twice.")

    @functools.cached_property
    def timings(self) -> dict[Layer, Timing]:
        """The times by layer."""
        return {Layer(*v[:6]): Timing(*v[6:]) for v in map(astuple, self.layers)}

    def latency_ms(self, layer: Layer) -> float:
        """Look up the median time of a layer.

        Raises:
            ConfigError: The layer was not measured.
        """
        if layer not in self.timings:
            shown = ", ".join(f"{name} {value}" for name, value in layer._asdict().items())
            raise ConfigError(
                f"the latency table of {self.machine} lacks the layer {shown}: measure the search "
                "space and the input shape of this run with `fednas latency measure`."
            )
        return self.timings[layer].median_ms


def measure_latency(
    layers: Iterable[Layer],
    make: Callable[[Layer], torch.nn.Module],
    under: Conditions,
    *,
    norm: str,
    networks: Sequence[Sized] = (),
) -> tuple[LatencyTable, list[Timing]]:
    """Return the table of all distinct layers, and the times of whole networks.

    Both are measured in the same passes, since the machine's other load differs from one hour to
    the next.

    Args:
        layers: Layers to time; duplicates are measured once.
        make: Returns the module of a layer.
        under: Conditions of the measurement.
        norm: Norm with which ``make`` builds, for the record.
        networks: Networks to time as well.
    """
    different = list(dict.fromkeys(layers))
    sized = [*((make(layer), layer.input_shape) for layer in different), *networks]
    timings = time_modules(sized, under)
    table = LatencyTable(
        machine=machine_name(under.device),
        device=under.device.type,
        clock=_clock(under).__name__,
        threads=under.threads,
        batch_size=under.batch_size,
        norm=norm,
        torch=torch.__version__,
        layers=[MeasuredLayer(*key, *t) for key, t in zip(different, timings, strict=False)],
    )
    return table, timings[len(different) :]


def time_modules(modules: Sequence[Sized], under: Conditions) -> list[Timing]:
    """Return the times of modules' forwards in evaluation mode, without gradients.

    Each module runs once at a time, right after some of the others. A layer that is repeated finds
    its code and data in the processor's caches, and the sum of such times is 20 to 35 % below a
    network's time (measured; 0 to 8 % with the method here). Every pass measures all modules, so
    that a slow moment of the machine affects all alike and the median ignores it.

    Args:
        modules: Modules, each with the shape of one example.
        under: Conditions of the measurement.
    """
    from torch.utils.benchmark import Timer  # looks for CUDA, and warns, on import

    runs = []
    for module, shape in modules:
        x = torch.randn(under.batch_size, *shape, device=under.device)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)  # as inside the networks
        runs.append(functools.partial(module.to(under.device).eval(), x))
    times: list[list[float]] = [[] for _ in runs]
    with torch.inference_mode():
        for _ in range(under.passes):
            for index, found in enumerate(times):
                others = [runs[index - 1 - k] for k in range(min(RUN_BEFORE, len(runs) - 1))]
                timer = Timer(
                    "run()",
                    setup="for other in others: other()",
                    globals={"run": runs[index], "others": others},
                    num_threads=under.threads,
                    timer=_clock(under),
                )
                found.append(1e3 * timer.timeit(1).mean)
    return [summarise(found) for found in times]


def _clock(under: Conditions) -> Callable[[], float]:
    """Return a clock: for one thread, processor time, unaffected by other programs; else wall time.

    torch's own timer waits for a GPU.
    """
    from torch.utils.benchmark import timer

    return process_time if under.device.type == "cpu" and under.threads == 1 else timer


def summarise(times_ms: list[float]) -> Timing:
    """Return the median and spread of two or more times, to the nanosecond."""
    first, median, third = statistics.quantiles(times_ms, n=4, method="inclusive")
    return Timing(round(median, 6), round(third - first, 6))


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor, as far as the system provides it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def to_json(table: LatencyTable) -> str:
    """Return the table as JSON, one layer per line; :func:`from_json` returns an equal table."""
    head = {"format": FORMAT, "version": VERSION, **asdict(table)}
    lines = ",\n  ".join(json.dumps(layer) for layer in head.pop("layers"))
    return json.dumps(head, indent=1)[:-2] + f',\n "layers": [\n  {lines}\n ]\n}}\n'


def from_json(text: str, *, origin: str = "latency table") -> LatencyTable:
    """Return the table in ``text``.

    Raises:
        ConfigError: The text is not such a table, has another version or a layer twice, or a time
            is no positive number.
    """
    hint = ": measure anew by `fednas latency measure`"
    fields = read_document(text, origin=origin, format=FORMAT, version=VERSION, hint=hint)
    return parse(LatencyTable, fields, key=origin)


def median_table(tables: Sequence[LatencyTable]) -> LatencyTable:
    """Return the table of all layers that every table has, with the medians of their times.

    The conditions are those of the first table, but all machines are named, and the number of
    threads is the median.

    Args:
        tables: One or more tables.
    """
    first, machines = tables[0], dict.fromkeys(table.machine for table in tables)
    shared = [key for key in first.timings if all(key in table.timings for table in tables)]
    layers = []
    for key in shared:
        times = zip(*(table.timings[key] for table in tables), strict=True)
        layers.append(MeasuredLayer(*key, *(statistics.median(each) for each in times)))
    threads = statistics.median_low(table.threads for table in tables)
    return replace(
        first, machine=", ".join(machines)[:LONGEST_LINE], threads=threads, layers=layers
    )
