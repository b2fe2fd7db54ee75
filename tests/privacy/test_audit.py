import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fednas_flwr.privacy.accounting import prv_epsilon
from fednas_flwr.privacy.audit import (
    ManyRunsPlan,
    audit_many_runs,
    audit_one_run,
    audit_steps,
    epsilon_lower_bound,
    gaussian_epsilon_lower_bound,
    one_run_epsilon,
    one_run_p_value,
    plan_many_runs,
    plan_one_run,
)
from fednas_flwr.privacy.clipping import clipped_gradient_sum
from fednas_flwr.privacy.gdp import gaussian_epsilon
from fednas_flwr.privacy.noise import SecureGenerator, add_noise
from fednas_flwr.privacy.renyi import Release

# Many runs: the real clipping and noise, and mutants of them.
#
# A claim holds at every delta, and a few thousand runs say most at a large one. However many steps
# a mechanism has, its noise is such that their composition has the claim of one step at 1. For
# speed every call noises the sums of a hundred runs, a row each; no two values share noise.
DELTA, CONFIDENCE, NUM_RUNS, RUNS_PER_CALL = 0.1, 1 - 1e-5, 8000, 100
NORM = 0.5
CANARY = 2  # the coordinate in which its gradient lies
World = list[Tensor]  # the sum of every step before noise, [runs, 3]
Mechanism = Callable[[World, SecureGenerator, float], list[Tensor]]


def losses(output: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * (output[:, 0] - labels).square()


def total(weight: float, *, canary: bool, max_norm: float = NORM) -> Tensor:
    """The sum of the clipped gradients at a weight of the canary's feature, 1 or -1.

    At 1 the five other records pull the coordinate down, by 4 each before clipping, and the canary
    pulls it up by 100. At -1 it pulls it down as much.
    """
    features = [[1.0, 0.0, -2.0], [0.0, 1.0, -2.0]] * 2 + [[1.0, 0.0, -2.0]]
    labels = [-4] * 5
    layer = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0.0, weight]]))
    sums = clipped_gradient_sum(
        layer,
        torch.tensor(features + [[0.0, 0.0, 10.0]] * canary),
        torch.tensor(labels + [0] * canary),
        loss=losses,
        parameters={"weight": layer.weight},
        max_norm=max_norm,
    )
    return sums["weight"][0]


def real(world: World, generator: SecureGenerator, sigma: float) -> list[Tensor]:
    return [add_noise(s, generator, noise_multiplier=sigma, max_grad_norm=NORM) for s in world]


def no_noise(world: World, generator: SecureGenerator, sigma: float) -> list[Tensor]:
    return world


def half_sigma(world: World, generator: SecureGenerator, sigma: float) -> list[Tensor]:
    return real(world, generator, sigma / 2)


def clip_after_sum(world: World, generator: SecureGenerator, sigma: float) -> list[Tensor]:
    return real([s * (NORM / s.norm(dim=1, keepdim=True)) for s in world], generator, sigma)


def reused_noise(world: World, generator: SecureGenerator, sigma: float) -> list[Tensor]:
    noise = add_noise(
        torch.zeros_like(world[0]), generator, noise_multiplier=sigma, max_grad_norm=NORM
    )
    return [s + noise for s in world]


def momentum_before_noise(world: World, generator: SecureGenerator, sigma: float) -> list[Tensor]:
    return real(list(itertools.accumulate(world, lambda b, s: 0.9 * b + s)), generator, sigma)


def momentum_after_noise(world: World, generator: SecureGenerator, sigma: float) -> list[Tensor]:
    noised = real(world, generator, sigma)
    return list(itertools.accumulate(noised, lambda b, s: 0.9 * b + s))


def claim(num_steps: int) -> float:
    return prv_epsilon([Release(math.sqrt(num_steps), 1.0, num_steps)], DELTA)


def audited(
    mechanism: Mechanism,
    *,
    weights: Sequence[float] = (1.0,),
    attack: Sequence[float] = (1.0,),
    max_norm: float = NORM,
) -> float:
    """Audit a mechanism of one step per weight; the attack adds up the canary's coordinate."""
    generator = SecureGenerator()

    def scores(canary: bool) -> Tensor:
        sums = [total(weight, canary=canary, max_norm=max_norm) for weight in weights]
        world = [s.expand(RUNS_PER_CALL, -1) for s in sums]
        scores = []
        for _ in range(NUM_RUNS // RUNS_PER_CALL):
            steps = mechanism(world, generator, math.sqrt(len(world)))
            scores.append(sum(a * s[:, CANARY] for a, s in zip(attack, steps, strict=True)))
        return torch.cat(scores)

    bound = audit_many_runs(scores(True), scores(False), delta=DELTA, confidence=CONFIDENCE)
    print(f"{mechanism.__name__}: bound {bound:.2f}, claim {claim(len(weights)):.2f}")
    return bound


MOMENTUM_ATTACK = (1.0, 1.9, 2.71)  # what a canary adds to the buffer of each step


def test_the_canary_is_alone_in_its_coordinate_and_clipped() -> None:
    for weight in (1.0, -1.0):
        with_it, without = (total(weight, canary=canary) for canary in (True, False))
        assert (with_it - without).tolist() == pytest.approx([0, 0, weight * NORM])
        raw = total(weight, canary=True, max_norm=1e9) - total(weight, canary=False, max_norm=1e9)
        assert raw.tolist() == [0, 0, weight * 100]
    assert claim(1) == pytest.approx(claim(2), rel=1e-2)
    assert claim(1) == pytest.approx(claim(3), rel=1e-2)
    assert 1 < claim(1) < 1.3


@pytest.mark.parametrize(
    ("weights", "attack"),
    [((1.0,), (1.0,)), ((1.0, -1.0), (1.0, -1.0)), ((1.0,) * 3, (1.0,) * 3)],
)
def test_the_real_mechanism_stays_below_its_claim(
    weights: tuple[float, ...], attack: tuple[float, ...]
) -> None:
    """By chance it fails at most once in 100,000 times. The lower end: the audit sees much."""
    bound = audited(real, weights=weights, attack=attack)
    assert 0.3 * claim(len(weights)) < bound <= claim(len(weights))


@pytest.mark.parametrize("mechanism", [no_noise, half_sigma])
def test_too_little_noise_is_caught(mechanism: Mechanism) -> None:
    assert audited(mechanism) > claim(1)


@pytest.mark.parametrize("mechanism", [real, clip_after_sum])
def test_records_that_were_not_clipped_are_caught(mechanism: Mechanism) -> None:
    assert audited(mechanism, max_norm=1e9) > claim(1)


def test_clipping_after_the_sum_is_caught_by_the_records_that_the_canary_outweighs() -> None:
    """Their sum lies near -R in the canary's coordinate without it, and near R with it."""
    sums = [total(1.0, canary=canary, max_norm=1e9) for canary in (True, False)]
    ends = [float(s[CANARY] * NORM / s.norm()) for s in sums]
    assert ends[0] - ends[1] > 1.9 * NORM


def test_reused_noise_is_caught() -> None:
    # The server moves the weight so that the canary's gradient turns round, and subtracts.
    assert audited(reused_noise, weights=(1.0, -1.0), attack=(1.0, -1.0)) > claim(2)


def test_momentum_before_noise_is_caught() -> None:
    assert audited(momentum_before_noise, weights=(1.0,) * 3, attack=MOMENTUM_ATTACK) > claim(3)


def test_momentum_after_noise_is_free() -> None:
    bound = audited(momentum_after_noise, weights=(1.0,) * 3, attack=(0.1, 0.1, 1.0))
    assert 0.3 * claim(3) < bound <= claim(3)


# The bound of many runs.


def test_epsilon_lower_bound_of_perfect_and_of_one_sided_tests() -> None:
    least = 0.025 ** (1 / 100)  # Clopper and Pearson: lower limit of 100 hits in 100
    perfect = epsilon_lower_bound(
        true_positives=100,
        false_negatives=0,
        false_positives=0,
        true_negatives=100,
        delta=1e-3,
        confidence=0.95,
    )
    assert perfect == pytest.approx(math.log((least - 1e-3) / (1 - least)))
    # Never wrong about a run without the canary, right half of the time about one with it; then
    # the other way round, where only the complementary inequality sees it.
    for hits, alarms in ((50, 0), (100, 50)):
        bound = epsilon_lower_bound(
            true_positives=hits,
            false_negatives=100 - hits,
            false_positives=alarms,
            true_negatives=100 - alarms,
            delta=0.0,
            confidence=0.95,
        )
        half = stats.binomtest(50, 100).proportion_ci(0.95, method="exact").low
        assert bound == pytest.approx(math.log(half / (1 - least)))


def test_epsilon_lower_bound_says_nothing_where_it_should() -> None:
    for hits, alarms, delta in ((50, 50, 0.0), (0, 100, 0.0), (0, 0, 0.0), (10, 10, 0.0)):
        assert counted(hits, alarms, 100, delta, 0.95) == 0
    assert counted(100, 100, 100, 0.0, 0.95) == 0
    assert counted(100, 0, 100, 0.99, 0.95) == 0


@functools.cache
def counted(hits: int, alarms: int, runs: int, delta: float, confidence: float) -> float:
    return epsilon_lower_bound(
        true_positives=hits,
        false_negatives=runs - hits,
        false_positives=alarms,
        true_negatives=runs - alarms,
        delta=delta,
        confidence=confidence,
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (1.0, 0.05), (3.0, 0.01)])
@pytest.mark.parametrize("runs", [10, 30])
def test_epsilon_lower_bound_is_wrong_as_seldom_as_it_says(
    epsilon: float, delta: float, runs: int
) -> None:
    """Randomised response that, with probability delta, tells the truth: summed over all counts."""
    right = delta + (1 - delta) / (1 + math.exp(-epsilon))
    hits = stats.binom.pmf(np.arange(runs + 1), runs, right)
    wrong = sum(
        hits[i] * hits[runs - j]
        for i in range(runs + 1)
        for j in range(runs + 1)
        if counted(i, j, runs, delta, 0.9) > epsilon
    )
    assert wrong <= 0.1


def test_epsilon_lower_bound_comes_close_with_many_runs() -> None:
    runs, right = 1_000_000, 1 / (1 + math.exp(-2.0))
    bound = counted(round(right * runs), round((1 - right) * runs), runs, 0.0, 0.999)
    assert 1.97 < bound < 2.0


def test_the_threshold_is_not_chosen_on_the_runs_that_are_counted() -> None:
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        present, absent = torch.from_numpy(random.normal(size=(2, 60)))
        wrong += audit_many_runs(present, absent, delta=0.0, confidence=0.9) > 0
    assert wrong <= stats.binom.ppf(0.999, 300, 0.1)
    # Scores of the second halves alone give the counts, those of the first alone the threshold.
    present = torch.tensor([1.0] * 50 + [1.0] * 40 + [-1.0] * 10)
    absent = torch.tensor([0.0] * 50 + [0.9] * 50)
    assert audit_many_runs(present, absent, delta=0.0, confidence=0.95) == pytest.approx(
        counted(40, 0, 50, 0.0, 0.95)
    )


def test_many_runs_of_a_gaussian_come_close_to_its_epsilon() -> None:
    random = np.random.default_rng(1)
    present, absent = torch.from_numpy(random.normal(size=(2, 100_000)))
    epsilon = prv_epsilon([Release(1.0, 1.0, 1)], 0.01)
    bound = audit_many_runs(present + 1, absent, delta=0.01, confidence=0.999)
    assert 0.8 * epsilon < bound < epsilon


# The bound of one run.


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "epsilon"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_one_run_epsilon_of_the_paper(
    canaries: int, guesses: int, right: int, delta: float, epsilon: float
) -> None:
    """Steinke et al. (2023), arXiv 2305.08846: appendix D and section 7."""
    bound = one_run_epsilon(
        num_canaries=canaries,
        num_guesses=guesses,
        num_right=right,
        delta=delta,
        confidence=0.95,
    )
    assert bound == pytest.approx(epsilon, abs=1e-3)


def test_all_guesses_right() -> None:
    for guesses in (1, 10, 300):
        bound = one_run_epsilon(
            num_canaries=300, num_guesses=guesses, num_right=guesses, delta=0.0, confidence=0.95
        )
        rate = 0.05 ** (1 / guesses)
        assert bound == pytest.approx(max(0.0, math.log(rate / (1 - rate))), abs=1e-6)


@functools.cache
def p_value(canaries: int, right: int, epsilon: float, delta: float) -> float:
    return one_run_p_value(
        num_canaries=canaries,
        num_guesses=canaries,
        num_right=right,
        epsilon=epsilon,
        delta=delta,
    )


@settings(max_examples=40)
@given(
    canaries=st.integers(1, 60),
    epsilon=st.floats(0.0, 6.0),
    delta=st.floats(0.0, 0.2),
)
def test_p_values_bound_what_a_private_mechanism_lets_guess(
    canaries: int, epsilon: float, delta: float
) -> None:
    """Exact: with probability ``m delta / k`` it shows k of the canaries, the rest it randomises.

    Each canary is shown with probability delta, so it is (epsilon, delta)-DP; k = m shows all.
    """
    rate = 1 / (1 + math.exp(-epsilon))
    right = np.arange(canaries + 1)
    bounds = [p_value(canaries, int(v), epsilon, delta) for v in right]
    for shown in range(1, canaries + 1):
        often = min(1.0, canaries * delta / shown)
        tails = (1 - often) * stats.binom.sf(right - 1, canaries, rate)
        tails += often * stats.binom.sf(right - shown - 1, canaries - shown, rate)
        assert (tails <= np.array(bounds) * (1 + 1e-9)).all()


@settings(max_examples=40)
@given(
    canaries=st.integers(1, 300),
    guesses=st.floats(0, 1),
    delta=st.sampled_from([0.0, 1e-6, 1e-3, 0.1]),
)
def test_p_values_never_fall_as_epsilon_grows(canaries: int, guesses: float, delta: float) -> None:
    number = round(guesses * canaries)
    grid = [
        [
            one_run_p_value(
                num_canaries=canaries,
                num_guesses=number,
                num_right=right,
                epsilon=epsilon,
                delta=delta,
            )
            for epsilon in (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 9.0, 50.0)
        ]
        for right in sorted({0, number // 2, number * 3 // 4, number})
    ]
    values = np.array(grid)
    assert ((values >= 0) & (values <= 1)).all()
    assert (np.diff(values, axis=1) >= -1e-12).all()
    assert (values[:, -1] > 0.999).all()


@pytest.mark.parametrize(("canaries", "epsilon"), [(30, 0.0), (30, 1.0), (200, 1.0), (200, 4.0)])
def test_one_run_epsilon_is_wrong_as_seldom_as_it_says(canaries: int, epsilon: float) -> None:
    """Randomised response, summed over all numbers of right guesses."""
    chances = stats.binom.pmf(np.arange(canaries + 1), canaries, 1 / (1 + math.exp(-epsilon)))
    bounds = [
        one_run_epsilon(
            num_canaries=canaries,
            num_guesses=canaries,
            num_right=right,
            delta=0.0,
            confidence=0.95,
        )
        for right in range(canaries + 1)
    ]
    assert bounds == sorted(bounds)
    assert 0.001 < sum(chances[np.array(bounds) > epsilon]) <= 0.05


def responses(epsilon: float, canaries: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of randomised response, and what the coins said."""
    random = np.random.default_rng(seed)
    included = random.random(canaries) < 0.5
    right = random.random(canaries) < 1 / (1 + math.exp(-epsilon))
    return torch.from_numpy(np.where(included == right, 1.0, -1.0)), torch.from_numpy(included)


def test_one_run_audits_of_randomised_response() -> None:
    bounds = []
    for seed in range(200):
        scores, included = responses(1.0, 100, seed)
        # Ties are cut by place: the guesses are some of the yeses and some of the noes.
        result = audit_one_run(
            scores, included, guesses_in=30, guesses_out=30, delta=0.0, confidence=0.9
        )
        assert result.num_guesses == 60
        bounds.append(result.epsilon)
    assert 0 < sum(bound > 1.0 for bound in bounds) <= stats.binom.ppf(0.999, 200, 0.1)
    scores, included = responses(2.0, 1_000_000, 0)
    result = audit_one_run(
        scores, included, guesses_in=400_000, guesses_out=400_000, delta=0.0, confidence=0.99
    )
    assert 1.97 < result.epsilon < 2.0


def test_guesses_are_the_ends_and_the_middle_abstains() -> None:
    result = audit_one_run(
        torch.tensor([0.5, -3.0, 7.0, 7.0, 0.0, -1.0]),
        torch.tensor([True, False, True, False, True, True]),
        guesses_in=2,
        guesses_out=1,
        delta=0.0,
        confidence=0.5,
    )
    assert result.guesses.tolist() == [0, -1, 1, 1, 0, 0]
    assert (result.num_guesses, result.num_right) == (3, 2)
    assert result.scores.dtype == torch.float64
    everyone = audit_one_run(
        torch.tensor([2.0, 1.0]),
        torch.tensor([True, True]),
        guesses_in=0,
        guesses_out=2,
        delta=0.0,
        confidence=0.5,
    )
    assert everyone.guesses.tolist() == [-1, -1]
    assert (everyone.num_right, everyone.epsilon) == (0, 0.0)


# One run of the real mechanism.

NUM_CANARIES, NUM_STEPS, ONE_RUN_DELTA = 800, 5, 1e-7


def audited_steps(sigma: float) -> float:
    """Audit five full-batch steps with many orthogonal gradient canaries and the real noise."""
    generator = SecureGenerator()
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(900, 900)))[0]

    def gradients(step: int) -> Tensor:
        return NORM * torch.from_numpy(rotation).roll(step, 0)[:NUM_CANARIES]

    def scores(step: int, included: Tensor) -> Tensor:
        sums = gradients(step)[included].sum(0)
        released = add_noise(sums, generator, noise_multiplier=sigma, max_grad_norm=NORM)
        return gradients(step) @ released

    result = audit_steps(
        scores,
        generator=generator,
        num_steps=NUM_STEPS,
        num_canaries=NUM_CANARIES,
        guesses_in=50,
        guesses_out=50,
        delta=ONE_RUN_DELTA,
        confidence=1 - 1e-4,
    )
    print(f"sigma {sigma}: {result.num_right} of {result.num_guesses}, bound {result.epsilon:.2f}")
    return result.epsilon


def test_one_run_of_the_real_mechanism_stays_below_its_claim_and_sees_much() -> None:
    booked = prv_epsilon([Release(1.5, 1.0, NUM_STEPS)], ONE_RUN_DELTA)
    assert 0.5 < audited_steps(1.5) <= booked


def test_one_run_catches_noise_that_is_far_below_what_is_booked() -> None:
    booked = prv_epsilon([Release(10.0, 1.0, NUM_STEPS)], ONE_RUN_DELTA)
    assert audited_steps(0.1) > booked > 0.5


def test_scores_of_all_steps_are_added_up() -> None:
    seen: list[tuple[int, list[bool]]] = []

    def scores(step: int, included: Tensor) -> Tensor:
        seen.append((step, included.tolist()))
        kept = (1.0, 10.0)[step] * included.double()
        included.zero_()  # its copy: the coins are not touched
        return kept

    result = audit_steps(
        scores,
        generator=SecureGenerator(test_seed=b"1"),
        num_steps=2,
        num_canaries=20,
        guesses_in=1,
        guesses_out=1,
        delta=0.0,
        confidence=0.5,
    )
    assert [step for step, _ in seen] == [0, 1]
    assert seen[0][1] == seen[1][1] == result.included.tolist()
    assert result.scores.tolist() == (11.0 * result.included).tolist()
    assert 0 < int(result.included.sum()) < 20
    assert result.num_right == 2


# The bound that assumes Gaussian noise.


@functools.cache
def gaussian_bound(hits: int, alarms: int, runs: int, delta: float, confidence: float) -> float:
    return gaussian_epsilon_lower_bound(
        true_positives=hits,
        false_negatives=runs - hits,
        false_positives=alarms,
        true_negatives=runs - alarms,
        delta=delta,
        confidence=confidence,
    )


def test_gaussian_bound_of_a_million_runs_is_the_epsilon_of_the_gaussian_mechanism() -> None:
    runs = 10_000_000
    for sigma in (0.5, 1.0, 4.0):
        hits, alarms = (round(runs * stats.norm.cdf(sign / 2 / sigma)) for sign in (1, -1))
        epsilon = prv_epsilon([Release(sigma, 1.0, 1)], 1e-5)
        assert 0.97 * epsilon < gaussian_bound(hits, alarms, runs, 1e-5, 0.99) < epsilon


@pytest.mark.parametrize("sigma", [0.7, 3.0])
def test_gaussian_bound_is_wrong_as_seldom_as_it_says(sigma: float) -> None:
    """Exact, over all counts of 60 runs in each world."""
    runs, epsilon = 60, gaussian_epsilon(1 / sigma, 1e-3)
    hits = stats.binom.pmf(np.arange(runs + 1), runs, stats.norm.cdf(0.5 / sigma))
    wrong = sum(
        hits[i] * hits[runs - j]
        for i in range(runs + 1)
        for j in range(runs + 1)
        if gaussian_bound(i, j, runs, 1e-3, 0.8) > epsilon
    )
    assert 1e-4 < wrong <= 0.2


def test_gaussian_bound_at_its_ends() -> None:
    assert gaussian_bound(50, 50, 100, 1e-5, 0.95) == 0
    assert gaussian_bound(0, 100, 100, 1e-5, 0.95) == 0
    assert math.isfinite(gaussian_bound(100, 0, 100, 1e-5, 0.95))
    assert gaussian_bound(90, 10, 100, 1e-5, 0.95) > counted(90, 10, 100, 1e-5, 0.95)
    assert gaussian_bound(1, 0, 1, 1e-5, 0.9) == 0
    for delta, hits, runs in ((0.0, 5, 10), (1e-5, 11, 10), (1e-5, 0, 0)):
        with pytest.raises(ValueError, match="delta must be above 0 and counts"):
            gaussian_bound(hits, 0, runs, delta, 0.9)


# How large an audit must be.


def one_run_plan(sigma: float, rate: float, *, most_steps: int, confidence: float = 0.995):
    return plan_one_run(
        lambda steps: prv_epsilon([Release(sigma, rate, steps)], 1e-5),
        sample_rate=rate,
        most_steps=most_steps,
        most_canaries=4096,
        delta=1e-5,
        confidence=confidence,
    )


@pytest.mark.parametrize(
    ("sigma", "rate", "most_steps", "steps"),
    [(1.0, 1.0, 20, 1), (4.0, 1.0, 20, 20), (2.0, 1.0, 7, 3), (1.0, 0.03, 20, 20)],
)
def test_one_run_has_as_many_steps_as_can_be_refuted(
    sigma: float, rate: float, most_steps: int, steps: int
) -> None:
    plan = one_run_plan(sigma, rate, most_steps=most_steps)
    assert plan.num_steps == steps
    assert plan.largest > prv_epsilon([Release(sigma, rate, steps)], 1e-5) + 0.29
    assert (plan.guesses_out == plan.guesses_in) == (rate == 1)
    assert plan.guesses_in > 0


@pytest.mark.parametrize(("sigma", "rate", "most_steps"), [(1.0, 1.0, 1), (1.0, 0.03, 20)])
def test_without_noise_all_guesses_of_a_planned_run_are_right(
    sigma: float, rate: float, most_steps: int
) -> None:
    """And the bound is the one that was said to be the largest."""
    plan, generator = one_run_plan(sigma, rate, most_steps=most_steps), SecureGenerator(b"3")

    def scores(step: int, included: Tensor) -> Tensor:
        drawn = generator.poisson_mask(plan.num_canaries, probability=rate)
        return (drawn & included).double()

    result = audit_steps(
        scores,
        generator=generator,
        num_steps=plan.num_steps,
        num_canaries=plan.num_canaries,
        guesses_in=plan.guesses_in,
        guesses_out=plan.guesses_out,
        delta=1e-5,
        confidence=0.995,
    )
    assert result.num_right == result.num_guesses
    assert result.epsilon == plan.largest


@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 1.0), (0.7, 1.0), (1.0, 1e-5)])
def test_a_run_that_cannot_show_what_is_claimed_is_planned_as_such(
    sigma: float, rate: float
) -> None:
    plan = one_run_plan(sigma, rate, most_steps=4)
    assert plan.num_steps == 1
    assert plan.largest < prv_epsilon([Release(sigma, rate, 1)], 1e-5) + 0.3
    assert plan.guesses_in >= 1


def many_runs(sigma: float, confidence: float = 0.995, most_runs: int = 20_000) -> ManyRunsPlan:
    return plan_many_runs(
        noise_multiplier=sigma, most_runs=most_runs, delta=1e-5, confidence=confidence
    )


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("margins", [(1.0, 1.0), (1.5, 0.5)], ids=["half noise", "clipped sum"])
def test_planned_runs_refute_half_the_noise_in_999_of_1000_audits(
    sigma: float, margins: tuple[float, float]
) -> None:
    """Simulated; and the honest one, margins of a half, passes."""
    plan, random = many_runs(sigma), np.random.default_rng(0)
    claimed = prv_epsilon([Release(sigma, 1.0, 1)], 1e-5)
    assert plan.shows_half
    assert plan.largest > 1.5 * claimed

    def refuted(margins: tuple[float, float]) -> int:
        rates = (stats.norm.cdf(margins[0] / sigma), stats.norm.sf(margins[1] / sigma))
        counts = random.binomial(plan.runs_per_world, rates, (2000, 2)).tolist()
        return sum(
            gaussian_bound(hits, alarms, plan.runs_per_world, 1e-5, 0.995) > claimed
            for hits, alarms in counts
        )

    assert refuted(margins) >= 1990
    assert refuted((0.5, 0.5)) <= 2


def test_more_runs_than_allowed_are_not_planned() -> None:
    for sigma in (30.0, 0.1):
        plan = many_runs(sigma)
        assert (plan.runs_per_world, plan.shows_half) == (10_000, False)
    assert many_runs(1.0, most_runs=200) == ManyRunsPlan(
        100, many_runs(1.0, most_runs=200).largest, False
    )
    assert many_runs(1.0, confidence=0.9).runs_per_world < many_runs(1.0).runs_per_world


# What is refused.


@pytest.mark.parametrize(("delta", "confidence"), [(-0.1, 0.9), (1.0, 0.9), (math.nan, 0.9)])
def test_bad_deltas_are_refused(delta: float, confidence: float) -> None:
    with pytest.raises(ValueError, match="delta must lie"):
        counted(5, 5, 10, delta, confidence)
    with pytest.raises(ValueError, match="delta must lie"):
        p_value(5, 5, 1.0, delta)


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan])
def test_bad_confidences_are_refused(confidence: float) -> None:
    scores, included = torch.arange(4.0), torch.tensor([True] * 4)
    with pytest.raises(ValueError, match="confidence strictly"):
        counted(5, 5, 10, 0.0, confidence)
    with pytest.raises(ValueError, match="confidence strictly"):
        audit_many_runs(scores, scores, delta=0.0, confidence=confidence)
    with pytest.raises(ValueError, match="confidence strictly"):
        audit_one_run(
            scores, included, guesses_in=1, guesses_out=1, delta=0.0, confidence=confidence
        )


def test_counts_that_cannot_be_are_refused() -> None:
    for hits, runs in ((-1, 10), (11, 10), (0, 0)):
        with pytest.raises(ValueError, match="counts must be"):
            counted(hits, 0, runs, 0.0, 0.9)
    for canaries, right in ((5, 6), (5, -1), (0, 0)):
        with pytest.raises(ValueError, match="right guesses, guesses and canaries"):
            p_value(canaries, right, 1.0, 0.0)
    for epsilon in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon must be"):
            p_value(5, 5, epsilon, 0.0)


def test_scores_that_cannot_be_are_refused() -> None:
    good = torch.arange(6.0)
    for bad in (torch.tensor([1.0]), torch.tensor([1.0, math.nan]), torch.zeros(2, 2)):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(ValueError, match="scores must be"):
                audit_many_runs(*pair, delta=0.0, confidence=0.9)
    included = torch.tensor([True] * 6)
    for scores, coins, message in (
        (good, included[:5], "one shape"),
        (good, included.long(), "one shape"),
        (good.reshape(2, 3), included.reshape(2, 3), "one shape"),
        (good.log(), included, "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            audit_one_run(scores, coins, guesses_in=1, guesses_out=1, delta=0.0, confidence=0.9)
    for guesses in ((0, 0), (-1, 2), (4, 3)):
        with pytest.raises(ValueError, match="guesses_in="):
            audit_one_run(
                good,
                included,
                guesses_in=guesses[0],
                guesses_out=guesses[1],
                delta=0.0,
                confidence=0.9,
            )


def test_steps_that_cannot_be_are_refused() -> None:
    def audit(num_steps: int, scores: Tensor) -> None:
        audit_steps(
            lambda step, included: scores,
            generator=SecureGenerator(),
            num_steps=num_steps,
            num_canaries=4,
            guesses_in=1,
            guesses_out=1,
            delta=0.0,
            confidence=0.9,
        )

    audit(1, torch.zeros(4))
    with pytest.raises(ValueError, match="num_steps"):
        audit(0, torch.zeros(4))
    for scores in (torch.zeros(3), torch.zeros(4, 4)):
        with pytest.raises(ValueError, match=r"step 0 needs scores \[4\]"):
            audit(1, scores)
    with pytest.raises(ValueError, match="finite"):
        audit(1, torch.full((4,), math.inf))
