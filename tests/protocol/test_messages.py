import io
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.data.statistics import Statistics
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.protocol import messages
from fednas_flwr.protocol.messages import BLOCK, SCALES, Reply, Request, encode_reply, round_reply
from fednas_flwr.protocol.requests import Describe
from fednas_flwr.protocol.states import Layout, pack
from fednas_flwr.protocol.sum_requests import Summed
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.server.reply_checks import accept_reply

from ..refusals import raising, refuses
from ..server.conftest import SEARCH

HEADER = messages.Header("run", "search", 3, 2, 1, "abc")
STATES = {
    "weights": {"float32": torch.randn(1000), "float64": torch.randn(3).double()},
    "buffers": {"int64": torch.tensor([2**40, -1]), "bool": torch.tensor([True, False])},
}


def restore_vector(values, scales):
    """Values of a rounded vector, as a reader restores them."""
    return values.float() * scales.repeat_interleave(BLOCK)[: len(values)]


def test_requests_that_differ_in_anything_have_other_digests():
    """Sites that compare digests, as in secure sums, know that all are asked the same."""
    half = {"weights": {"float32": STATES["weights"]["float32"][:500]}}
    other = {"weights": {"float32": -STATES["weights"]["float32"]}}
    base = Request("train.search", HEADER, SEARCH, STATES)
    changes = [
        {"action": "train.weights"},
        {"settings": replace(SEARCH, data_set="other")},
        *({"states": states} for states in (half, other, {"alphas": other["weights"]})),
        {"states": {"weights": {"float64": STATES["weights"]["float64"]}}},
        {"statistics": Statistics((0.0, 1.0), (1.0, 1.0))},
        {"statistics": Statistics((0.0, 2.0), (1.0, 1.0))},
        {"statistics": Statistics((0.0, 1.0), (1.0, 2.0))},
        *({"summed": Summed("a", (0, 1, 2), {"weights": most})} for most in (1.0, 2.0)),
    ]
    digests = {base.digest} | {replace(base, **change).digest for change in changes}
    assert len(digests) == len(changes) + 1
    assert replace(base, header=replace(HEADER, nonce="other")).digest == base.digest
    content = messages.encode_request(HEADER, SEARCH, messages.encode_states(STATES))
    assert messages.decode_request("train.search", content).digest == base.digest


def test_states_of_a_sum_have_16_ranges_at_most():
    ranges = {f"state {number}": 1.0 for number in range(17)}
    refuses("expected 0 to 16 entries", Summed, "a", (0, 1, 2), ranges)
    del ranges["state 16"]
    assert Summed("a", (0, 1, 2), ranges).ranges == ranges


def test_a_reply_survives():
    metrics = {"train_loss": 0.5, "v" * 64: float("nan")}  # the longest name
    digests = {"weights": "d1", "buffers": "d2"}
    said = {"client": 1, "class_names": ["a", "b"]}
    content = encode_reply(HEADER, Reply(17, metrics, STATES, digests, said))
    header, again = messages.decode_reply(content)
    assert header == HEADER
    assert (again.num_examples, again.digests, again.properties) == (17, digests, said)
    assert again.metrics == pytest.approx(metrics, nan_ok=True)
    assert {n: set(s) for n, s in again.states.items()} == {n: set(s) for n, s in STATES.items()}
    for name, packed in again.states.items():
        for dtype, vector in packed.items():
            assert vector.dtype == STATES[name][dtype].dtype
            assert torch.equal(vector, STATES[name][dtype])


def test_decoding_copies_no_vector():
    content = encode_reply(HEADER, Reply(1, states=STATES))
    sent = [array.data for record in content.array_records.values() for array in record.values()]
    buffers = {np.frombuffer(data, np.uint8).ctypes.data: len(data) for data in sent}
    _, reply = messages.decode_reply(content)
    for packed in reply.states.values():
        for vector in packed.values():
            start, size = vector.data_ptr(), vector.numel() * vector.element_size()
            assert any(at <= start and start + size <= at + n for at, n in buffers.items())


def test_nothing_is_pickled(monkeypatch):
    for name in ("dumps", "loads", "dump", "load"):
        monkeypatch.setattr(pickle, name, raising(AssertionError("pickled")))
    content = encode_reply(HEADER, Reply(1, states=STATES))
    request = messages.encode_request(HEADER, SEARCH, messages.encode_states(STATES))
    for message in (content, request):
        for record in message.array_records.values():
            for array in record.values():
                np.load(io.BytesIO(array.data), allow_pickle=False)
    messages.decode_reply(content)
    messages.decode_request("train.search", request)


def test_payload_counts_every_vector():
    content = encode_reply(HEADER, Reply(1, states=STATES))
    data = 4 * 1000 + 8 * 3 + 8 * 2 + 2
    assert data < messages.payload_bytes(content) <= data + 4 * 128  # and four npy headers
    assert messages.payload_bytes(encode_reply(HEADER, Reply(1))) == 0


@pytest.mark.parametrize("name", ["run", "stage", "nonce"])
def test_names_that_a_site_would_keep_are_short(name):
    content = messages.encode_request(HEADER, Describe(), {})
    text = json.loads(str(content[messages.HEADER][messages.JSON]))
    for length in (300, 301):
        text["header"][name] = "é" * (length // 2) + "x" * (length % 2)
        content[messages.HEADER] = ConfigRecord({messages.JSON: json.dumps(text)})
        if length == 300:
            messages.decode_request("query.describe", content)
    with pytest.raises(ConfigError, match=f"header.{name}=é+ is out of range: expected 0 to 300"):
        messages.decode_request("query.describe", content)


# --- rounded tensors


LENGTH = 2 * BLOCK + 3
ROUNDED = ["float16", "int8"]
STEP = {"float16": 2.0**-10, "int8": 1 / 127}  # relative to a block's largest magnitude


def made(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": {"a": scale * torch.randn(LENGTH, generator=generator)},
        "alphas": {"cell": torch.randn(5, generator=generator)},
        "buffers": {"mean": torch.randn(BLOCK, generator=generator), "batches": torch.tensor(9)},
    }


def reply_of(tensors):
    digests = {name: Layout.of(own).digest for name, own in tensors.items()}
    return Reply(4.0, states={name: pack(own) for name, own in tensors.items()}, digests=digests)


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def accepted(reply, wire, base, tensors=None):
    InProcessGrid(ClientApp(), 1)  # Flower makes messages for a task only
    message = Message(encode_reply(HEADER, reply), dst_node_id=1, message_type="train.search")
    layouts = {name: Layout.of(own) for name, own in (tensors or made(0)).items()}
    given = {"settings": SEARCH, "states": base or {}, "layouts": layouts}
    exchange = Exchange("train.search", stage="search", **given)
    return accept_reply(message, exchange, header=HEADER, wire=wire)


@pytest.mark.parametrize("wire", ROUNDED)
def test_a_variance_that_rounding_takes_below_zero_is_zero(wire):
    """Beside one that rises much: steps are larger than what is left."""
    before = {"buffers": {"norm.running_var": torch.full((BLOCK,), 0.5)}}
    variances = torch.full((BLOCK,), 1e-6)
    variances[0] = 900.0
    tensors = {"buffers": {"norm.running_var": variances}}
    base = {name: pack(own) for name, own in before.items()}
    request = Request("train.search", HEADER, SEARCH, base)
    rounded = round_reply(reply_of(tensors), request, wire=wire, generator=generator_of(1))
    exact = restore_vector(*list(rounded.states["buffers"].values())) + 0.5
    assert (exact < 0).any()
    found = accepted(rounded, wire, base, tensors).states["buffers"]["float32"]
    assert torch.equal(found, exact.clamp(min=0))
    below = reply_of({"buffers": {"norm.running_var": -variances}}), "float32", base, tensors
    refuses("negative norm.running_var", accepted, *below, error=ReplyError)


def test_256_values_have_one_scale():
    vector = torch.cat([torch.full((256,), 2.0**20), torch.full((256,), 2.0**-20)])
    _, scales = messages.round_vector(vector, wire="int8", generator=generator_of(0))
    assert len(scales) == 2
    assert scales[0] / scales[1] == 2.0**40


FLOATS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1, 1, width=32)
VECTORS = hnp.arrays(np.float32, st.integers(1, 3 * BLOCK), elements=FLOATS)


@given(VECTORS, st.sampled_from(ROUNDED), st.integers(0, 2**32))
def test_every_value_is_one_of_its_two_neighbours(values, wire, seed):
    vector = torch.from_numpy(values.copy())
    rounded, scales = messages.round_vector(vector, wire=wire, generator=generator_of(seed))
    assert str(rounded.dtype) == f"torch.{wire}"
    again = restore_vector(rounded, scales).double()
    for start in range(0, len(vector), BLOCK):
        block, found = vector[start : start + BLOCK].double(), again[start : start + BLOCK]
        largest = max(block.abs().max().item(), 127 * torch.finfo(torch.float32).tiny)
        assert ((found - block).abs() <= STEP[wire] * largest * 1.001).all()


@settings(max_examples=25)
@given(
    st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=8),
    st.sampled_from(ROUNDED),
    st.integers(0, 2**32),
)
def test_rounding_is_unbiased(values, wire, seed):
    """The mean of many draws is as near as chance allows, for rare steps too."""
    block = torch.zeros(BLOCK)
    block[: len(values)] = torch.tensor(values)
    draws = 4000
    generator, repeated = generator_of(seed), block.repeat(draws)
    rounded, scales = messages.round_vector(repeated, wire=wire, generator=generator)
    found = restore_vector(rounded, scales).view(draws, BLOCK).double()
    error = (found.mean(dim=0) - block).abs()
    step = STEP[wire] * max(block.abs().max().item(), 1e-30)
    variance = step**2 * (block.abs() / step).clamp(max=0.25)  # of a draw between two neighbours
    bound = 6 * (variance / draws).sqrt() + 24 * step / draws  # Bernstein: e-18
    assert (error <= bound + 1e-6 * block.abs().max() + 1e-37).all()


@pytest.mark.parametrize("wire", ROUNDED)
def test_a_trained_model_is_sent_as_a_difference(wire):
    sent = {name: pack(own) for name, own in made(0).items()}
    near = made(0)
    for name, own in made(1, scale=1.0).items():
        for key, tensor in own.items():
            if tensor.is_floating_point():
                near[name][key] = near[name][key] + 1e-3 * tensor
    reply = reply_of(near)
    for action, base in (("train.search", sent), ("train.weight_gradient", None)):
        request = Request(action, HEADER, SEARCH, states=sent)
        rounded = round_reply(reply, request, wire=wire, generator=generator_of(3))
        found = accepted(rounded, wire, base)
        error = (found.states["weights"]["float32"] - reply.states["weights"]["float32"]).abs()
        assert 0 < error.max() <= STEP[wire] * (5e-3 if base else 5.0)
        assert torch.equal(found.states["alphas"]["float32"], reply.states["alphas"]["float32"])
        assert torch.equal(found.states["buffers"]["int64"], reply.states["buffers"]["int64"])
    twice = [round_reply(reply, request, wire=wire, generator=generator_of(4)) for _ in range(2)]
    for key, vector in twice[0].states["weights"].items():
        assert torch.equal(vector, twice[1].states["weights"][key])


def as_float16(packed):
    return {"rounded:float16": packed["rounded:int8"].half(), SCALES: packed[SCALES]}


HOSTILE = {
    "not rounded": (lambda p: {"float32": torch.zeros(LENGTH)}, "rounded to int8"),
    "no scales": (lambda p: {k: v for k, v in p.items() if k != SCALES}, "rounded to int8"),
    "a scale more": (lambda p: p | {SCALES: torch.ones(4)}, "rounded to int8"),
    "a value less": (lambda p: p | {"rounded:int8": p["rounded:int8"][1:]}, "rounded to int8"),
    "another wire": (as_float16, "rounded to int8"),
    "both": (lambda p: p | {"float32": torch.zeros(LENGTH)}, "rounded to int8"),
    "a vector more": (lambda p: p | {"more:int8": p["rounded:int8"]}, "must have sizes"),
    "other dtype": (lambda p: p | {"rounded:int8": p["rounded:int8"].short()}, "malformed"),
    "NaN scale": (lambda p: p | {SCALES: p[SCALES] * torch.nan}, "not finite"),
    "infinite scale": (lambda p: p | {SCALES: p[SCALES] * torch.inf}, "not finite"),
    "huge scale": (lambda p: p | {SCALES: torch.full((3,), 3e38)}, "not finite"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rounding_is_refused(name):
    damage, words = HOSTILE[name]
    request = Request("train.weight_gradient", HEADER, SEARCH)
    good = round_reply(reply_of(made(0)), request, wire="int8", generator=generator_of(1))
    accepted(good, "int8", None)
    bad = replace(good, states={**good.states, "weights": damage(dict(good.states["weights"]))})
    refuses(words, accepted, bad, "int8", None, error=ReplyError)


def test_a_diverged_model_is_refused_as_it_would_be_unrounded():
    for value in (torch.nan, torch.inf):
        tensors = made(0)
        tensors["weights"]["a"][5] = value
        request = Request("train.weight_gradient", HEADER, SEARCH)
        for wire in ROUNDED:
            reply = round_reply(reply_of(tensors), request, wire=wire, generator=generator_of(1))
            refuses("not finite", accepted, reply, wire, None, error=ReplyError)
