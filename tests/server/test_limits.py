"""What honest clients send is within the limits, and the limits are not far beyond."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.requests import (
    Amount,
    Evaluate,
    LocalSearch,
    LocalTraining,
    Probe,
    Search,
    TakeGradients,
    Train,
    TrainCandidates,
    Trial,
)
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.optimizer_step import make_adam, make_sgd
from fednas_flwr.server.reply_checks import (
    ADAM,
    LARGEST_LOSS,
    MORE_RECORDS,
    TAIL,
    distance,
    honest_limits,
    largest_move,
    largest_sum,
)
from fednas_flwr.settings.optimizers import SGD, Adam

RECORDS = {"train": 400, "validation": 100, "test": 50}
STEP = SGD(lr=0.1, min_lr=0.0, momentum=0.9, weight_decay=1e-3, clip_norm=None)
ALPHA_STEP = Adam(lr=0.01, weight_decay=1e-3)


def plan(kind="weights", action="train.weights", *, batch=32.0, sigma=1.5, norm=0.5, splits=None):
    splits = splits or {"alphas": ("validation",)}.get(kind, ("train",))
    return PlannedRelease("search", action, kind, splits, batch, 10, norm, sigma)


def limits(action, settings, *, sizes, sent=None, examples=550.0, classes=1, planned=()):
    exchange = SimpleNamespace(
        action=action,
        layouts={name: SimpleNamespace(sizes={"float32": size}) for name, size in sizes.items()},
        planned={release.kind: release for release in planned},
    )
    return honest_limits(
        exchange,
        settings,
        sent=sent or {},
        examples=examples,
        classes=classes,
        records=RECORDS if planned else {},
    )


# --- the bounds, against what can be worst


@pytest.mark.parametrize(("batch", "sigma", "num_values"), [(32.0, 1.5, 50), (None, 0.0, 5000)])
def test_a_noised_sum_of_twice_the_declared_records_all_of_one_gradient(batch, sigma, num_values):
    """The norms of 2,000 draws, of records that all pull the same way."""
    generator = torch.Generator().manual_seed(1)
    release = plan(batch=batch, sigma=sigma)
    records = torch.full((2000, int(MORE_RECORDS * RECORDS["train"])), release.rate(RECORDS))
    drawn = torch.bernoulli(records, generator=generator).sum(1, keepdim=True).double()
    noise = torch.randn(2000, num_values, generator=generator, dtype=torch.float64)
    noise *= sigma * release.max_grad_norm
    noise[:, :1] += drawn * release.max_grad_norm
    norms = noise.norm(dim=1)
    bound = largest_sum(release, RECORDS, num_values=num_values)
    assert norms.max() < bound < 4 * norms.mean()


def test_more_records_steps_noise_or_values_allow_more():
    least = largest_sum(plan(), RECORDS, num_values=100)
    assert largest_sum(plan(batch=None), RECORDS, num_values=100) > least
    assert largest_sum(plan(sigma=2.0), RECORDS, num_values=100) > least
    assert largest_sum(plan(), RECORDS, num_values=101) > least
    twice = largest_sum(plan(norm=1.0), RECORDS, num_values=100)
    assert twice == pytest.approx(2 * least)
    noise = 1.5 * 0.5 * (math.sqrt(100) + math.sqrt(2 * TAIL))
    batch = 64 + math.sqrt(2 * 64 * TAIL) + TAIL
    assert least == pytest.approx(0.5 * batch + noise)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("velocity", [0.0, 3.0])
def test_steps_along_one_gradient_after_another_of_the_same_direction(nesterov, velocity):
    weights = torch.full((4,), 0.5, requires_grad=True)
    before = weights.detach().clone()
    optimizer = make_sgd([weights], STEP, nesterov=nesterov)
    if velocity:
        optimizer.state[weights]["momentum_buffer"] = torch.full((4,), velocity / 2)
    for _ in range(30):
        weights.grad = torch.full((4,), 1.0)  # of norm 2
        optimizer.step()
    moved = float((weights.detach() - before).norm())
    bound = largest_move(30, STEP, 2.0, float(before.norm()), velocity)
    assert moved <= bound < 1.5 * moved


@given(
    st.lists(st.sampled_from([0.0, 1e-8, 1.0, -1.0, 1e4, -1e8]), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.5]),
)
def test_adam_moves_an_alpha_by_less_than_its_share_of_the_limit(gradients, beta):
    alpha = torch.zeros(1, requires_grad=True)
    optimizer = make_adam([alpha], ALPHA_STEP, beta=beta)
    for gradient in gradients:
        before = alpha.item()
        alpha.grad = torch.tensor([gradient])
        optimizer.step()
        assert abs(alpha.item() - before) <= ADAM / 2 * ALPHA_STEP.lr


# --- what each action may return


def take(**changes):
    return TakeGradients(
        step=0,
        local_steps=changes.pop("local_steps", 1),
        local_lrs={},
        batch_size=changes.pop("batch", None),
        order=1,
        inner_lr=0.1,
    )


def test_gradients_of_private_clients_are_bounded_sums_over_the_expected_batch():
    both = [plan(action="train.gradients"), plan("alphas", "train.gradients", batch=16.0)]
    sizes = {"weights": 1000, "alphas": 10}
    one = limits("train.gradients", take(), sizes=sizes, planned=both)
    assert one.examples == pytest.approx(32)
    for release, scale in zip(both, (1.0, 2.0), strict=True):  # alphas for the weights' batch
        bound = scale * largest_sum(release, RECORDS, num_values=sizes[release.kind])
        assert bound < one.norms[release.kind] < 1.5 * bound
    three = limits("train.gradients", take(local_steps=3), sizes=sizes, planned=both)
    assert three.norms["weights"] == pytest.approx(3 * one.norms["weights"])


def test_gradients_without_privacy_stand_for_no_more_than_a_batch():
    sizes = {"weights": 100}
    assert limits("train.weight_gradient", take(), sizes=sizes).examples == 550
    assert limits("train.weight_gradient", take(batch=32), sizes=sizes).examples == 33
    assert limits("train.weight_gradient", take(batch=999), sizes=sizes).examples == 550


def training(clip_norm, amount):
    sgd = SGD(0.1, 0.0, 0.9, 0.0, clip_norm)
    return Train(local=LocalTraining({}, "train", amount, sgd, 0.0, 0.0))


def test_training_moves_no_farther_than_its_clipped_or_noised_steps():
    sizes, sent = {"weights": 100, "buffers": 3}, {"weights": 5.0}
    epochs, steps = Amount(2, None, 50), Amount(None, 22, None)
    clipped = limits("train.weights", training(1.0, epochs), sizes=sizes, sent=sent)
    assert clipped.norms["weights"] == pytest.approx(
        1.25 * largest_move(22, SGD(0.1, 0.0, 0.9, 0.0, 1.0), 1.0, 5.0, 0.0), rel=1e-3
    )
    of_three = limits("train.weights", training(1.0, epochs), sizes=sizes, sent=sent, classes=3)
    assert of_three.norms["weights"] > 2 * clipped.norms["weights"]  # oversampling takes more steps
    free = limits("train.weights", training(None, epochs), sizes=sizes, sent=sent)
    assert free.norms["weights"] == 1e6 * (10 + 5)
    noised = [plan()]
    private = limits("train.weights", training(None, steps), sizes=sizes, sent=sent, planned=noised)
    mean = largest_sum(noised[0], RECORDS, num_values=100) / 32
    sgd = SGD(0.1, 0.0, 0.9, 0.0, None)
    moved = 1.25 * largest_move(22, sgd, mean, 5.0, 0.0)
    assert private.norms["weights"] == pytest.approx(moved, rel=1e-3)
    both = limits("train.weights", training(0.01, steps), sizes=sizes, sent=sent, planned=noised)
    assert both.norms["weights"] < private.norms["weights"] / 10
    assert both.norms["buffers"] == 1e12 * math.sqrt(3)


def test_running_variances_of_deep_sums_are_honest():
    """Cells whose nodes add up what they skip multiply the scale by 4, the variance by 16."""
    normalised = nn.BatchNorm1d(3).train()
    x = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 4.0]])
    for _ in range(8):
        x = x + x + (x + x)
    normalised(x)
    moved = distance({"float32": normalised.running_var}, {"float32": torch.zeros(3)})
    allowed = limits("train.weights", training(1.0, Amount(1, None, 2)), sizes={"buffers": 3})
    assert 1e6 * math.sqrt(3) < moved < allowed.norms["buffers"]


def test_candidates_move_the_weights_as_the_same_steps_of_training_do():
    sgd = SGD(0.1, 0.0, 0.9, 0.0, 1.0)
    sizes, sent = {"weights": 100}, {"weights": 5.0}
    request = TrainCandidates(
        candidates=[[0], [1]], step=0, local_steps=11, batch_size=50, weights=sgd, dp_aware=None
    )
    found = limits("train.candidate", request, sizes=sizes, sent=sent)
    same = limits("train.weights", training(1.0, Amount(None, 22, 50)), sizes=sizes, sent=sent)
    assert found.norms == same.norms


def test_of_a_pool_every_member_moves_as_far_as_it_may_alone():
    """Each member's gradient is clipped by itself, also where noise is added to all at once."""
    steps, sizes = Amount(None, 3, None), {"weights": 100}
    for clip_norm, planned in ((1.0, []), (None, [plan()])):
        alone = training(clip_norm, steps)
        pool = replace(alone, local=replace(alone.local, network={"genotypes": 4 * [{}]}))
        one, four = (
            limits("train.weights", asked, sizes=sizes, planned=planned).norms["weights"]
            for asked in (alone, pool)
        )
        assert four == pytest.approx(2 * one)


def test_a_search_moves_the_alphas_by_its_steps_of_adam():
    rule = Alternating("first_order")
    search = LocalSearch(Amount(None, 4, None), STEP, ALPHA_STEP, alternating=rule)
    sizes = {"weights": 100, "alphas": 16}
    found = limits("train.search", Search(local=search), sizes=sizes)
    assert found.norms["alphas"] == pytest.approx(4 * ADAM * 0.01 * 4)
    sent = {"moments": 2.0}
    with_moments = limits("train.search", Search(local=search), sizes=sizes, sent=sent)
    assert with_moments.norms["alphas"] == 1e6 * 4


def test_a_probe_and_an_evaluation_have_no_norm_that_noise_could_break():
    probe = Probe(
        search=None,
        training=training(None, Amount(None, 1, None)).local,
        trials=[Trial(STEP, ALPHA_STEP, 0.0)],
        loss_bound=1.0,
    )
    rewards = plan("rewards", "train.probe", batch=None, sigma=1e6, splits=("validation",))
    found = limits("train.probe", probe, sizes={"rewards": 1}, planned=[rewards])
    assert found.norms == {"rewards": math.inf}
    tested = Evaluate(network={}, split="test")
    exact = limits("evaluate.model", tested, sizes={})
    assert exact.metric_range("accuracy") == (0, 1)
    assert exact.metric_range("loss") == (0, LARGEST_LOSS)
    metrics = plan("metrics", "evaluate.model", batch=None, sigma=4.0, splits=("test",))
    noised = limits("evaluate.model", tested, sizes={}, planned=[metrics])
    noise = 4 * math.sqrt(2) / 50 * math.sqrt(2 * TAIL)
    assert noised.noise == pytest.approx(noise)
    assert noised.metric_range("accuracy") == pytest.approx((-noise, 2 + noise))
    low, high = noised.metric_range("loss")
    assert low < -noise < 2 * math.log(1e6) < high < 1e3


def test_a_distance_is_that_of_the_floats_and_not_finite_where_one_is_not():
    state = {"float32": torch.tensor([3.0, 0.0]), "int64": torch.tensor([7])}
    sent = {"float32": torch.tensor([0.0, 4.0]), "int64": torch.tensor([0])}
    assert distance(state, {}) == 3
    assert distance(state, sent) == 5
    assert distance(state, {}) == 3
    assert not math.isfinite(distance({"float32": torch.tensor([math.nan])}, {}))
