from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord

from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.data.statistics import Statistics
from fednas_flwr.protocol import messages
from fednas_flwr.protocol.messages import (
    Header,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    encode_states,
    payload_bytes,
)
from fednas_flwr.protocol.requests import Describe
from fednas_flwr.protocol.sum_requests import Summed

from ..server.conftest import SEARCH

HEADER = Header("run", "search", 3, 2, 1, "abc")
STATES = {
    "weights": {"float32": torch.randn(1000), "float64": torch.randn(3).double()},
    "buffers": {"int64": torch.tensor([2**40, -1]), "bool": torch.tensor([True, False])},
}


def assert_equal_states(left, right):
    assert {n: set(s) for n, s in left.items()} == {n: set(s) for n, s in right.items()}
    for name, packed in left.items():
        for dtype, vector in packed.items():
            assert vector.dtype == right[name][dtype].dtype
            assert torch.equal(vector, right[name][dtype])


def test_a_request_survives():
    content = encode_request(HEADER, SEARCH, encode_states(STATES))
    request = decode_request("train.search", content)
    assert (request.action, request.header, request.settings) == ("train.search", HEADER, SEARCH)
    assert_equal_states(request.states, STATES)


def test_requests_that_differ_in_anything_have_other_digests():
    """Sites that compare digests, as in secure sums, know that all are asked the same."""
    half = {"weights": {"float32": STATES["weights"]["float32"][:500]}}
    other = {"weights": {"float32": -STATES["weights"]["float32"]}}
    base = Request("train.search", HEADER, SEARCH, STATES)
    changes = [
        {"action": "train.weights"},
        {"settings": replace(SEARCH, sparse=True)},
        {"states": half},
        {"states": other},
        {"states": {"alphas": other["weights"]}},
        {"states": {"weights": {"float64": STATES["weights"]["float64"]}}},
        {"statistics": Statistics((0.0, 1.0), (1.0, 1.0))},
        {"statistics": Statistics((0.0, 2.0), (1.0, 1.0))},
        {"statistics": Statistics((0.0, 1.0), (1.0, 2.0))},
        {"summed": Summed("a", (0, 1, 2), {"weights": 1.0})},
        {"summed": Summed("a", (0, 1, 2), {"weights": 2.0})},
    ]
    digests = {base.digest} | {replace(base, **change).digest for change in changes}
    assert len(digests) == len(changes) + 1
    assert replace(base, header=replace(HEADER, nonce="other")).digest == base.digest
    assert decode_request(
        "train.search", encode_request(HEADER, SEARCH, encode_states(STATES))
    ).digest == (base.digest)


def test_a_reply_survives():
    reply = Reply(
        num_examples=17,
        metrics={"train_loss": 0.5, "validation_loss": float("nan")},
        states=STATES,
        digests={"weights": "d1", "buffers": "d2"},
        properties={"client": 1, "class_names": ["a", "b"]},
    )
    header, again = decode_reply(encode_reply(HEADER, reply))
    assert header == HEADER
    assert (again.num_examples, again.digests, again.properties) == (
        17,
        reply.digests,
        reply.properties,
    )
    assert again.metrics["train_loss"] == 0.5
    assert np.isnan(again.metrics["validation_loss"])
    assert_equal_states(again.states, STATES)


def test_decoding_copies_no_vector():
    content = encode_reply(HEADER, Reply(1, states=STATES))
    buffers = {
        np.frombuffer(array.data, np.uint8).ctypes.data: len(array.data)
        for record in content.array_records.values()
        for array in record.values()
    }
    _, reply = decode_reply(content)
    for packed in reply.states.values():
        for vector in packed.values():
            start, size = vector.data_ptr(), vector.numel() * vector.element_size()
            assert any(at <= start and start + size <= at + n for at, n in buffers.items())


def test_nothing_is_pickled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickled")

    for name in ("dumps", "loads", "dump", "load"):
        monkeypatch.setattr(pickle, name, refuse)
    content = encode_reply(HEADER, Reply(1, states=STATES))
    request = encode_request(HEADER, SEARCH, encode_states(STATES))
    for message in (content, request):
        for record in message.array_records.values():
            for array in record.values():
                np.load(io.BytesIO(array.data), allow_pickle=False)
    decode_reply(content)
    decode_request("train.search", request)


@pytest.mark.parametrize(
    "values",
    [
        np.array([{"a": 1}], dtype=object),
        np.zeros((2, 2), dtype=np.float32),
        np.zeros(2, dtype=np.float64),
        np.zeros(2, dtype=">f4"),
        np.array([("a", 1)], dtype=[("x", "U1"), ("y", "i4")]),
    ],
    ids=["objects", "matrix", "other dtype", "big-endian", "structure"],
)
def test_only_native_vectors_of_the_named_dtype_are_read(values):
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=True)
    content = encode_reply(HEADER, Reply(1, states={"weights": {"float32": torch.zeros(2)}}))
    array = Array("float32", (2,), "numpy.ndarray", stream.getvalue())
    content.array_records["state.weights"]["float32"] = array
    with pytest.raises(ReplyError, match="malformed reply"):
        decode_reply(content)


def test_payload_counts_every_vector():
    content = encode_reply(HEADER, Reply(1, states=STATES))
    data = 4 * 1000 + 8 * 3 + 8 * 2 + 2
    assert data < payload_bytes(content) <= data + 4 * 128  # and four npy headers
    assert payload_bytes(encode_reply(HEADER, Reply(1))) == 0


@pytest.mark.parametrize("name", ["run", "stage", "nonce"])
def test_names_that_a_site_would_keep_are_short(name: str) -> None:
    content = encode_request(HEADER, Describe(), {})
    text = json.loads(str(content[messages.HEADER][messages.JSON]))
    for length in (300, 301):
        text["header"][name] = "é" * (length // 2) + "x" * (length % 2)
        content[messages.HEADER] = ConfigRecord({messages.JSON: json.dumps(text)})
        if length == 300:
            decode_request("query.describe", content)
    with pytest.raises(ConfigError, match=f"header.{name}=é+ is out of range: expected 0 to 300"):
        decode_request("query.describe", content)
