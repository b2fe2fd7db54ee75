"""Shared noise at a site: what it releases, what it refuses, and why later steps are out."""

import math

import numpy as np
import pytest
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.release_guard import Contributions, ReleaseGuard
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.privacy.mechanism.micro_batches import ClippedSum
from fednas_flwr.privacy.mechanism.noise import SecureGenerator
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import parse_policy, template
from fednas_flwr.protocol.messages import Header
from fednas_flwr.protocol.secure_sum.masks import Grid

from ..refusals import refuses

HEADER = Header("run", "search", 1, 1, 0, "nonce")
ACTION = "train.weight_gradient"
SIGMA, NORM, HONEST = 1.5, 0.5, 4
UNREAD = Contributions(10, lambda rows: pytest.fail("read"))
TERMS = f"secure_sum: {{roster: {'ab' * 32}, least_sites: {HONEST + 1}, colluding: 1}}"
PLANNED = PlannedRelease(
    "search", ACTION, "weights", ("train",), 60.0, 50, NORM, SIGMA, shared=True
)


@pytest.fixture
def make_gate(tmp_path):
    """``make_gate(planned, sums)``: a guard that has committed to one release."""
    ledgers = []

    def make(planned=PLANNED, *, sums=True):
        folder = tmp_path / f"{len(ledgers)}"
        text = template()
        if sums:
            (line,) = [line for line in text.splitlines() if "# secure_sum:" in line]
            text = text.replace(line.strip(), TERMS)
        text = text.replace("epsilon: 3.0", "epsilon: 1000.0")
        ledgers.append(Ledger(folder / "books" / "ledger.sqlite", folder / "key"))
        policy = parse_policy(text)
        guard = ReleaseGuard(policy, ledgers[-1], SecureGenerator(), data_set="my-data")
        guard.hold("the records")
        guard.commit("run", [planned])
        return guard

    yield make
    for ledger in ledgers:
        ledger.close()


def grid_of(guard, planned=PLANNED):
    return Grid.of_range(planned.sum_range(guard.allowed.by_split), sites=5)


def test_a_site_releases_its_share_in_whole_cells(make_gate):
    guard = make_gate()
    grid = grid_of(guard)
    planned = guard.admit(HEADER, ACTION, "weights", splits=("train",))
    total = ClippedSum({"a": torch.full((200, 100), 3.0), "b": torch.zeros(3)}, norm=NORM)
    cells = guard.share(planned, HEADER, Contributions(3000, lambda rows: total), grid=grid)
    assert (cells.values.dtype, cells.values.shape) == (np.int64, (20_003,))
    noise = cells.values[:-3] * grid.cell - 3.0
    assert noise.std() == pytest.approx(SIGMA * NORM / math.sqrt(HONEST), rel=0.05)
    (row,) = guard._ledger.entries()
    assert row.entry.action == "train.weight_gradient:weights (noise of 4 sites)"
    assert row.entry.release.noise_multiplier == SIGMA


def test_a_sum_beyond_the_range_is_projected_before_the_noise(make_gate):
    guard = make_gate()
    grid = grid_of(guard)
    planned = guard.admit(HEADER, ACTION, "weights", splits=("train",))
    most = planned.clipped_range(guard.allowed.by_split)
    huge = ClippedSum({"a": torch.tensor([1e6, -1e6, most, 0.0]).repeat(1000)}, norm=NORM)
    cells = guard.share(planned, HEADER, Contributions(3000, lambda rows: huge), grid=grid)
    middle = (cells.values * grid.cell).reshape(1000, 4).mean(0)
    expected = np.array([most, -most, most, 0.0])
    assert abs(middle - expected).max() < 6 * SIGMA * NORM / math.sqrt(HONEST * 1000)


def test_shared_noise_needs_terms_room_and_single_steps(make_gate):
    guard = make_gate()
    planned = guard.admit(HEADER, ACTION, "weights", splits=("train",))
    narrow = Grid.of_range(planned.sum_range(guard.allowed.by_split) / 3, sites=5)
    for grid in (None, narrow):
        with pytest.raises(ConfigError, match="rule secure_sum: range of weights"):
            guard.share(planned, HEADER, UNREAD, grid=grid)
    refuses("call share", guard.release, planned, HEADER, UNREAD, error=ValueError)
    assert guard._ledger.entries() == []
    with pytest.raises(ConfigError, match="rule secure_sum: steps of shared noise=2"):
        guard.admit(HEADER, ACTION, "weights", splits=("train",), steps=2)
    refuses("rule secure_sum: shared noise", make_gate, sums=False)
