import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from fednas_flwr.protocol import states
from fednas_flwr.protocol.states import Layout, load_states, network_states, pack, unpack
from fednas_flwr.spaces.nasbench201 import NASBench201Space

from ..refusals import refuses

NAMES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")


@st.composite
def named_tensors(draw):
    tensors = {}
    for index in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        dtype = draw(st.sampled_from([getattr(torch, name) for name in NAMES]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
        tensors[f"t{index}"] = torch.randint(0, 100, shape, generator=generator).to(dtype)
    return tensors


@given(named_tensors())
def test_unpack_undoes_pack(tensors):
    layout = Layout.of(tensors)
    packed = pack(tensors)
    assert {name: vector.numel() for name, vector in packed.items()} == layout.sizes
    assert all(vector.dim() == 1 and vector.is_contiguous() for vector in packed.values())
    again = unpack(packed, layout)
    assert list(again) == list(tensors)
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)
    assert Layout.of(again).digest == layout.digest


def test_pack_copies_and_unpack_views():
    tensors = {"a": torch.arange(6.0).view(2, 3).t()}  # not contiguous
    packed = pack(tensors)
    unpack(packed, Layout.of(tensors))["a"][0, 1] = 9.0
    assert packed["float32"].tolist() == [0.0, 9.0, 1.0, 4.0, 2.0, 5.0]
    assert tensors["a"][0, 1] == 3.0


def test_the_digest_tells_names_shapes_dtypes_and_order_apart():
    a, b = torch.zeros(2, 3), torch.zeros(6)
    layouts = [{"a": a, "b": b}, {"b": b, "a": a}, {"a": a, "c": b}, {"a": b, "b": b}]
    layouts += [{"a": a, "b": b.long()}, {"a": a}]
    assert len({Layout.of(tensors).digest for tensors in layouts}) == len(layouts)
    assert Layout.of({"a": a + 1, "b": b}).digest == Layout.of(layouts[0]).digest


def test_unpack_refuses_other_sizes():
    layout = Layout.of({"a": torch.zeros(2)})
    for packed in ({"float32": torch.zeros(3)}, {"float64": torch.zeros(2)}, {}):
        refuses("do not fit a layout", unpack, packed, layout, error=ValueError)


@pytest.fixture
def supernets():
    """Two supernets with other weights and statistics."""
    space = NASBench201Space(input_shape=(3, 8, 8), num_classes=3, channels=2, num_cells=1)
    both = space.supernet(), space.supernet()
    both[1](torch.randn(4, 3, 8, 8))
    return both


def test_states_of_a_supernet_are_all_its_tensors_once(supernets):
    states = network_states(supernets[0])
    assert set(states["alphas"]) == {"cell"}
    named = {**states["weights"], **states["buffers"]}
    named |= {f"alphas.{kind}": alpha for kind, alpha in states["alphas"].items()}
    own = supernets[0].state_dict()
    assert set(named) == set(own)
    assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in named.items())
    assert network_states(torch.nn.Linear(2, 1))["alphas"] == {}


def average(replies):
    mean = states.WeightedAverage()
    for sent, weight in replies:
        mean.add(sent, weight=weight)
    return mean.result()


@given(
    st.lists(st.floats(1, 1e6), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32]),
    st.integers(0, 1000),
)
def test_average_keeps_the_dtype_and_lies_where_numpy_puts_it(counts, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = [(torch.randn(5, generator=generator) * 50).to(dtype) for _ in counts]
    key = str(dtype).removeprefix("torch.")
    sent = [vector.clone() for vector in vectors]
    pairs = zip(vectors, counts, strict=True)
    found = average(({"weights": {key: v}, "buffers": {key: -v}}, n) for v, n in pairs)
    mean = found["weights"][key]
    expected = np.average(np.stack([v.double().numpy() for v in vectors]), axis=0, weights=counts)
    assert mean.dtype == dtype
    assert torch.equal(found["buffers"][key], -mean)
    assert all(map(torch.equal, vectors, sent))
    tolerance = 0.5 + 1e-6 if not dtype.is_floating_point else 1e-3
    np.testing.assert_allclose(mean.double().numpy(), expected, rtol=0, atol=tolerance)


def test_a_large_integer_counter_is_exact():
    counter = 2**40 + 1
    mean = average([({"buffers": {"int64": torch.tensor([counter])}}, 3)] * 2)
    assert mean["buffers"]["int64"].tolist() == [counter]


def test_the_streaming_average_holds_one_sum_and_no_reply():
    average, replies, sums = states.WeightedAverage(), [], set()
    for client in range(5):
        vector = torch.full((1000,), float(client))
        replies.append(weakref.ref(vector))
        average.add({"weights": {"float32": vector}}, weight=1)
        del vector
        assert all(reply() is None for reply in replies)
        sums.add(average._sums["weights"]["float32"].data_ptr())
    assert len(sums) == 1
    assert average.result()["weights"]["float32"].unique().tolist() == [2.0]
    assert average._sums == {}


def test_load_states_copies_into_the_own_tensors(supernets):
    target, source = supernets
    packed = {name: pack(tensors) for name, tensors in network_states(source).items()}
    pointers = [p.data_ptr() for p in target.parameters()]
    load_states(target, packed)
    assert [p.data_ptr() for p in target.parameters()] == pointers
    own = source.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in target.state_dict().items())
    refuses("has the states", load_states, target, {"moments": {}}, error=ValueError)


def test_a_part_holds_some_tensors_and_fills_in_to_the_whole():
    sent = {"a": torch.zeros(2, 3), "b": torch.ones(4), "n": torch.tensor(3)}
    new = sent | {"b": torch.tensor([1.0, 1.0, 2.0, 1.0])}
    whole = {"weights": pack(new), "buffers": pack(sent)}
    layouts = {name: Layout.of(sent) for name in whole}
    part = states.Part(layouts, {"weights": ["b"]})
    held = part.of(whole)
    assert {dtype: v.tolist() for dtype, v in held["weights"].items()} == {"float32": [1, 1, 2, 1]}
    assert held["buffers"] is whole["buffers"]
    before = {"weights": pack(sent), "buffers": pack(sent)}
    filled = part.filled(held, before)
    assert all(torch.equal(filled["weights"][d], vector) for d, vector in pack(new).items())
    assert all(torch.equal(before["weights"][d], vector) for d, vector in pack(sent).items())
    assert states.Part(layouts, {"weights": []}).of(whole)["weights"] == {}


# --- Trimmed means and medians against numpy and scipy, their memory, and what an attack does


VALUES = st.floats(-1e6, 1e6, width=32)


def result_of(values_NP, trim):
    average = states.TrimmedMean(trim)
    for number, row in enumerate(values_NP):
        vector = torch.from_numpy(row.copy())
        average.add({"weights": {str(row.dtype): vector}}, weight=1.0 + number)
    (packed,) = average.result().values()
    (vector,) = packed.values()
    return vector


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=VALUES),
    st.integers(1, 4),
)
def test_agrees_with_numpy_and_scipy(values_NP, trim):
    wide = values_NP.astype(np.float64)
    np.testing.assert_allclose(result_of(values_NP, None), np.median(wide, axis=0), 1e-6, 1e-6)
    if len(values_NP) <= 2 * trim:
        refuses("too few", result_of, values_NP, trim, error=ValueError)
        return
    expected = stats.trim_mean(wide, (trim + 0.01) / len(wide), axis=0)  # it rounds down
    np.testing.assert_allclose(result_of(values_NP, trim), expected, 1e-5, 1e-5 * 1e6)


@given(
    hnp.arrays(np.float32, (5, 3), elements=VALUES),
    hnp.arrays(np.float32, (2, 3), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    st.permutations(range(7)),
)
def test_two_hostile_of_seven_stay_between_honest_values(honest_NP, hostile_NP, order):
    for trim in (2, None):
        result = result_of(np.concatenate([honest_NP, hostile_NP])[order], trim).numpy()
        slack = 1e-6 * np.abs(honest_NP).max()  # of a mean's rounding
        assert (honest_NP.min(axis=0) - slack <= result).all()
        assert (result <= honest_NP.max(axis=0) + slack).all()


@given(
    hnp.arrays(np.float64, (3, 4), elements=st.floats(0, 1)),
    hnp.arrays(np.float64, (2, 4), elements=st.floats(0, 1)),
    st.permutations(range(5)),
)
def test_rewards_lie_between_those_of_honest_clients(honest_NP, hostile_NP, order):
    """Of each candidate, against the client's own mean; where all agree, they decide."""
    rewards_NC = torch.from_numpy(np.concatenate([honest_NP, hostile_NP])[order])
    levels = honest_NP.mean(axis=1, keepdims=True)
    gains = states.median_rewards(rewards_NC).numpy() - np.median(rewards_NC.numpy().mean(axis=1))
    assert ((honest_NP - levels).min(axis=0) - 1e-12 <= gains).all()
    assert (gains <= (honest_NP - levels).max(axis=0) + 1e-12).all()
    alike = states.median_rewards(torch.from_numpy(np.tile(honest_NP[0], (3, 1))))
    np.testing.assert_allclose(alike, honest_NP[0], atol=1e-12)


def test_counters_keep_their_dtype_and_large_values():
    result = result_of(np.array([[2**40 + 1], [7], [2**40 + 3], [2**40 + 5]], dtype=np.int64), None)
    assert result.dtype == torch.int64
    assert result.item() == 2**40 + 2


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that anything has returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_long_vectors_are_sorted_in_pieces():
    length, clients = 4 * states.CHUNK + 3, 3
    average = states.TrimmedMean(1)
    for number in range(clients):
        average.add({"weights": {"float32": torch.full((length,), float(number))}}, weight=1.0)
    with Largest() as largest:
        (packed,) = average.result().values()
    assert (packed["float32"] == 1).all()
    assert largest.elements <= max(length, clients * states.CHUNK)
