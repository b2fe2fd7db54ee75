"""Trimmed means and medians against numpy and scipy, their memory, and what an attack does."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from fednas_flwr.protocol.states import CHUNK, TrimmedMean, median_rewards

from ..refusals import refuses

VALUES = st.floats(-1e6, 1e6, width=32)


def result_of(values_NP, trim):
    average = TrimmedMean(trim)
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
    values_NP = np.concatenate([honest_NP, hostile_NP])[order]
    for trim in (2, None):
        result = result_of(values_NP, trim).numpy()
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
    found_C = median_rewards(rewards_NC).numpy()
    levels = honest_NP.mean(axis=1, keepdims=True)
    gains = found_C - np.median(rewards_NC.numpy().mean(axis=1))
    assert ((honest_NP - levels).min(axis=0) - 1e-12 <= gains).all()
    assert (gains <= (honest_NP - levels).max(axis=0) + 1e-12).all()
    alike = median_rewards(torch.from_numpy(np.tile(honest_NP[0], (3, 1))))
    np.testing.assert_allclose(alike, honest_NP[0], atol=1e-12)


def test_counters_keep_their_dtype_and_large_values():
    values_NP = np.array([[2**40 + 1], [7], [2**40 + 3], [2**40 + 5]], dtype=np.int64)
    result = result_of(values_NP, None)
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
    length, clients = 4 * CHUNK + 3, 3
    average = TrimmedMean(1)
    for number in range(clients):
        average.add({"weights": {"float32": torch.full((length,), float(number))}}, weight=1.0)
    with Largest() as largest:
        (packed,) = average.result().values()
    assert (packed["float32"] == 1).all()
    assert largest.elements <= max(length, clients * CHUNK)
