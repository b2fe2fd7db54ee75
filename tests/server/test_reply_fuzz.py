"""Whatever a reply is made of: it is refused with ReplyError, or what passes is sound."""

import json
import tracemalloc
from contextlib import suppress
from typing import get_type_hints

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednas_flwr.base.errors import ReplyError
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.protocol.messages import Header, Reply, encode_reply
from fednas_flwr.protocol.requests import decode_properties
from fednas_flwr.protocol.states import Layout, Packed, pack
from fednas_flwr.protocol.sum_requests import PROPERTIES
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.server.reply_checks import Limits, accept_reply

from ..asked import FORMS
from ..json_trees import json_trees
from ..refusals import refuses
from .conftest import SEARCH, damaging, npy, set_json, set_metric, set_vector

HEADER = Header("run", "search", 3, 1, 1, "0123456789abcdef")
MOST = 100.0
TENSORS = {
    "weights": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(40)},
    "alphas": {"cell": torch.tensor([[-1.0, 0.5]])},
    "buffers": {"mean": torch.zeros(3), "batches": torch.tensor(7)},
}
LAYOUTS = {name: Layout.of(tensors) for name, tensors in TENSORS.items()}
SENT: dict[str, Packed] = {name: pack(tensors) for name, tensors in TENSORS.items()}
GOOD = Reply(
    num_examples=17.0,
    metrics={"train_loss": 1.5},
    states=SENT,
    digests={name: layout.digest for name, layout in LAYOUTS.items()},
)
ASKED = Exchange("train.search", stage="search", settings=SEARCH, states=SENT, layouts=LAYOUTS)

JSON = json_trees(st.text(max_size=20))
PATHS = [
    (),
    ("header",),
    *(("header", name) for name in vars(HEADER)),
    ("digests",),
    ("digests", "weights"),
    ("properties",),
    ("properties", "changed"),
    ("properties", "changed", "weights"),
    ("header", "more"),
]
DTYPES = st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", "<c8", "|b1", "|u1", "<U2", "|O"])
NAMES = st.sampled_from(["float32", "int64", "float16", "int8", "object", ""])


def edited(text, path, value):
    """Return JSON values with another one at ``path``, where there is such a place."""
    if not path:
        return value
    if not isinstance(text, dict):
        return text
    return {**text, path[0]: edited(text.get(path[0]), path[1:], value)}


@damaging
def put_record(content, name, record):
    content[name] = record


@damaging
def edit_bytes(content, state, start, length, new):
    record = content.array_records[f"state.{state}"]
    data = record["float32"].data
    data = data[:start] + new + data[start + length :]
    record["float32"] = Array("float32", (46,), "numpy.ndarray", data)


@damaging
def announce(content, state, shape, descr):
    data = npy(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}") + b"\0" * 64
    record = content.array_records[f"state.{state}"]
    record["float32"] = Array("float32", shape, "numpy.ndarray", data)


STATES = st.sampled_from([*LAYOUTS, "other"])
VECTORS = st.builds(
    lambda dtype, shape: np.zeros(shape, dtype="<f4" if dtype == "|O" else dtype),
    DTYPES,
    st.sampled_from([(), (0,), (2,), (3,), (46,), (2, 23)]),
)
DAMAGES = st.one_of(
    st.builds(set_json, st.text(max_size=40)),
    st.builds(set_metric, st.sampled_from(["num-examples", "loss", "x" * 65]), st.floats()),
    st.builds(set_vector, STATES, VECTORS, NAMES),
    st.builds(edit_bytes, STATES, st.integers(0, 330), st.integers(0, 330), st.binary(max_size=40)),
    st.builds(
        announce,
        STATES,
        st.lists(st.integers(-1, 10**12), max_size=3).map(tuple),
        st.sampled_from(["<f4", "|O", "<f8", "|V0", "<U0"]),
    ),
    st.builds(
        put_record,
        st.sampled_from(["header", "metrics", "state.weights", "state.other", "more"]),
        st.sampled_from(
            [
                ConfigRecord({"json": "{}"}),
                MetricRecord({"num-examples": 1.0}),
                ArrayRecord({"float32": Array(np.zeros(2, np.float32))}),
                ArrayRecord({}),
            ]
        ),
    ),
)


def message_with(content):
    InProcessGrid(ClientApp(), 1)  # Flower makes messages for a task only
    return Message(content, dst_node_id=1, message_type="train.search")


@settings(max_examples=200)
@given(
    edits=st.lists(st.tuples(st.sampled_from(PATHS), JSON), max_size=2),
    damages=st.lists(DAMAGES, max_size=2),
)
@example(edits=[], damages=[set_json("[" * 990 + "]" * 990)])
def test_a_reply_is_refused_or_sound(edits, damages):
    content = encode_reply(HEADER, GOOD)
    text = json.loads(str(content["header"]["json"]))
    for path, value in edits:
        text = edited(text, path, value)
    content["header"]["json"] = json.dumps(text)
    for damage in damages:
        with suppress(KeyError):  # of what another one has taken away
            damage(content)
    try:
        reply = accept_reply(message_with(content), ASKED, header=HEADER, limits=Limits(MOST))
    except ReplyError:
        assert damages or edits
        return
    assert 1 <= reply.num_examples <= MOST
    assert set(reply.states) == set(LAYOUTS)
    for name, layout in LAYOUTS.items():
        assert {d: v.numel() for d, v in reply.states[name].items()} == layout.sizes
        for dtype, vector in reply.states[name].items():
            assert str(vector.dtype) == f"torch.{dtype}"
            assert torch.isfinite(vector * MOST).all()
    if not damages:
        assert reply.num_examples == GOOD.num_examples
        for name, packed in GOOD.states.items():
            for dtype, vector in packed.items():
                assert torch.equal(reply.states[name][dtype], vector)


@given(st.dictionaries(st.sampled_from(sorted(FORMS)), JSON), st.sampled_from(sorted(PROPERTIES)))
def test_properties_are_refused_or_pass_and_nothing_else(said, action):
    form, _ = PROPERTIES[action]
    try:
        properties = decode_properties(action, json.loads(json.dumps(said)))
    except ReplyError:
        return
    assert set(properties) == set(said) <= set(get_type_hints(form))
    assert type(properties.get("client", 0)) is int


@pytest.mark.parametrize("descr", ["<f4", "<f8", "|V1000"])
@pytest.mark.parametrize("shape", [(10**9,), (2**62,), (10**6, 10**6)])
def test_memory_is_that_of_what_was_sent_not_of_what_it_announces(descr, shape):
    content = encode_reply(HEADER, GOOD)
    announce("weights", shape, descr)(content)
    message = message_with(content)
    tracemalloc.start()
    try:
        refuses("malformed", accept_reply, message, ASKED, header=HEADER, error=ReplyError)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
