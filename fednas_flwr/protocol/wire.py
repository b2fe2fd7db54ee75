"""Tensors that travel as float16 or int8 instead of float32: ``wire``.

A client rounds what it sends at random, such that its expectation is what it would have sent
(stochastic rounding, as in QSGD: Alistarh et al., 2017, arXiv 1610.02132, section 3.1). Of a model
that was trained from the one it was sent, the difference to that is rounded, which is far smaller.
Noised releases are rounded after the noise, so that privacy is that of the release. Clients keep
nothing between rounds, and so no error to make up for: their rounding is unbiased instead.

The weights that a server sends to be trained are rounded to the nearest value. It keeps them
exactly, and adds to these the differences to what was sent, so that its rounding does not add up.
Whatever is measured is the exact model.

Each block of 256 values has a scale of its own, its largest magnitude. Shorter vectors, such as
alphas and rewards, and those of other dtypes travel as they are. Main functions:
:func:`round_reply` and :func:`restore`, :func:`round_sent` and :func:`restore_sent`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.states import Layout, Packed

BLOCK = 256
SCALES = "scales:float32"  # keys of the vectors that stand for a float32 vector: <what>:<dtype>
LARGEST = {"float16": 1.0, "int8": 127.0}  # magnitude of a rounded value


def round_reply(reply: Reply, request: Request, *, wire: str, generator: torch.Generator) -> Reply:
    """Return the reply with every long float32 vector rounded to ``wire``."""
    if wire == "float32":
        return reply
    states = {}
    for name, packed in reply.states.items():
        base = request.states.get(name) if ACTIONS[request.action].trains else None
        states[name] = _round_packed(packed, base or {}, wire=wire, generator=generator)
    return replace(reply, states=states)


def restore(packed: Packed, layout: Layout, *, wire: str, base: Packed | None) -> Packed:
    """Return the state that :func:`round_reply` has rounded, to be checked as any other.

    Args:
        packed: As it arrived; nothing of it has been checked.
        layout: Of the state that was asked for.
        wire: Format of the run.
        base: The same state as the server has it, if its action trains a model that it was sent.

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


def round_sent(states: Mapping[str, Packed], *, action: str, wire: str) -> dict[str, Packed]:
    """Return the states of a request, with long weights rounded if they are to be trained."""
    sent = dict(states)
    if wire != "float32" and action.startswith("train.") and "weights" in sent:
        sent["weights"] = _round_packed(sent["weights"], {}, wire=wire, generator=None)
    return sent


def restore_sent(states: Mapping[str, Packed]) -> dict[str, Packed]:
    """Return the states of a request with its rounded vectors as float32.

    Raises:
        ConfigError: A rounded vector has not one scale for each block.
    """
    restored = {}
    for name, packed in states.items():
        key = next((f"rounded:{wire}" for wire in LARGEST if f"rounded:{wire}" in packed), None)
        if key is None:
            restored[name] = packed
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

    ``q = floor(y) + [u < y - floor(y)]`` in units of what ``wire`` can tell apart, u uniform.

    Args:
        vector: float32 [n].
        wire: ``float16`` or ``int8``.
        generator: Of u; without one u is one half.

    Returns:
        Values, [n] of the dtype ``wire``; scales, float32 [ceil(n / 256)]. What is not finite
        gives scales that are not.
    """
    padding = -len(vector) % BLOCK
    blocks = functional.pad(vector, (0, padding)).view(-1, BLOCK)
    tiny = torch.finfo(torch.float32).tiny
    scales = (blocks.abs().amax(dim=1) / LARGEST[wire]).clamp(min=tiny)
    scaled = blocks / scales[:, None]
    units = torch.ones_like(scaled)
    if wire == "float16":  # between 2 ** (e - 1) and 2 ** e the step is 2 ** (e - 11)
        exponents = torch.frexp(scaled).exponent.clamp(min=-13)
        units = torch.ldexp(units, exponents - 11)
    steps = scaled / units
    low = steps.floor()
    uniform = torch.full_like(steps, 0.5)
    if generator is not None:
        uniform.uniform_(generator=generator)
    values = (low + (uniform < steps - low)) * units
    values = values.clamp(-LARGEST[wire], LARGEST[wire])  # the division may end just above
    return values.flatten()[: len(vector)].to(getattr(torch, wire)), scales


def restore_vector(values: Tensor, scales: Tensor) -> Tensor:
    """Return ``values * scales``, float32 [n]."""
    return values.float().mul_(scales.repeat_interleave(BLOCK)[: len(values)])


def _restored(packed: Packed, key: str) -> Packed:
    rest = {dtype: v for dtype, v in packed.items() if dtype not in (key, SCALES)}
    return {**rest, "float32": restore_vector(packed[key], packed[SCALES])}


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
