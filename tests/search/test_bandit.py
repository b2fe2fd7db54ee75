"""The bandit and theta: rules as properties, oracles, and simulations."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.search.bandit import DISCOUNT, EQUAL, LEAST, Bandit, Theta, Trial
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.settings.optimizers import BanditSettings

SETTINGS = BanditSettings(beta=3.0, step_size=0.5, retention=0.9, temperature=0.25, scaled=True)
rewards = st.floats(-10, 10)


def paper_faithful(*, alpha, beta):
    """The constants with which the update is Eq. 6 and pi is the plain softmax(r)."""
    constants = {"step_size": alpha, "retention": alpha, "temperature": 1.0, "scaled": False}
    return replace(SETTINGS, beta=beta, **constants)


arms = st.integers(1, 40)


@cache
def composed_bandit(alpha):
    """The settings of an experiment with the paper's bandit."""
    overrides = ["experiment=feathers/paper_faithful", f"algorithm.bandit.step_size={alpha}"]
    return BanditSettings(**compose_tree(overrides)["algorithm"]["bandit"])


def tried(num_arms, *phases, constants=SETTINGS):
    bandit = Bandit.of(num_arms, constants)
    for phase in phases:
        bandit = bandit.updated(phase)
    return bandit


def some_phases(num_arms):
    return st.lists(st.dictionaries(st.integers(0, num_arms - 1), rewards, min_size=1), max_size=6)


cases = arms.flatmap(lambda n: st.tuples(st.just(n), some_phases(n)))


# Rules


def test_the_update_is_equation_6():
    alpha, before, reward = 0.3, [0.5, -0.2, 0.0, 1.0], {0: 2.0, 3: -1.0}
    bandit = Bandit(paper_faithful(alpha=alpha, beta=1.0), torch.tensor(before).double())
    found = bandit.updated(reward).estimates_N
    for arm, old in enumerate(before):
        i = arm in reward  # r + i alpha (r_e - r) + (1 - i)(alpha r - r)
        new = old + i * alpha * (reward.get(arm, 0.0) - old) + (1 - i) * (alpha * old - old)
        assert math.isclose(float(found[arm]), new, abs_tol=1e-7)


@given(cases, st.sampled_from([0.2, 0.5, 1.0]))
def test_the_experiment_of_the_papers_name_is_paper_faithful(case, alpha):
    chosen = composed_bandit(alpha)
    oracle = paper_faithful(alpha=alpha, beta=chosen.beta)
    found, expected = (tried(case[0], *case[1], constants=c) for c in (chosen, oracle))
    assert found.to_json() == expected.to_json()
    assert torch.equal(found.probabilities(), expected.estimates_N.softmax(0))
    assert found.num_trials() == expected.num_trials()


def test_the_default_is_not_the_papers():
    assert BanditSettings(**compose_tree(["algorithm=feathers"])["algorithm"]["bandit"]) == SETTINGS


def test_step_size_and_retention_are_apart_by_default():
    assert tried(3, {0: 1.0}, {1: 2.0}).estimates_N.tolist() == pytest.approx([0.45, 1.0, 0.0])


@given(cases)
@example((1, [{0: 5e-324}]))  # in units of which even itself is infinite
def test_pi_is_a_distribution_and_follows_the_estimates(case):
    bandit = tried(case[0], *case[1])
    pi = bandit.probabilities()
    assert float(pi.sum()) == pytest.approx(1)
    assert bool((pi >= 0).all())
    assert bool((pi[bandit.estimates_N.argsort()].diff() >= 0).all())
    assert 0 <= bandit.entropy() <= math.log(case[0]) + 1e-12


@given(cases, st.floats(0.01, 20))
def test_kappa_is_beta_times_entropy_within_one_and_all(case, beta):
    bandit = tried(case[0], *case[1], constants=replace(SETTINGS, beta=beta))
    kappa = bandit.num_trials()
    assert 1 <= kappa <= case[0]
    assert kappa in (1, case[0]) or abs(kappa - beta * bandit.entropy()) <= 0.5


def test_a_new_bandit_is_uniform():
    bandit = Bandit.of(8, SETTINGS)
    assert bandit.entropy() == pytest.approx(math.log(8))
    assert bandit.num_trials() == round(3 * math.log(8))
    assert bandit.best() == 0


@given(cases, st.data())
def test_draws_are_different_arms_and_repeatable(case, data):
    bandit = tried(case[0], *case[1])
    count = data.draw(st.integers(1, case[0]))
    drawn = bandit.draw(count, make_generator(1, "draw"))
    assert len(set(drawn)) == count
    assert set(drawn) <= set(range(case[0]))
    assert drawn == bandit.draw(count, make_generator(1, "draw"))


def assert_drawn(draw, probabilities):
    """Check the shares of 20,000 draws, to five standard deviations."""
    generator, counts = make_generator(1, "draws"), [0, 0, 0]
    for _ in range(20_000):
        counts[draw(generator)] += 1
    difference = torch.tensor(counts) / 20_000 - probabilities
    assert float(difference.abs().max()) < 5 * math.sqrt(0.25 / 20_000)


def test_draws_follow_pi():
    bandit = Bandit(replace(SETTINGS, temperature=1.0, scaled=False), torch.tensor([0.0, 1.0, 2.0]))
    assert_drawn(lambda generator: bandit.draw(1, generator)[0], bandit.probabilities())


@given(cases)
def test_the_best_arm_has_the_largest_estimate_of_those_tried(case):
    bandit = tried(case[0], *case[1])
    seen = sorted({arm for phase in case[1] for arm in phase} or range(case[0]))
    assert bandit.best() in seen
    assert float(bandit.estimates_N[bandit.best()]) == float(bandit.estimates_N[seen].max())


@given(cases, st.floats(0.1, 10))
def test_what_is_smaller_than_the_noise_does_not_end_exploration(case, noise):
    """The wider pi for the noise, and uniform up to e^2 for differences below it."""
    num_arms, phases = case
    bandit = tried(num_arms, *phases)
    noisy = replace(bandit, noise=noise)
    assert noisy.entropy() >= bandit.entropy() - 1e-9
    spread = float(bandit.estimates_N.max() - bandit.estimates_N.min())
    pi_N = noisy.probabilities()
    assert float(pi_N.max() / pi_N.min()) <= math.exp(spread / noise) * (1 + 1e-9)


@given(cases, st.floats(1e-3, 1e3))
@example((2, [{0: 9e-158}, {1: -4e-170}]), 0.004)  # their squares are 0
def test_the_unit_of_the_rewards_does_not_matter(case, unit):
    num_arms, phases = case
    assume(all(not r or abs(r) > 1e-300 for phase in phases for r in phase.values()))  # normal
    scaled = [{arm: unit * reward for arm, reward in phase.items()} for phase in phases]
    both = (tried(num_arms, *scaled), tried(num_arms, *phases))
    torch.testing.assert_close(*(bandit.probabilities() for bandit in both))


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_a_diverged_trial_counts_as_the_worst(nothing):
    bandit = tried(3, {0: 0.5, 1: -0.25, 2: nothing})
    assert bool(bandit.estimates_N.isfinite().all())
    assert bandit.estimates_N[2] == bandit.estimates_N[1]
    alone = tried(2, {0: 1.0}, {0: nothing})
    assert bool(alone.estimates_N.isfinite().all())
    assert float(alone.estimates_N[0]) < 0.5


def rounds_over(num_configurations, most=8):
    numbers = st.integers(0, num_configurations - 1)
    trial = st.builds(Trial, numbers, st.floats(0, 5), st.floats(0.5, 100))
    return st.lists(st.lists(trial, min_size=1, max_size=6), max_size=most)


def theta_after(num_configurations, rounds):
    theta = Theta.of(num_configurations)
    for trials in rounds:
        theta = theta.updated(trials)
    return theta


def oracle(num_configurations, rounds):
    """Algorithm 2 as it is written, with probabilities and the whole trace of losses."""
    theta, trace = np.full(num_configurations, 1 / num_configurations), []
    for trials in rounds:
        weights = np.array([t.weight for t in trials]) / sum(t.weight for t in trials)
        losses = np.array([t.loss for t in trials])
        past = np.array(trace or [weights @ losses])
        ages = np.arange(len(past))[::-1]
        baseline = past @ DISCOUNT**ages / (DISCOUNT**ages).sum()
        excess = np.zeros(num_configurations)
        for (arm, loss, _), weight in zip(trials, weights, strict=True):
            excess[arm] += weight * (loss - baseline)
        gradient = np.where(np.abs(excess) > EQUAL, excess, 0) / theta
        trace.append(weights @ losses)
        if largest := np.abs(gradient).max():
            step = np.sqrt(2 * np.log(num_configurations)) * (gradient / largest)
            theta = theta * np.exp(step.min() - step)
            assume(theta.sum() > 0)  # where probabilities without logarithms end
            theta /= theta.sum()
            assume(theta.min() > LEAST)
    return theta


drawn_trials = st.tuples(st.integers(0, 7), st.integers(0, 300), st.integers(1, 50))
drawn = st.lists(st.lists(drawn_trials, min_size=1, max_size=6), max_size=4)


@given(drawn)
def test_steps_are_those_of_the_algorithm(drawn):
    rounds = [[Trial(a, loss / 100, w) for a, loss, w in trials] for trials in drawn]
    found = theta_after(8, rounds).probabilities().numpy()
    np.testing.assert_allclose(found, oracle(8, rounds), rtol=1e-5, atol=1e-12)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), rounds_over(n))))
def test_theta_stays_a_distribution(case):
    theta = theta_after(*case)
    pi = theta.probabilities()
    assert float(pi.sum()) == pytest.approx(1)
    assert bool((pi >= 0).all())
    assert 0 <= theta.entropy() <= math.log(case[0]) + 1e-9
    assert float(pi[theta.best()]) == float(pi.max())


def test_equal_losses_move_nothing():
    """Rounding must not become a step, which has one length whatever the losses."""
    theta = theta_after(3, [[Trial(0, 0.1, 1), Trial(1, 0.1, 7), Trial(2, 0.1, 3)]] * 3)
    torch.testing.assert_close(theta.probabilities(), torch.full((3,), 1 / 3).double())


def test_draws_follow_theta():
    theta = theta_after(3, [[Trial(0, 0.1, 1), Trial(1, 0.5, 1), Trial(2, 0.4, 1)]])
    assert_drawn(theta.draw, theta.probabilities())


def test_a_round_without_answers_changes_nothing():
    theta = theta_after(3, [[Trial(1, 0.3, 2)]])
    assert theta.updated([]) is theta
