"""The tuner: the default bandit as it is made; what the two options do, and where they are better.

The simulation is the paper's setting: rewards shrink while training goes on, and the best learning
rate falls.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.kernel_ridge import KernelRidge

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.search.bandit import RIDGE, Bandit, Tuner, draw_configurations, predict, reflect
from fednas_flwr.settings.optimizers import Configuration, Range

from .test_bandit import SETTINGS as DEFAULT

RESAMPLED = replace(DEFAULT, resampled_share=0.3)
SEEING = replace(DEFAULT, sees_state=True)
BOTH = replace(SEEING, resampled_share=0.3)
RANGES = {
    "lr": Range(1e-4, 1e-1, log=True),
    "weight_decay": Range(1e-5, 1e-1, log=True),
    "momentum": Range(0.0, 1.0, log=False),
    "alpha_lr": Range(1e-5, 1e-2, log=True),
    "alpha_weight_decay": Range(1e-5, 1e-1, log=True),
    "dropout": Range(0.0, 0.2, log=False),
}
phases = st.lists(
    st.dictionaries(st.integers(0, 7), st.floats(-5, 5) | st.just(math.nan), min_size=1),
    max_size=5,
)
options = st.sampled_from([DEFAULT, RESAMPLED, SEEING, BOTH])


def made(constants, num_arms=8, seed=1):
    configurations = draw_configurations(num_arms, RANGES, make_generator(seed, "arms"))
    return Tuner.of(configurations, RANGES, constants)


def after(constants, rewards):
    tuner = made(constants)
    for phase, seen in enumerate(rewards):
        tuner = tuner.seeing(progress=phase / 5, loss=2.0 / (1 + phase))
        tuner = tuner.updated(seen, make_generator(1, "resample", phase))
    return tuner


# Rules


@given(phases)
def test_without_options_it_is_the_bandit_over_a_list_that_stays(rewards):
    bandit = Bandit.of(8, DEFAULT)
    for seen in rewards:
        bandit = bandit.updated(seen)
    tuner = after(DEFAULT, rewards)
    assert tuner.bandit.to_json() == bandit.to_json()
    assert tuner.configurations == made(DEFAULT).configurations
    assert tuner.draw(make_generator(1, "d")) == bandit.draw(
        bandit.num_trials(), make_generator(1, "d")
    )


@given(phases, options)
def test_state_survives_json_and_phases_repeat(rewards, constants):
    tuner = after(constants, rewards)
    again = made(constants).with_json(json.loads(json.dumps(tuner.to_json())))
    assert again.to_json() == tuner.to_json() == after(constants, rewards).to_json()
    step = [t.updated({0: 1.0, 3: -1.0}, make_generator(2, "next")) for t in (tuner, again)]
    assert step[0].to_json() == step[1].to_json()


@given(phases, options)
def test_arms_stay_in_their_ranges_and_estimates_are_finite(rewards, constants):
    tuner = after(constants, rewards)
    assert bool(tuner.bandit.estimates_N.isfinite().all())
    for configuration in tuner.configurations:
        for name, value in asdict(configuration).items():
            low, high = RANGES[name].low, RANGES[name].high
            assert low * (1 - 1e-9) <= value <= high * (1 + 1e-9)


@given(phases)
def test_resampling_keeps_the_best_arm_and_changes_the_share_it_says(rewards):
    tuner = made(RESAMPLED)
    for phase, seen in enumerate(rewards):
        plain = replace(tuner, bandit=replace(tuner.bandit, settings=DEFAULT))
        generator = make_generator(1, "resample", phase)
        learnt, tuner = plain.updated(seen, generator), tuner.updated(seen, generator)
        best, estimates = learnt.bandit.best(), learnt.bandit.estimates_N
        assert tuner.configurations[best] == learnt.configurations[best]
        assert tuner.bandit.best() == best
        pairs = zip(tuner.configurations, learnt.configurations, strict=True)
        changed = [arm for arm, (new, old) in enumerate(pairs) if new != old]
        assert len(changed) == int(0.3 * 8)
        assert not tuner.bandit.tried & set(changed)  # nobody has tried them yet
        kept = [float(e) for arm, e in enumerate(estimates) if arm not in (*changed, best)]
        assert max(float(estimates[arm]) for arm in changed) <= min(kept)


def test_new_arms_are_near_good_ones_and_ever_nearer():
    """In the range's logarithm: an arm at 1e-2 of a range from 1e-4 to 1e-1 lies at 2/3."""
    one = Configuration(1e-2, 1e-3, 0.5, 1e-3, 1e-3, 0.1)
    distances = []
    for phase in (0, 10):
        tuner = replace(Tuner.of([one] * 200, RANGES, RESAMPLED), phases=phase)
        tuner = tuner.updated({0: 1.0}, make_generator(1, "near"))
        lrs = [RANGES["lr"].share_of(c.lr) - 2 / 3 for c in tuner.configurations if c != one]
        assert len(lrs) == 60
        distances.append(float(np.sqrt(np.mean(np.square(lrs)))))
    # Gaussian of deviation .2 * .9 ** phase; five deviations of a root mean square of 60.
    for found, spread in zip(distances, (0.2 * 0.9, 0.2 * 0.9**11), strict=True):
        assert abs(found / spread - 1) < 5 / math.sqrt(2 * 60)


@given(st.floats(-3, 4))
def test_reflection_keeps_what_is_inside_and_mirrors_the_rest(share):
    found = float(reflect(torch.tensor([share], dtype=torch.float64)))
    assert 0 <= found < 1
    oracle = share
    while not 0 <= oracle <= 1:
        oracle = -oracle if oracle < 0 else 2 - oracle
    assert found == pytest.approx(oracle, abs=1e-12)


@given(
    st.sampled_from([RANGES["lr"], RANGES["momentum"], Range(0.2, 0.2, log=False)]),
    st.floats(0, 0.999),
)
def test_share_of_inverts_a_range(distribution, share):
    found = distribution.share_of(distribution.at(share))
    assert found == pytest.approx(0 if distribution.low == distribution.high else share, abs=1e-9)


def test_a_given_value_outside_of_its_range_lies_at_its_end():
    assert RANGES["weight_decay"].share_of(0.0) == 0.0
    assert RANGES["lr"].share_of(5.0) == 1.0


def test_predictions_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    points, queries = rng.normal(size=(12, 4)), rng.normal(size=(5, 4))
    rewards = rng.normal(size=12)
    oracle = KernelRidge(alpha=RIDGE, kernel="rbf", gamma=0.5).fit(points, rewards - rewards.mean())
    found = predict(*map(torch.from_numpy, (points, rewards, queries)))
    np.testing.assert_allclose(found, rewards.mean() + oracle.predict(queries), rtol=1e-9)


def test_an_arm_is_judged_by_its_neighbours_in_a_like_state():
    arms = [Configuration(lr, 1e-3, 0.5, 1e-3, 1e-3, 0.1) for lr in (9e-2, 8e-2, 2e-4, 1.5e-4)]
    generator = make_generator(1, "unused")
    tuner = Tuner.of(arms, RANGES, SEEING).seeing(progress=0.0, loss=2.3)
    early = tuner.updated({0: 0.5, 2: 0.05}, generator)
    assert early.bandit.estimates_N[1] > early.bandit.estimates_N[3]  # neither was tried
    late = early.seeing(progress=0.9, loss=0.3).updated({0: -0.02, 2: 0.03}, generator)
    assert late.bandit.estimates_N[3] > late.bandit.estimates_N[1]
    assert late.best().lr < 1e-3
    again = late.seeing(progress=0.0, loss=2.3)
    assert again.best().lr > 1e-2


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, 0.0, -1.0])
def test_a_loss_that_is_none_or_nonsense_does_no_harm(loss):
    tuner = made(SEEING).updated({0: 1.0, 1: 0.5}, make_generator(1, "x"))
    tuner = tuner.seeing(progress=0.5, loss=loss)
    assert bool(tuner.bandit.estimates_N.isfinite().all())


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match="^resampled_share="):
        replace(DEFAULT, resampled_share=share)


# Where the options are better


def quality(configuration, best_lr):
    """Return a configuration's reward over the best one's: 1 at the best, below 0 far from it."""
    shares = {name: RANGES[name].share_of(v) for name, v in asdict(configuration).items()}
    worse = ((shares["lr"] - best_lr) / 0.25) ** 2
    for name, best in {"weight_decay": 0.5, "momentum": 0.7, "alpha_lr": 0.6}.items():
        worse += 0.6 * (shares[name] - best) ** 2
    return 1 - worse


def regret(constants, *, num_arms, fall, seed, num_phases=12):
    """Return the mean over phases of how far the chosen arm's reward is below the best possible."""
    generator, tuner = make_generator(seed, "simulation"), made(constants, num_arms, seed)
    lost, loss = 0.0, 2.3
    for phase in range(num_phases):
        progress = phase / num_phases
        best_lr, size = 0.85 - fall * progress, 0.2 * math.exp(-2.5 * progress)
        tuner = tuner.seeing(progress=progress, loss=loss)
        rewards = {}
        for arm in tuner.draw(generator):
            noise = float(torch.randn((), generator=generator, dtype=torch.float64))
            rewards[arm] = size * (quality(tuner.configurations[arm], best_lr) + 0.15 * noise)
        tuner = tuner.updated(rewards, generator)
        found = quality(tuner.best(), best_lr)
        lost += (1 - found) / num_phases
        loss = max(0.3, loss - size * max(0.0, found))
    return lost


def mean_regret(constants, **setting):
    return float(np.mean([regret(constants, seed=seed, **setting) for seed in range(8)]))


def test_seeing_the_state_is_better_where_the_best_learning_rate_falls():
    setting = {"num_arms": 60, "fall": 0.6}
    default, seeing, both = (mean_regret(c, **setting) for c in (DEFAULT, SEEING, BOTH))
    assert seeing < 0.7 * default
    assert both < seeing


def test_resampling_is_better_where_the_list_is_short_and_the_best_stays():
    setting = {"num_arms": 10, "fall": 0.0}
    assert mean_regret(RESAMPLED, **setting) < 0.9 * mean_regret(DEFAULT, **setting)
