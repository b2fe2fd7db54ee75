"""Grids, masks and split secrets against slow oracles and statistics."""

import contextlib
import itertools
import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fednas_flwr.protocol.secure_sum import masks

from ...refusals import refuses

SECRETS = st.binary(min_size=32, max_size=32)


def is_prime(n):
    """Miller and Rabin, with the first twelve primes as bases."""
    d, s = n - 1, 0
    while d % 2 == 0:
        d, s = d // 2, s + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, d, n)
        if x in (1, n - 1):
            continue
        if not any((x := x * x % n) == n - 1 for _ in range(s - 1)):
            return False
    return True


def test_the_modulus_is_the_least_prime_above_two_to_the_256():
    assert is_prime(masks.PRIME)
    assert not any(is_prime(2**256 + i) for i in range(297))


@given(SECRETS, st.sets(st.integers(1, 1000), min_size=1, max_size=8), st.data())
def test_enough_parts_rebuild_a_secret(secret, points, data):
    threshold = data.draw(st.integers(1, len(points)))
    parts = masks.split(secret, sorted(points), threshold=threshold)
    for chosen in itertools.islice(itertools.combinations(parts, threshold), 10):
        assert masks.rebuild({x: parts[x] for x in chosen}) == secret
    assert masks.rebuild(parts) == secret


def test_parts_below_the_threshold_are_uniform_whatever_the_secret():
    for secret in (bytes(32), b"\xff" * 32):
        firsts = [masks.split(secret, [1, 2, 3], threshold=3)[2][1] for _ in range(4000)]
        assert chisquare(np.bincount(firsts, minlength=256)).pvalue > 1e-7


def test_wrong_parts_never_give_the_secret():
    secret = b"s" * 32
    parts = masks.split(secret, [1, 2, 3], threshold=2)
    parts[3] = (int.from_bytes(parts[3], "big") ^ 1).to_bytes(33, "big")
    with contextlib.suppress(ValueError):  # most wrong values are secrets, too
        assert masks.rebuild(parts) != secret
    refuses("of no secret", masks.rebuild, {}, error=ValueError)


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=3), SECRETS)
def test_masks_are_one_stream_of_chacha20_over_all_vectors(lengths, seed):
    dtypes = [np.int64, np.int32, np.int32]
    vectors = [np.zeros(n, dtype=d) for n, d in zip(lengths, dtypes, strict=False)]
    masks.add_mask(seed, vectors, sign=1)
    found = b"".join(vector.tobytes() for vector in vectors)
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    assert found == b"".join(stream.update(bytes(vector.nbytes)) for vector in vectors)
    masks.add_mask(seed, vectors, sign=-1)
    assert not any(vector.any() for vector in vectors)


def test_masked_values_are_uniform():
    for value in (0, -1, 2**29):
        for dtype in (np.int32, np.int64):
            vector = np.full(2**18, value, dtype=dtype)
            masks.add_mask(masks.derive(b"secret", b"context", "p"), [vector], sign=1)
            for byte in vector.view(np.uint8).reshape(-1, vector.itemsize).T:
                assert chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-6


def test_seeds_differ_by_secret_context_and_purpose():
    seeds = {masks.derive(*a) for a in itertools.product([b"s", b"t"], [b"c", b"d"], ["p", "q"])}
    assert len(seeds) == 8


def test_boxes_open_with_their_key_alone():
    box = masks.seal(b"k" * 32, b"part")
    assert masks.unseal(b"k" * 32, box) == b"part"
    for key, changed in ((b"l" * 32, box), (b"k" * 32, box[:-1] + b"\0")):
        refuses("sealed part", masks.unseal, key, changed, error=ValueError)


@given(
    st.floats(1e-3, 1e3),
    st.integers(1, 100),
    st.lists(st.floats(-1, 1), min_size=1, max_size=5),
    st.integers(1, 100),
)
def test_sums_of_cells_are_exact(most, sites, shares, repeats):
    grid = masks.Grid.of_range(most, sites=sites)
    assert most <= grid.range < 2 * most
    assert math.frexp(grid.cell)[0] == 0.5
    values = np.array(shares) * most
    cells = grid.encode(values)
    present = min(repeats, sites)
    total = np.zeros_like(cells)
    for _ in range(present):
        total += cells
    expected = [present * round(float(value) / grid.cell) * grid.cell for value in values]
    np.testing.assert_array_equal(grid.decode(total, sites=present), expected)


@pytest.mark.parametrize("grid", [masks.Grid.of_range(3.0, sites=8), masks.Grid(2.0**-32, 64, 8)])
def test_edges_of_the_range(grid):
    edge = np.array([grid.range, -grid.range])
    cells = grid.encode(edge)
    total = np.zeros_like(cells)
    for _ in range(grid.sites):
        total += cells
    np.testing.assert_allclose(grid.decode(total, sites=grid.sites), grid.sites * edge)
    for bad in (1.001 * grid.range, -1.001 * grid.range, math.inf, math.nan):
        refuses("not finite or beyond", grid.encode, [0.0, bad], error=ValueError)
    total[0] += 1
    refuses("beyond 8 times", grid.decode, total, error=ValueError, sites=grid.sites)


def test_ranges_without_a_grid():
    for most, sites in ((0.0, 8), (math.nan, 8), (math.inf, 8), (1.0, 0)):
        refuses("a grid needs", masks.Grid.of_range, most, error=ValueError, sites=sites)
