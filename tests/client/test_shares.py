"""Shares of noise on their way from the site that draws them to the sum: whole cells, as drawn."""

import math
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.client.answer import admit
from fednas_flwr.client.noised_updates import MOST_CELLS, noised_update
from fednas_flwr.privacy.plan import of_clients
from fednas_flwr.privacy.policy import SumTerms
from fednas_flwr.protocol.messages import Header, Reply, encode_reply
from fednas_flwr.protocol.secure_sum.masks import Cells, Grid
from fednas_flwr.protocol.sum_encoding import Summands, sizes_of
from fednas_flwr.protocol.sum_requests import Summed

from ..refusals import refuses
from .conftest import schedule
from .test_noised_updates import EPOCHS, POLICY_CLIENT, TRAINING

SITES, SIGMA = 30, 1.0


@pytest.fixture
def site(make_site):
    """A site that is protected as a whole, of 30 that share noise."""
    plan = [
        replace(planned, shared=planned.kind != "rewards", noise_multiplier=SIGMA)
        for planned in of_clients(schedule())
    ]
    made = make_site(policy=POLICY_CLIENT, committed=[], test_seed=b"noise")
    terms = SumTerms("ab" * 32, SITES, 0)
    made.guard.allowed = replace(made.guard.allowed, secure_sum=terms)
    made.guard.commit("run", plan)
    made.norm = plan[0].max_grad_norm
    return made


def asked(site, weight):
    """The request of a training from weights of one size, by all of its sites, as admitted."""
    request = site.request("train.weights", **{TRAINING["train.weights"]: EPOCHS.__dict__})
    packed = request.states["weights"]["float32"]
    releases = site.guard._commitment("run").releases
    (planned,) = [p for p in releases if p.key.startswith("retrain/train.weights")]
    most = planned.sum_range(site.guard.allowed.by_split)
    states = {**request.states, "weights": {"float32": torch.full_like(packed, weight)}}
    summed = Summed("attempt", tuple(range(SITES)), {"weights": most})
    return admit(site.guard, replace(request, states=states, summed=summed))


def unmoved(client, request, settings):
    """The update of a client that training does not move."""
    return Reply(1.0)


@pytest.mark.parametrize("weight", [0.0, 1.5, 2.0**20, 1.5 * 2.0**26])
def test_no_weight_that_is_sent_takes_noise_from_a_share(weight, site):
    request = asked(site, weight)
    reply = noised_update(site.client, request, unmoved)
    assert reply.states == {}
    cells, grid = reply.shares["weights"], request.grids["weights"]
    std = cells.values.std() * grid.cell
    expected = SIGMA * site.norm / math.sqrt(SITES)
    assert std == pytest.approx(expected, rel=6 / math.sqrt(2 * len(cells.values)))
    sizes = sizes_of(reply.states, reply.shares)
    summands = Summands("train.weights", sizes, request.summed, request.states)
    sent = summands.encode(reply)["int32"]
    np.testing.assert_array_equal(sent.astype(np.int64), cells.values)


@pytest.mark.parametrize("weight", [1.5 * 2.0**33, -1e30, math.inf, math.nan])
def test_weights_beyond_what_float64_can_hold_beside_a_cell_are_refused(weight, site, no_record):
    request = asked(site, weight)
    assert not abs(weight) <= MOST_CELLS * request.grids["weights"].cell
    refuses("rule secure_sum: largest of weights=", noised_update, site.client, request, unmoved)
    assert site.rows() == []


@pytest.mark.parametrize("act", [operator.neg, lambda c: c * 2, lambda c: c + c, float, round])
def test_nothing_is_computed_with_cells(act):
    refuses("", act, Cells(np.arange(3)), error=TypeError)


def test_cells_do_not_leave_without_masks():
    header = Header("run", "search", 1, 1, 0, "nonce")
    with pytest.raises(ValueError, match="may not leave without masks"):
        encode_reply(header, Reply(1.0, shares={"weights": Cells(np.arange(3))}))


@given(st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=30))
def test_wrapped_values_add_up_to_the_wrapped_sum(values):
    """A site's value may leave the range of 32 bits; a sum that has room loses nothing."""
    grid = Grid.of_range(1.0, sites=len(values))
    *others, _ = values
    closing = 5 - sum(others)  # the sum of all is 5
    total = np.zeros(1, np.int32)
    for value in (*others, closing):
        total += grid.wrap(Cells(np.array([value])))
    assert grid.decode(total, sites=len(values)).tolist() == [5 * grid.cell]
