"""Where the unit of privacy is the client: its whole update is one clipped, noised contribution."""

import math
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.answer import admit, answer
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.client.noised_updates import MOST_CELLS, clipped, noised_update
from fednas_flwr.privacy.plan import of_clients
from fednas_flwr.privacy.policy import SumTerms, parse_policy, template
from fednas_flwr.protocol.messages import Header, Reply, encode_reply
from fednas_flwr.protocol.requests import Amount
from fednas_flwr.protocol.secure_sum.masks import Cells, Grid
from fednas_flwr.protocol.sum_encoding import Summands, sizes_of
from fednas_flwr.protocol.sum_requests import Summed
from fednas_flwr.settings.names import SPLITS

from ..refusals import raising, refuses
from .conftest import LOSS_BOUND, POLICY, TERMS, schedule

LEAST = 0.01  # noise multiplier
POLICY_CLIENT = {"unit": "client", "records": 1, "least_noise_multiplier": LEAST}
NORM = TERMS["max_grad_norm"]
EPOCHS = Amount(epochs=2, steps=None, batch_size=8)
TRAINING = {"train.search": "local.amount", "train.weights": "local.amount"}
STATES = {"train.search": ("weights", "alphas"), "train.weights": ("weights",)}


def committed(sigma=LEAST):
    return [replace(p, shared=False, noise_multiplier=sigma) for p in of_clients(schedule())]


@pytest.fixture
def make_client_site(make_site):
    """``make_client_site(...)``: a site that is protected as a whole; its noise tells nothing."""

    def make(*, sigma=LEAST, hold=None, seed=b"noise", **policy):
        how = {"policy": POLICY_CLIENT | policy, "committed": committed(sigma)}
        return make_site(**how, hold=hold, test_seed=seed)

    return make


def asked(site, action, **changes):
    return site.request(action, **{TRAINING[action]: EPOCHS.__dict__, **changes})


def update(reply, request, state):
    return reply.states[state]["float32"].double() - request.states[state]["float32"].double()


@given(
    st.lists(st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf]), min_size=1),
    st.floats(1e-3, 1e3),
)
def test_updates_are_clipped_to_the_norm_whatever_they_are(values, norm):
    vector = torch.tensor(values, dtype=torch.float64)
    found = clipped({"a": vector[:1], "b": vector[1:]}, max_norm=norm)
    joint = torch.cat([found["a"], found["b"]])
    assert torch.linalg.vector_norm(joint) <= norm
    length = torch.linalg.vector_norm(vector)
    if not length.isfinite():
        assert not joint.any()
    elif length <= norm:
        assert torch.equal(joint, vector)
    else:
        assert torch.allclose(joint, vector * (norm / length), rtol=1e-9)


@pytest.mark.parametrize("action", TRAINING)
def test_a_reply_is_what_was_sent_plus_the_clipped_update_and_noise(make_client_site, action):
    site = make_client_site()
    request = asked(site, action)
    exact = answer(replace(site.client, guard=None), request)
    reply = site.answer(request)
    assert set(reply.states) == set(reply.digests) == set(STATES[action])
    assert (reply.num_examples, reply.metrics, reply.properties) == (1.0, {}, {})
    for state in STATES[action]:
        assert reply.digests[state] == exact.digests[state]
        expected = clipped({"u": update(exact, request, state)}, max_norm=NORM)["u"]
        assert expected.norm() > NORM / 5
        noise = update(reply, request, state) - expected
        assert noise.abs().max() < 8 * LEAST * NORM  # of some thousands
        assert noise.any()
    rows = {(row.action, row.splits, row.release.steps) for row in site.rows()}
    assert rows == {(f"{action}:{state}", SPLITS, 1) for state in STATES[action]}
    (rate,) = {row.release.sample_rate for row in site.rows()}
    assert rate == 1


@pytest.mark.parametrize("harm", ["nothing", "labels", "features", "failure"])
@pytest.mark.parametrize("action", TRAINING)
def test_no_data_moves_a_reply_further_than_the_norm(make_client_site, action, harm, capsys):
    """With the same draws replies of two sites differ by their contributions alone."""

    def harmed(split):
        if harm == "labels":
            return replace(split, labels=split.labels.flip(0))
        if harm == "features":
            return replace(split, mean=(math.nan,) * len(split.mean))
        if harm == "failure":
            return replace(split, labels=split.labels + 1000)
        return split

    def hold(data):
        return replace(data, train=harmed(data.train), validation=harmed(data.validation))

    idle = make_client_site(sigma=3.0, hold=lambda data: data)
    site = make_client_site(sigma=3.0, hold=hold)
    still = {f"local.{state}.lr": 1e-30 for state in STATES[action]}
    request = asked(site, action)
    reply, unmoved = site.answer(request), idle.answer(asked(idle, action, **still))
    for state in STATES[action]:
        contribution = update(reply, request, state) - update(unmoved, request, state)
        if harm in ("features", "failure"):
            assert contribution.norm() < 1e-4
        else:
            assert NORM / 5 < contribution.norm() < NORM * (1 + 1e-4)
    told = capsys.readouterr().err
    assert (f"{action} has failed, an update of zeros is sent: " in told) == (harm == "failure")


def test_words_of_a_failing_update_forge_no_line(make_client_site, monkeypatch, capsys):
    failing = raising(ValueError("a\x1b[2Jb\nclient 1: accepted"))
    monkeypatch.setitem(ANSWERS, "train.weights", failing)
    site = make_client_site(sigma=3.0, hold=lambda data: data)
    site.answer(asked(site, "train.weights"))
    told = capsys.readouterr().err
    assert "an update of zeros is sent: ValueError: a" in told
    assert "\x1b" not in told
    assert told.count("\n") == 1


def test_rewards_are_noised_one_by_one(make_client_site):
    site = make_client_site()
    request = site.request("train.probe", **{"amount": EPOCHS.__dict__})
    exact = answer(replace(site.client, guard=None), request).states["rewards"]["float32"]
    noise = site.answer(request).states["rewards"]["float32"] - exact
    assert 0 < noise.abs().max() < 8 * LEAST * LOSS_BOUND
    (row,) = site.rows()
    assert (row.action, row.splits) == ("train.probe:rewards", SPLITS)


def test_a_whole_client_answers_nothing_that_is_no_update(make_client_site, no_record):
    site = make_client_site()
    for action in ("train.weight_gradient", "train.network_gradient", "evaluate.model"):
        refuses(f"rule unit: action={action}, not train.search", site.ask, action)
    refuses("rule unit: moments=sent", site.answer, asked(site, "train.search", moments=True))
    refuses("validates=True", site.answer, asked(site, "train.weights", validates=True))
    assert site.rows() == []


def test_site_and_run_must_name_the_same_unit(make_site):
    refuses("rule unit: of_client=false, not True", make_site, policy=POLICY_CLIENT)
    with pytest.raises(ConfigError, match="rule unit: of_client=true, not False"):
        make_site(policy={"least_noise_multiplier": LEAST}, committed=committed())
    (plan, *_) = committed()
    with pytest.raises(ConfigError, match="rule unit: batch_size=3"):
        make_site(policy=POLICY_CLIENT, committed=[replace(plan, batch_size=3.0)])


def test_a_policy_declares_one_client():
    text = template().replace("unit: record", "unit: client")
    assert text != template()
    refuses("records=5000 is out of range: expected 1 with unit", parse_policy, text)
    own = parse_policy(text.replace("records: 5000", "records: 1")).data_sets["my-data"]
    assert own.by_split == dict.fromkeys(SPLITS, 1)
    assert POLICY["unit"] != own.unit


# --- shares of noise, on their way to the sum


SITES, SIGMA = 30, 1.0


@pytest.fixture
def sharing(make_site):
    """A site that is protected as a whole, of 30 that share noise."""
    of_all = of_clients(schedule())
    plan = [replace(p, shared=p.kind != "rewards", noise_multiplier=SIGMA) for p in of_all]
    made = make_site(policy=POLICY_CLIENT, committed=[], test_seed=b"noise")
    made.guard.allowed = replace(made.guard.allowed, secure_sum=SumTerms("ab" * 32, SITES, 0))
    made.guard.commit("run", plan)
    made.norm = plan[0].max_grad_norm
    return made


def admitted(sharing, weight):
    """The request of a training from weights of one size, by all of its sites, as admitted."""
    request = sharing.request("train.weights", **{TRAINING["train.weights"]: EPOCHS.__dict__})
    packed = request.states["weights"]["float32"]
    releases = sharing.guard._commitment("run").releases
    (planned,) = [p for p in releases if p.key.startswith("retrain/train.weights")]
    most = planned.sum_range(sharing.guard.allowed.by_split)
    states = {**request.states, "weights": {"float32": torch.full_like(packed, weight)}}
    summed = Summed("attempt", tuple(range(SITES)), {"weights": most})
    return admit(sharing.guard, replace(request, states=states, summed=summed))


def unmoved(client, request, settings):
    """The update of a client that training does not move."""
    return Reply(1.0)


@pytest.mark.parametrize("weight", [0.0, 1.5, 2.0**20, 1.5 * 2.0**26])
def test_no_weight_that_is_sent_takes_noise_from_a_share(weight, sharing):
    request = admitted(sharing, weight)
    reply = noised_update(sharing.client, request, unmoved)
    assert reply.states == {}
    cells, grid = reply.shares["weights"], request.grids["weights"]
    std = cells.values.std() * grid.cell
    expected = SIGMA * sharing.norm / math.sqrt(SITES)
    assert std == pytest.approx(expected, rel=6 / math.sqrt(2 * len(cells.values)))
    sizes = sizes_of(reply.states, reply.shares)
    summands = Summands("train.weights", sizes, request.summed, request.states)
    np.testing.assert_array_equal(summands.encode(reply)["int32"].astype(np.int64), cells.values)


@pytest.mark.parametrize("weight", [1.5 * 2.0**33, -1e30, math.inf, math.nan])
def test_weights_beyond_what_float64_can_hold_beside_a_cell_are_refused(weight, sharing, no_record):
    request = admitted(sharing, weight)
    assert not abs(weight) <= MOST_CELLS * request.grids["weights"].cell
    refuses("rule secure_sum: largest of weights=", noised_update, sharing.client, request, unmoved)
    assert sharing.rows() == []


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
