"""Requests and replies as Flower records; all record keys are defined here.

A message carries one ConfigRecord (a JSON header), one ArrayRecord per state with one vector per
dtype, and, in a reply, one MetricRecord. Nothing is pickled: vectors travel in the npy format.

**Tensors that travel as float16 or int8** instead of float32 (``runtime.wire``). A client rounds
its values at random, such that the expectation is the exact value (stochastic rounding, as in QSGD:
Alistarh et al., 2017, arXiv 1610.02132, section 3.1). For a model that was trained from the one it
was sent, the difference from that one is rounded, which is far smaller. Noised releases are rounded
after the noise, so that privacy is that of the release. Clients keep nothing between rounds, so
they cannot correct rounding errors later; instead their rounding is unbiased.

Weights that the server sends for training are rounded to the nearest value. The server keeps the
exact weights and adds to them the differences from what was sent, so that its rounding does not
accumulate. Measurements always use the exact model.

Each block of 256 values has its own scale, its largest magnitude. Shorter vectors, such as alphas
and rewards, and those of other dtypes travel unchanged: :func:`round_reply` and :func:`restore`,
:func:`round_sent` and :func:`restore_sent`.
"""

import hashlib
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor
from torch.nn import functional

from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.data.statistics import Statistics
from fednas_flwr.privacy import actions, plan
from fednas_flwr.protocol.requests import Settings, decode
from fednas_flwr.protocol.secure_sum.masks import Cells, Grid
from fednas_flwr.protocol.states import MOMENTS, Layout, Packed, States, Tensors, pack
from fednas_flwr.protocol.sum_requests import Header as Header
from fednas_flwr.protocol.sum_requests import Summed
from fednas_flwr.settings.parser import parse

HEADER, JSON, METRICS, NUM_EXAMPLES = "header", "json", "metrics", "num-examples"
STATE_PREFIX = "state."
LONGEST_HEADER = 2**23  # of JSON in a reply, enough for 54,000 columns; ten times that once parsed
MOST_METRICS = 64  # per reply; also the most characters of a name
BUDGET_SPENT = 1001  # error code of a client that leaves the run; Flower's own codes are below 1000
BLOCK = 256
SCALES = "scales:float32"  # keys of the vectors that replace a float32 vector: <what>:<dtype>
LARGEST = {"float16": 1.0, "int8": 127.0}  # magnitude of a rounded value

with warnings.catch_warnings():  # torch warns once per process that messages are read-only
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))


@dataclass(frozen=True)
class Request:
    """Request to a client.

    Attributes:
        action: One of ``actions.ACTIONS``, e.g. ``train.search``.
        header: Exchange to which it belongs.
        settings: Arguments of the action.
        states: Packed tensors by state: ``weights``, ``alphas``, ``buffers``, ``moments``.
        statistics: Statistics by which all clients standardise a table without declared ones.
        summed: Terms of masking the reply; None asks for a reply that the server can read.
        planned: The plan of each kind of release, at a private site that has admitted the request;
            None before. It does not travel.
    """

    action: str
    header: Header
    settings: Settings
    states: States = field(default_factory=dict)
    statistics: Statistics | None = None
    summed: Summed | None = None
    planned: Mapping[str, plan.PlannedRelease] | None = None

    @property
    def releases(self) -> Mapping[str, plan.PlannedRelease]:
        """The plan of each kind of release; empty without privacy."""
        return self.planned or {}

    @property
    def network(self) -> Mapping[str, Any]:
        """Description of the request's network, by default that of the supernet."""
        return self.settings.described or {"name": actions.SUPERNET}

    @property
    def network_states(self) -> dict[str, Packed]:
        """The states to load into the request's network: all but those sent along with it."""
        beside = (MOMENTS, "previous_weights")
        return {name: state for name, state in self.states.items() if name not in beside}

    @property
    def grids(self) -> dict[str, Grid]:
        """The grids of states whose noise clients share.

        Raises:
            ValueError: A range is invalid.
        """
        return {} if self.summed is None else self.summed.grids

    @property
    def digest(self) -> str:
        """64 hex digits that differ when action, settings, tensors, ranges or statistics differ."""
        ranges = {} if self.summed is None else self.summed.ranges
        statistics = {} if self.statistics is None else vars(self.statistics)
        asked = [self.action, asdict(self.settings), ranges, statistics]
        hashed = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
        for name in sorted(self.states):
            for dtype, vector in sorted(self.states[name].items()):
                hashed.update(json.dumps([name, dtype, vector.numel()]).encode())
                hashed.update(vector.numpy().data)
        return hashed.hexdigest()


@dataclass(frozen=True)
class Reply:
    """Reply of a client.

    Attributes:
        num_examples: Number of examples that the reply represents, its weight in averages.
        metrics: Numbers by name, never averaged into a state. A loss may be NaN or infinite.
        states: Packed tensors by state.
        digests: The layout digest of every state, see ``Layout.digest``.
        properties: JSON values by name; in a reply that the server has accepted, the TypedDict of
            its action.
        shares: For each state, the cells that replace its packed tensors if clients share the
            noise. They leave only under masks.
        sites: Number of clients that it represents: more than 1 for the total of a secure sum. It
            does not travel.
    """

    num_examples: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    properties: Any = field(default_factory=dict)
    shares: Mapping[str, Cells] = field(default_factory=dict)
    sites: int = 1

    @classmethod
    def of(
        cls,
        num_examples: float,
        states: Mapping[str, Tensors | Cells],
        metrics: Mapping[str, float] | None = None,
        *,
        like: Mapping[str, Tensors] = {},
    ) -> "Reply":
        """Return the reply that carries tensors by state, or shares of tensors ``like`` these."""
        shares = {name: cells for name, cells in states.items() if isinstance(cells, Cells)}
        named = {name: of for name, of in states.items() if not isinstance(of, Cells)}
        layouts = {name: Layout.of(named[name] if name in named else like[name]) for name in states}
        digests = {name: layout.digest for name, layout in layouts.items()}
        packed = {name: pack(tensors) for name, tensors in named.items()}
        return cls(num_examples, metrics or {}, packed, digests, shares=shares)

    def weighing(self, scale: float, *, summed: Sequence[str]) -> "Reply":
        """Return the reply with its weight, and its ``summed`` states, scaled."""
        scaled = {
            name: {dtype: vector * scale for dtype, vector in self.states[name].items()}
            for name in summed
        }
        return replace(
            self, num_examples=self.num_examples * scale, states={**self.states, **scaled}
        )


def encode_states(states: States) -> dict[str, ArrayRecord]:
    """Return one record per state, made once per exchange and shared by all its messages."""
    return {
        STATE_PREFIX + name: ArrayRecord(
            {dtype: Array(vector.numpy()) for dtype, vector in packed.items()}
        )
        for name, packed in states.items()
    }


@dataclass(frozen=True)
class _Values:
    """The JSON values of a request."""

    header: Header
    settings: dict[str, Any]
    statistics: Statistics | None = None
    summed: Summed | None = None


def encode_request(
    header: Header,
    settings: Settings,
    states: Mapping[str, ArrayRecord],
    statistics: Statistics | None = None,
    summed: Summed | None = None,
) -> RecordDict:
    """Return the content of a request; ``states`` comes from :func:`encode_states`."""
    text = json.dumps(asdict(_Values(header, asdict(settings), statistics, summed)))
    return RecordDict({HEADER: ConfigRecord({JSON: text}), **states})


def decode_request(action: str, content: RecordDict) -> Request:
    """Return the request in a message's content.

    Raises:
        ConfigError: It is no request, see :func:`~fednas_flwr.protocol.requests.decode`, or not in
            the form that :func:`encode_request` writes.
    """
    try:
        text, states = _read_json(content), _decode_states(content)
    except Exception as error:  # anything that a server can send, as in decode_reply
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"refused, a malformed request: {reason}.") from error
    values: _Values = parse(_Values, text, key="", defaults=True)
    settings = decode(action, values.settings)
    return Request(action, values.header, settings, states, values.statistics, values.summed)


def encode_reply(header: Header, reply: Reply) -> RecordDict:
    """Return the content of a reply to the request with ``header``.

    Raises:
        ValueError: It holds shares that are not masked.
    """
    if reply.shares:
        raise ValueError(f"shares of {sorted(reply.shares)} may not leave without masks")
    said = {"digests": dict(reply.digests), "properties": dict(reply.properties)}
    text = json.dumps({"header": vars(header), **said})
    metrics = {NUM_EXAMPLES: reply.num_examples, **reply.metrics}
    numbers = MetricRecord({name: float(value) for name, value in metrics.items()})
    states = encode_states(reply.states)
    return RecordDict({HEADER: ConfigRecord({JSON: text}), METRICS: numbers, **states})


def decode_reply(content: RecordDict) -> tuple[Header, Reply]:
    """Return header and reply of a message's content.

    Raises:
        ReplyError: A record is missing or is not of the form that :func:`encode_reply` writes.
    """
    try:
        text = _read_json(content, longest=LONGEST_HEADER)
        header: Header = parse(Header, text["header"], key="header")
        numbers = content.metric_records[METRICS]
        metrics = {name: float(cast(float, value)) for name, value in numbers.items()}
        if len(metrics) > MOST_METRICS or any(len(name) > MOST_METRICS for name in metrics):
            raise ValueError(f"at most {MOST_METRICS} metrics, with names no longer, are taken")
        reply = Reply(
            num_examples=metrics.pop(NUM_EXAMPLES),
            metrics=metrics,
            states=_decode_states(content),
            digests=dict(text["digests"]),
            properties=dict(text["properties"]),
        )
    except Exception as error:  # anything a client can send, even JSON that is too deep
        raise ReplyError(f"malformed reply: {type(error).__name__}: {error}") from error
    return header, reply


def _read_json(content: RecordDict, *, longest: int | None = None) -> Any:
    """Return the JSON values that a message has along with its tensors."""
    text = cast(str, content.config_records[HEADER][JSON])
    if longest is not None and len(text) > longest:
        raise ValueError(f"{len(text)} characters of JSON, at most {longest} are read")
    values = json.loads(text)
    json.dumps(values, ensure_ascii=False).encode()  # otherwise no sentence about it could be sent
    return values


def payload_bytes(content: RecordDict) -> int:
    """Return the number of bytes of all arrays in a message's content."""
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def _decode_states(content: RecordDict) -> dict[str, Packed]:
    return {
        name.removeprefix(STATE_PREFIX): {
            dtype: _vector(dtype, array) for dtype, array in record.items()
        }
        for name, record in content.array_records.items()
    }


def _vector(dtype: str, array: Array) -> Tensor:
    """Return the vector of an npy array without a copy; it must not be written to.

    ``dtype`` is the dtype of its elements; a prefix before a colon says what the vector holds.
    """
    stream = io.BytesIO(array.data)
    version = np.lib.format.read_magic(stream)
    shape, _, numpy_dtype = np.lib.format.read_array_header_1_0(stream)
    values = np.frombuffer(array.data, dtype=numpy_dtype, offset=stream.tell())
    name = numpy_dtype.name
    if version != (1, 0) or values.shape != shape or name != dtype.rpartition(":")[2]:
        seen = f"{values.size} of {name} in the shape {shape}"
        raise ValueError(f"a vector of {dtype} was expected, got {seen}")
    if array.stype != "numpy.ndarray":
        raise ValueError(f"arrays travel as numpy.ndarray, got {array.stype!r}")
    return torch.from_numpy(values)


def round_reply(reply: Reply, request: Request, *, wire: str, generator: torch.Generator) -> Reply:
    """Return the reply with every long float32 vector rounded to ``wire``."""
    if wire == "float32":
        return reply
    states = {}
    for name, packed in reply.states.items():
        base = request.states.get(name) if actions.ACTIONS[request.action].trains else None
        states[name] = _round_packed(packed, base or {}, wire=wire, generator=generator)
    return replace(reply, states=states)


def restore(packed: Packed, layout: Layout, *, wire: str, base: Packed | None) -> Packed:
    """Return the state that :func:`round_reply` has rounded, to be checked like any other.

    Args:
        packed: The state as it arrived; nothing in it has been checked.
        layout: Layout of the state that was asked for.
        wire: Wire format of the run.
        base: The same state at the server, if the action trains a model that was sent.

    Raises:
        ReplyError: The vectors are not those of a rounded state of this layout.
    """
    length = layout.sizes.get("float32", 0)
    if wire == "float32" or length < BLOCK:
        return packed
    key, expected = f"rounded:{wire}", math.ceil(length / BLOCK)
    sizes = {dtype: vector.numel() for dtype, vector in packed.items()}
    if sizes.get(key) != length or sizes.get(SCALES) != expected or "float32" in packed:
        raise ReplyError(
            f"{length} values rounded to {wire} and {expected} scales were expected, got vectors "
            f"of sizes {str(sizes)[:200]}"
        )
    restored = _restored(packed, key)
    if base is not None:
        restored["float32"] += base["float32"]
    return restored


def round_sent(states: States, *, action: str, wire: str) -> dict[str, Packed]:
    """Return the states of a request, with long weights rounded if they are to be trained."""
    sent = dict(states)
    if wire != "float32" and action.startswith("train.") and "weights" in sent:
        sent["weights"] = _round_packed(sent["weights"], {}, wire=wire, generator=None)
    return sent


def restore_sent(states: States) -> dict[str, Packed]:
    """Return the states of a request with rounded vectors converted to float32.

    Raises:
        ConfigError: A rounded vector does not have one scale per block.
    """
    restored = dict(states)
    for name, packed in states.items():
        key = next((f"rounded:{wire}" for wire in LARGEST if f"rounded:{wire}" in packed), None)
        if key is None:
            continue
        num_values, num_scales = len(packed[key]), len(packed.get(SCALES, ()))
        if num_scales != math.ceil(num_values / BLOCK):
            raise ConfigError(
                f"refused: {name} has {num_values} rounded values and {num_scales} scales; one for "
                f"each {BLOCK} values was expected."
            )
        restored[name] = _restored(packed, key)
    return restored


def round_vector(
    vector: Tensor, *, wire: str, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return values and scales with ``E[values * scales] = vector``, or the nearest ones.

    ``q = floor(y) + [u < y - floor(y)]`` in units of the resolution of ``wire``, u uniform.

    Args:
        vector: float32 [n].
        wire: ``float16`` or ``int8``.
        generator: Source of u; without one u is one half.

    Returns:
        Values, [n] of the dtype ``wire``; scales, float32 [ceil(n / 256)]. Values that are not
        finite give scales that are not finite.
    """
    blocks = functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1) / LARGEST[wire]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = blocks / scales[:, None]
    units = torch.ones_like(scaled)
    if wire == "float16":  # between 2 ** (e - 1) and 2 ** e the step is 2 ** (e - 11)
        units = torch.ldexp(units, torch.frexp(scaled).exponent.clamp(min=-13) - 11)
    steps = scaled / units
    low = steps.floor()
    uniform = torch.full_like(steps, 0.5)
    if generator is not None:
        uniform.uniform_(generator=generator)
    values = (low + (uniform < steps - low)) * units
    values = values.clamp(-LARGEST[wire], LARGEST[wire])  # the division may give slightly more
    return values.flatten()[: len(vector)].to(getattr(torch, wire)), scales


def _restored(packed: Packed, key: str) -> Packed:
    rest = {dtype: v for dtype, v in packed.items() if dtype not in (key, SCALES)}
    scales = packed[SCALES].repeat_interleave(BLOCK)[: len(packed[key])]
    return {**rest, "float32": packed[key].float().mul_(scales)}


def _round_packed(
    packed: Packed, base: Mapping[str, Tensor], *, wire: str, generator: torch.Generator | None
) -> Packed:
    vector = packed.get("float32")
    if vector is None or len(vector) < BLOCK:
        return packed
    if "float32" in base:
        vector = vector - base["float32"]
    values, scales = round_vector(vector, wire=wire, generator=generator)
    rest = {dtype: v for dtype, v in packed.items() if dtype != "float32"}
    return {**rest, f"rounded:{wire}": values, SCALES: scales}
