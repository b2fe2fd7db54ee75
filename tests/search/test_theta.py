"""FedEx's theta against numpy's probabilities, and what every round must leave true."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.search.bandit import EQUAL, LEAST, Theta, Trial
from fednas_flwr.settings.optimizers import SCHEDULES, ThetaSettings

schedules = st.sampled_from(SCHEDULES)
discounts = st.floats(0, 1)


def rounds_over(num_configurations, most=8):
    trial = st.builds(
        Trial, st.integers(0, num_configurations - 1), st.floats(0, 5), st.floats(0.5, 100)
    )
    return st.lists(st.lists(trial, min_size=1, max_size=6), max_size=most)


cases = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), rounds_over(n)))


def after(num_configurations, rounds, schedule="aggressive", discount=0.5):
    theta = Theta.of(num_configurations, ThetaSettings(schedule, discount))
    for trials in rounds:
        theta = theta.updated(trials)
    return theta


def oracle(num_configurations, rounds, schedule, discount):
    """Algorithm 2 as it is written, with probabilities and the whole trace of losses."""
    theta, trace, norms = np.full(num_configurations, 1 / num_configurations), [], []
    for trials in rounds:
        weights = np.array([t.weight for t in trials]) / sum(t.weight for t in trials)
        losses = np.array([t.loss for t in trials])
        past = np.array(trace or [weights @ losses])
        ages = np.arange(len(past))[::-1]
        baseline = past @ discount**ages / (discount**ages).sum()
        excess = np.zeros(num_configurations)
        for (arm, loss, _), weight in zip(trials, weights, strict=True):
            excess[arm] += weight * (loss - baseline)
        gradient = np.where(np.abs(excess) > EQUAL, excess, 0) / theta
        trace.append(weights @ losses)
        norms.append(np.abs(gradient).max())
        scale = {
            "aggressive": norms[-1],
            "adaptive": np.sqrt(np.square(norms).sum()),
            "constant": 1.0,
        }[schedule]
        if scale > 0:
            step = np.sqrt(2 * np.log(num_configurations)) * (gradient / scale)
            theta = theta * np.exp(step.min() - step)
            assume(theta.sum() > 0)  # where probabilities without logarithms end
            theta /= theta.sum()
            assume(theta.min() > LEAST)
    return theta


drawn = st.lists(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 300), st.integers(1, 50)),
        min_size=1,
        max_size=6,
    ),
    max_size=4,
)


@given(drawn, schedules, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_steps_are_those_of_the_algorithm(drawn, schedule, discount):
    rounds = [[Trial(a, loss / 100, w) for a, loss, w in trials] for trials in drawn]
    expected = oracle(8, rounds, schedule, discount)
    found = after(8, rounds, schedule, discount).probabilities().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-12)


@given(cases, schedules, discounts)
def test_theta_stays_a_distribution(case, schedule, discount):
    theta = after(*case, schedule, discount)
    pi = theta.probabilities()
    assert float(pi.sum()) == pytest.approx(1)
    assert bool((pi >= 0).all())
    assert 0 <= theta.entropy() <= math.log(case[0]) + 1e-9
    assert float(pi[theta.best()]) == float(pi.max())


@given(st.floats(0, 2), st.floats(0.01, 2), schedules)
def test_the_better_of_two_gains_on_the_other_and_on_the_untried(loss, gap, schedule):
    better, worse, untried = (
        after(3, [[Trial(0, loss, 1), Trial(1, loss + gap, 1)]], schedule).probabilities().tolist()
    )
    assert better > untried > worse


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_losses_move_nothing(schedule):
    """Rounding must not become a step: an aggressive one has one length whatever the losses."""
    theta = after(3, [[Trial(0, 0.1, 1), Trial(1, 0.1, 7), Trial(2, 0.1, 3)]] * 3, schedule)
    torch.testing.assert_close(theta.probabilities(), torch.full((3,), 1 / 3).double())


def test_the_best_configuration_wins_in_the_end():
    generator = make_generator(1, "fedex")
    means = [0.9, 0.5, 0.7, 0.8]
    for schedule in ("aggressive", "adaptive"):
        theta = Theta.of(4, ThetaSettings(schedule, 0.9))
        for _ in range(150):
            arms = [theta.draw(generator) for _ in range(10)]
            noise = 0.02 * torch.randn(10, generator=generator, dtype=torch.float64)
            theta = theta.updated(
                [Trial(a, means[a] + float(n), 1) for a, n in zip(arms, noise, strict=True)]
            )
        assert theta.best() == 1, schedule


def test_draws_follow_theta():
    theta = after(3, [[Trial(0, 0.1, 1), Trial(1, 0.5, 1), Trial(2, 0.4, 1)]], "constant")
    generator, counts = make_generator(1, "draws"), [0, 0, 0]
    for _ in range(20_000):
        counts[theta.draw(generator)] += 1
    difference = torch.tensor(counts) / 20_000 - theta.probabilities()
    assert float(difference.abs().max()) < 5 * math.sqrt(0.25 / 20_000)


def test_a_round_without_answers_changes_nothing():
    theta = after(3, [[Trial(1, 0.3, 2)]])
    assert theta.updated([]) is theta


@given(cases)
def test_state_survives_json(case):
    theta = after(*case)
    again = Theta.of(case[0], theta.settings).with_json(json.loads(json.dumps(theta.to_json())))
    trials = [Trial(0, 0.25, 3.0)]
    assert torch.equal(again.updated(trials).log_theta_N, theta.updated(trials).log_theta_N)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [(("fast", 0.5), "schedule"), (("constant", -0.1), "baseline_discount=-0.1")],
)
def test_constants_out_of_range_are_refused(values, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ThetaSettings(*values)
