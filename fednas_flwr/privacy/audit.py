"""Empirical lower bounds on epsilon: what an attack that worked proves about a mechanism.

Accounting says how much a mechanism may leak if it is built as booked; an audit attacks the built
one and shows, at a stated confidence, how much it does leak. A bound above the claim is a bug; one
below it proves nothing but that this attack was no better, and nothing at all where the largest
bound that so many runs or canaries could give is below the claim. Three kinds:

* many runs with and without one canary, :func:`audit_many_runs`: nearly tight, for tests;
* the same of few runs, :func:`gaussian_epsilon_lower_bound`, which assumes that noise is Gaussian;
* one run with many canaries, each included by a coin of its own, :func:`audit_steps`: for a real
  training. Weaker: a few canaries cannot show a large epsilon.

:func:`plan_one_run` and :func:`plan_many_runs` choose sizes by what can be shown.

Not for choosing noise, and no substitute for an accountant. Nothing here knows how a mechanism is
built; noise and coins come from the client's own generator.

Guarantee:
    Whatever the mechanism, a bound above the true epsilon at this ``delta`` comes out with
    probability at most ``1 - confidence``, over the runs' randomness and the coins. Neighbours
    differ by one canary, added or removed. Each bound by itself: whoever runs several audits and
    reports the largest must divide ``1 - confidence`` by their number.

Tensor suffix: M canaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor

from fednas_flwr.privacy.gdp import gaussian_epsilon
from fednas_flwr.privacy.noise import SecureGenerator

MARGIN = 0.3  # of epsilon, by which an audit should be able to show more than is claimed
SHOWN = 0.999  # probability with which half the noise should be refuted


@dataclass(frozen=True, eq=False)
class AuditResult:
    """Observations of a one-run audit, and conclusions from them.

    Args:
        scores: Score of each canary, float64 [M]; higher speaks for included.
        included: Which canaries were in, bool [M].
        guesses: int8 [M]: 1 for guessed in, -1 for guessed out, 0 for no guess.
        num_right: How many of the guesses were right.
        epsilon: Lower bound on epsilon at ``delta``; 0 says nothing.
        delta: As asked.
        confidence: The bound holds with at least this probability.
    """

    scores: Tensor
    included: Tensor
    guesses: Tensor
    num_right: int
    epsilon: float
    delta: float
    confidence: float

    @property
    def num_guesses(self) -> int:
        """Number of canaries were guessed, rightly or wrongly."""
        return int(self.guesses.count_nonzero())


def epsilon_lower_bound(
    *,
    true_positives: int,
    false_negatives: int,
    false_positives: int,
    true_negatives: int,
    delta: float,
    confidence: float,
) -> float:
    """Return a lower confidence bound on epsilon from a test that tells two worlds apart.

    ``max(0, log((t - delta) / f), log((1 - f - delta) / (1 - t)))``: under (epsilon, delta)-DP any
    test has ``TPR <= e^epsilon FPR + delta`` and ``TNR <= e^epsilon FNR + delta`` (Kairouz, Oh and
    Viswanath 2015, arXiv 1311.0776, section 2; for audits Jagielski, Ullman and Oprea 2020, arXiv
    2006.07709). Here t is Clopper and Pearson's (1934) lower limit of the true positive
    rate and f their upper limit of the false positive rate, each wrong with probability at most
    ``(1 - confidence) / 2``. Both inequalities use the same two limits, so that all of it holds
    together with probability at least ``confidence``.

    Args:
        true_positives: Runs with the canary that the test called "in".
        false_negatives: Runs with the canary that it called "out".
        false_positives: Runs without the canary that it called "in".
        true_negatives: Runs without the canary that it called "out".
        delta: At least 0 and below 1.
        confidence: Strictly between 0 and 1.

    Returns:
        A finite number, at least 0. A test that is worse than guessing gives 0: turn it round
        before counting, not after.

    Raises:
        ValueError: A count is negative, a world has no run, or delta or confidence is out of range.

    Guarantee: the runs must be independent, and the test fixed before they are counted.

    Example:
        >>> bound = epsilon_lower_bound(
        ...     true_positives=900, false_negatives=100, false_positives=100, true_negatives=900,
        ...     delta=0.0, confidence=0.95,
        ... )
        >>> bound < math.log(9)
        True
        >>> round(bound, 2)
        1.99
    """
    _check(delta, confidence)
    counts = (true_positives, false_negatives, false_positives, true_negatives)
    positives, negatives = true_positives + false_negatives, false_positives + true_negatives
    if min(counts) < 0 or positives == 0 or negatives == 0:
        raise ValueError(f"counts must be at least 0, with a run in each world, got {counts}.")
    bounds = _epsilon_bounds(
        np.array([true_positives]),
        positives,
        np.array([false_positives]),
        negatives,
        delta=delta,
        confidence=confidence,
    )
    return float(bounds[0])


def gaussian_epsilon_lower_bound(
    *,
    true_positives: int,
    false_negatives: int,
    false_positives: int,
    true_negatives: int,
    delta: float,
    confidence: float,
) -> float:
    """Return a lower bound on epsilon that **assumes Gaussian noise**.

    If the two worlds are N(0, 1) and N(mu, 1), then ``mu >= Phi^-1(t) - Phi^-1(f)`` for the rates
    of any test (Dong, Roth and Su 2019, arXiv 1905.02383), and mu gives epsilon exactly. With t and
    f as in :func:`epsilon_lower_bound`: Nasr et al. (2023), arXiv 2302.07956, section 5.3. Of some
    hundred runs it shows nearly all of an epsilon that the bound for any mechanism cannot show of
    millions, since it knows the tails that no run has reached.

    A bound above the claim refutes what is claimed whichever way: the noise is not Gaussian, or
    there is too little of it. One below says nothing of mechanisms with other noise.

    Args:
        true_positives: As of :func:`epsilon_lower_bound`, and so are all others.
        false_negatives: Runs with the canary that the test called "out".
        false_positives: Runs without the canary that it called "in".
        true_negatives: Runs without the canary that it called "out".
        delta: Above 0 and below 1.
        confidence: Strictly between 0 and 1.

    Raises:
        ValueError: As of :func:`epsilon_lower_bound`, or delta is 0.

    Example:
        >>> bound = gaussian_epsilon_lower_bound(
        ...     true_positives=900, false_negatives=100, false_positives=100, true_negatives=900,
        ...     delta=1e-5, confidence=0.95,
        ... )
        >>> round(bound, 1)  # of the 13.6 that mu = 2.56 has
        12.2
    """
    _check(delta, confidence)
    counts = (true_positives, false_negatives, false_positives, true_negatives)
    positives, negatives = true_positives + false_negatives, false_positives + true_negatives
    if delta == 0 or min(counts) < 0 or positives == 0 or negatives == 0:
        raise ValueError(
            f"delta must be above 0 and counts at least 0, with a run in each world, got "
            f"delta={delta!r} and {counts}."
        )
    low, high = _rate_limits(
        np.array([true_positives]),
        positives,
        np.array([false_positives]),
        negatives,
        confidence=confidence,
    )
    mu = float(stats.norm.ppf(low[0]) - stats.norm.ppf(high[0]))
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def audit_many_runs(present: Tensor, absent: Tensor, *, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon from scores of many runs with and without one canary.

    The test is ``score >= threshold``. The first half of the runs of each world chooses the
    threshold that would give the largest bound, the other half alone is counted; a threshold chosen
    on the runs that are counted would make the confidence wrong.

    Args:
        present: Scores of runs with the canary, 1-dimensional, in the order of the runs.
        absent: Scores of runs without it; another length is allowed.
        delta: At least 0 and below 1.
        confidence: Strictly between 0 and 1.

    Returns:
        The bound of :func:`epsilon_lower_bound`. With n runs counted in each world it is at most
        about ``log(n / log(2 / (1 - confidence)))``.

    Raises:
        ValueError: Fewer than two scores in a world, one that is not finite, or delta or confidence
            is out of range.

    Guarantee: runs are independent and each world's are alike; the score uses nothing of the world.
    """
    _check(delta, confidence)
    choosing, counted = [], []
    for scores in (present, absent):
        if scores.dim() != 1 or len(scores) < 2 or not bool(scores.isfinite().all()):
            shape = tuple(scores.shape)
            raise ValueError(f"scores must be two or more finite numbers in a row, got {shape}.")
        values = scores.detach().double().cpu().numpy()
        choosing.append(np.sort(values[: len(values) // 2]))
        counted.append(values[len(values) // 2 :])
    thresholds = np.unique(np.concatenate(choosing))
    true_positives, false_positives = (
        len(values) - np.searchsorted(values, thresholds) for values in choosing
    )
    bounds = _epsilon_bounds(
        true_positives,
        len(choosing[0]),
        false_positives,
        len(choosing[1]),
        delta=delta,
        confidence=confidence,
    )
    threshold = thresholds[bounds.argmax()]
    hits, alarms = (int((values >= threshold).sum()) for values in counted)
    return epsilon_lower_bound(
        true_positives=hits,
        false_negatives=len(counted[0]) - hits,
        false_positives=alarms,
        true_negatives=len(counted[1]) - alarms,
        delta=delta,
        confidence=confidence,
    )


def one_run_p_value(
    *, num_canaries: int, num_guesses: int, num_right: int, epsilon: float, delta: float
) -> float:
    """Return a bound on the probability that (epsilon, delta)-DP leaves so many guesses right.

    With W binomial of ``num_guesses`` trials at ``e^epsilon / (e^epsilon + 1)``, v right guesses
    and m canaries, ``max over i = 1..v of P(W >= v) + 2 m delta P(v > W >= v - i) / i``: Steinke,
    Nasr and Jagielski (2023), arXiv 2305.08846, Theorem 5.2 in the form of Corollary 5.4 (guesses
    with abstentions) and Appendix D. It does not fall as epsilon grows, so the epsilons that it
    rules out are an interval from 0: each term is the mean of a function of W that is 0 below
    v - i, one constant up to v and 1 from there, and W grows with epsilon. Where the constant is at
    most 1 the function does not fall; where it is above 1 the mean rises, and falls at most from
    above 1 back to 1, which the cut at 1 hides.

    Args:
        num_canaries: m; each is included by a fair coin of its own.
        num_guesses: How many of them are guessed, a number fixed before the run.
        num_right: v, of the guesses.
        epsilon: At least 0.
        delta: At least 0 and below 1.

    Raises:
        ValueError: Not ``0 <= num_right <= num_guesses <= num_canaries``, or epsilon or delta is
            out of range.
    """
    _check(delta)
    _check_counts(num_canaries, num_guesses, num_right)
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon!r}.")
    if num_right == 0:
        return 1.0
    right = 1 / (1 + math.exp(-epsilon))  # of randomised response
    tail = float(stats.binom.sf(num_right - 1, num_guesses, right))  # P(W >= v)
    if delta == 0:
        return tail
    extra = np.arange(1, num_right + 1)
    share = 2 * num_canaries * delta / extra
    tails = stats.binom.sf(num_right - 1 - extra, num_guesses, right)
    return min(1.0, float((tail + share * (tails - tail)).max()))


def one_run_epsilon(
    *, num_canaries: int, num_guesses: int, num_right: int, delta: float, confidence: float
) -> float:
    """Return the largest epsilon that so many right guesses rule out: a lower confidence bound.

    The end, found by bisection to 1e-7 and rounded down, of the epsilons at which
    :func:`one_run_p_value` is below ``1 - confidence`` (Steinke et al. 2023, Lemma 4.7 and
    Appendix D).

    Args:
        num_canaries: As of :func:`one_run_p_value`.
        num_guesses: As of :func:`one_run_p_value`.
        num_right: As of :func:`one_run_p_value`.
        delta: At least 0 and below 1. The bound is 0 unless
            ``num_canaries * delta`` is well below ``(1 - confidence) * num_guesses / 2``.
        confidence: Strictly between 0 and 1.

    Returns:
        A finite number, at least 0. All of r guesses right at delta 0 give ``log(q / (1 - q))``
        for ``q = (1 - confidence)^(1 / r)``, about ``log(r / log(1 / (1 - confidence)))``.

    Raises:
        ValueError: As for :func:`one_run_p_value`, or confidence is out of range.

    Example:
        >>> bound = one_run_epsilon(
        ...     num_canaries=1000, num_guesses=100, num_right=75, delta=1e-4, confidence=0.95
        ... )
        >>> round(bound, 3)  # Appendix D
        0.673
    """
    _check(delta, confidence)

    def ruled_out(epsilon: float) -> bool:
        p_value = one_run_p_value(
            num_canaries=num_canaries,
            num_guesses=num_guesses,
            num_right=num_right,
            epsilon=epsilon,
            delta=delta,
        )
        return p_value < 1 - confidence

    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while ruled_out(high):  # ends by 40, where the binomial's rate rounds to 1
        low, high = high, 2 * high
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low


def audit_one_run(
    scores: Tensor,
    included: Tensor,
    *,
    guesses_in: int,
    guesses_out: int,
    delta: float,
    confidence: float,
) -> AuditResult:
    """Return what the scores of one run's canaries prove: guess both ends, abstain in the middle.

    Steinke et al. (2023), arXiv 2305.08846, Algorithm 1: the ``k+ = guesses_in`` highest scores are
    guessed in, the ``k- = guesses_out`` lowest out. Equal scores are ordered by their place.

    Args:
        scores: Score of each canary [M]; higher speaks for included.
        included: What the coins said, bool [M].
        guesses_in: At least 0.
        guesses_out: At least 0; together at least 1 and at most M.
        delta: At least 0 and below 1.
        confidence: Strictly between 0 and 1.

    Raises:
        ValueError: Shapes differ, ``included`` is not bool, a score is not finite, or a number is
            out of range.

    Guarantee: see the head of this module. It needs coins that are fair, independent and used for
    nothing but inclusion; numbers of guesses fixed before the scores are seen (the best of several
    pairs of them is several audits); and scores from what the mechanism released, never from
    ``included``.
    """
    num_canaries = len(scores) if scores.dim() == 1 else 0
    if included.shape != (num_canaries,) or included.dtype != torch.bool:
        raise ValueError(
            f"scores and included (bool) must have one shape [M], got {tuple(scores.shape)} and "
            f"{tuple(included.shape)} of {included.dtype}."
        )
    if not bool(scores.isfinite().all()):
        raise ValueError("scores must be finite.")
    _check_guesses(num_canaries, guesses_in, guesses_out)
    scores, included = scores.detach().to("cpu", torch.float64), included.cpu()
    order = scores.argsort(descending=True, stable=True)
    guesses = torch.zeros(num_canaries, dtype=torch.int8)
    guesses[order[:guesses_in]] = 1
    guesses[order[num_canaries - guesses_out :]] = -1
    truth = 2 * included.to(torch.int8) - 1
    num_right = int((guesses == truth).sum())
    return AuditResult(
        scores=scores,
        included=included,
        guesses=guesses,
        num_right=num_right,
        epsilon=one_run_epsilon(
            num_canaries=num_canaries,
            num_guesses=guesses_in + guesses_out,
            num_right=num_right,
            delta=delta,
            confidence=confidence,
        ),
        delta=delta,
        confidence=confidence,
    )


def audit_steps(
    step_scores: Callable[[int, Tensor], Tensor],
    *,
    generator: SecureGenerator,
    num_steps: int,
    num_canaries: int,
    guesses_in: int,
    guesses_out: int,
    delta: float,
    confidence: float,
) -> AuditResult:
    """Audit a whole run by canaries: toss coins, watch every release, guess, and bound epsilon.

    A canary's score is the sum of its scores in all steps: best ``<release, its gradient>``, as in
    the white-box audit of Steinke et al. (2023), arXiv 2305.08846: the server's view, with every
    release seen. The mechanism is abstract, so that the real path of a client can be put in its
    place.

    The score is good where canaries are orthogonal to each other and to the records' own gradients,
    and have gradients of one norm, best the clipping norm; elsewhere the bound is still valid, but
    lower. With n canaries in few dimensions each is noise to the others.

    Args:
        step_scores: Called with the step (0, 1, ...) and which canaries are included (bool [M], the
            same in every step), by which it may choose the records of the mechanism and nothing
            else; returns every canary's score of the step's release [M].
        generator: Tosses the coins.
        num_steps: At least 1.
        num_canaries: M, at least 1.
        guesses_in: As of :func:`audit_one_run`.
        guesses_out: As of :func:`audit_one_run`.
        delta: At least 0 and below 1; that of the claim.
        confidence: Strictly between 0 and 1.

    Returns:
        The result, whose epsilon is to be compared with the claim for all steps together.

    Raises:
        ValueError: A number is out of range (before the first release), a shape is not as said, or
            a value is not finite.

    Guarantee: that of :func:`audit_one_run`.
    """
    _check(delta, confidence)
    _check_guesses(num_canaries, guesses_in, guesses_out)
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps!r}.")
    included = generator.poisson_mask(num_canaries, probability=0.5)
    scores = torch.zeros(num_canaries, dtype=torch.float64)
    for step in range(num_steps):
        added = step_scores(step, included.clone()).detach().to("cpu", torch.float64)
        if added.shape != (num_canaries,):
            raise ValueError(
                f"step {step} needs scores [{num_canaries}], got {tuple(added.shape)}."
            )
        scores += added
    return audit_one_run(
        scores,
        included,
        guesses_in=guesses_in,
        guesses_out=guesses_out,
        delta=delta,
        confidence=confidence,
    )


@dataclass(frozen=True)
class OneRunPlan:
    """Sizes of an audit of one run by canaries.

    Attributes:
        num_steps: Releases of the run.
        num_canaries: M.
        guesses_in: Of :func:`audit_one_run`.
        guesses_out: Of :func:`audit_one_run`.
        largest: The bound if all guesses are right, which no run can exceed.
    """

    num_steps: int
    num_canaries: int
    guesses_in: int
    guesses_out: int
    largest: float


def plan_one_run(
    claim: Callable[[int], float],
    *,
    sample_rate: float,
    most_steps: int,
    most_canaries: int,
    delta: float,
    confidence: float,
) -> OneRunPlan:
    """Return the longest audit of one run that can show more than is claimed.

    Guesses are so many that without any noise all of them are right, in 98 of 100 runs at least:
    a canary is then seen if a batch has drawn it. Absence is guessed only if all are drawn. More
    steps claim more and draw more; steps are halved until as few canaries as will do, in powers of
    2, can show ``MARGIN`` more than is claimed. If none can, the plan is the best one of 1 step.

    Args:
        claim: The epsilon at ``delta`` that is claimed of a number of steps.
        sample_rate: Of each record in each step; the canaries share it.
        most_steps: At least 1.
        most_canaries: At least 64. More than some ``(1 - confidence) / delta`` show less.
        delta: That of the claim.
        confidence: Strictly between 0 and 1.
    """

    def plan(steps: int, canaries: int) -> OneRunPlan:
        drawn = 1 - (1 - sample_rate) ** steps
        guesses_in = int(stats.binom.ppf(0.005, canaries, drawn / 2))
        guesses_out = guesses_in if sample_rate == 1 else 0
        number = guesses_in + guesses_out
        largest = 0.0
        if number:
            largest = one_run_epsilon(
                num_canaries=canaries,
                num_guesses=number,
                num_right=number,
                delta=delta,
                confidence=confidence,
            )
        return OneRunPlan(steps, canaries, max(guesses_in, 1), guesses_out, largest)

    steps = most_steps
    while True:
        plans = [plan(steps, 2**power) for power in range(6, most_canaries.bit_length())]
        needed = claim(steps) + MARGIN
        enough = [plan for plan in plans if plan.largest >= needed]
        if enough:
            return enough[0]
        if steps == 1:
            return max(plans, key=lambda plan: plan.largest)
        steps //= 2


@dataclass(frozen=True)
class ManyRunsPlan:
    """Size of an audit of many single releases with and without one canary.

    Attributes:
        runs_per_world: Releases with the canary, and as many without.
        largest: The largest bound that they can give: with all answers right.
        shows_half: Whether half the noise, or twice the sensitivity, is refuted with probability
            ``SHOWN``.
    """

    runs_per_world: int
    largest: float
    shows_half: bool


def plan_many_runs(
    *, noise_multiplier: float, most_runs: int, delta: float, confidence: float
) -> ManyRunsPlan:
    """Return the least number of releases with which half the noise is refuted, if it is allowed.

    By :func:`gaussian_epsilon_lower_bound`, with the threshold half-way between the worlds. Half
    the noise moves it as many standard deviations away from both means as a whole world is
    from the other now. A sum that is clipped in place of its records, which a canary turns round,
    leaves it where it is from one mean and moves the other away by three times as much.

    Args:
        noise_multiplier: s, as claimed; the worlds are 1 / s standard deviations apart.
        most_runs: Of both worlds together, at least 200.
        delta: That of the claim.
        confidence: Strictly between 0 and 1.
    """
    apart = 1 / noise_multiplier

    def shows(runs: int, margins: tuple[float, float]) -> bool:
        """True if a client is refuted whose means lie so many ``apart`` from the threshold."""
        counts = np.arange(runs + 1)
        low, high = (
            stats.norm.ppf(limit)
            for limit in _rate_limits(counts, runs, counts, runs, confidence=confidence)
        )
        # With so many hits, fewer alarms than this refute.
        alarms = np.searchsorted(high, low - 1.001 * apart)
        hits = stats.binom.pmf(counts, runs, stats.norm.cdf(margins[0] * apart))
        rate = stats.norm.sf(margins[1] * apart)
        return bool(hits @ stats.binom.cdf(alarms - 1, runs, rate) > SHOWN)

    runs = 100
    while True:
        shows_half = shows(runs, (1.0, 1.0)) and shows(runs, (1.5, 0.5))
        if shows_half or runs == most_runs // 2:
            largest = gaussian_epsilon_lower_bound(
                true_positives=runs,
                false_negatives=0,
                false_positives=0,
                true_negatives=runs,
                delta=delta,
                confidence=confidence,
            )
            return ManyRunsPlan(runs, largest, shows_half)
        runs = min(math.ceil(1.1 * runs), most_runs // 2)


def _epsilon_bounds(
    true_positives: np.ndarray,
    num_positives: int,
    false_positives: np.ndarray,
    num_negatives: int,
    *,
    delta: float,
    confidence: float,
) -> np.ndarray:
    """Return the bound of :func:`epsilon_lower_bound` for arrays of counts."""
    low, high = _rate_limits(
        true_positives, num_positives, false_positives, num_negatives, confidence=confidence
    )
    ratio = np.maximum((low - delta) / high, (1 - high - delta) / (1 - low))
    bounds: np.ndarray = np.log(np.maximum(ratio, 1.0))
    return bounds


def _rate_limits(
    true_positives: np.ndarray,
    num_positives: int,
    false_positives: np.ndarray,
    num_negatives: int,
    *,
    confidence: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return Clopper and Pearson's limits: the true positive rate's lower, the false one's upper.

    Both hold together with probability ``confidence``. By quantiles of beta distributions, with
    their ends set by hand.
    """
    miss = (1 - confidence) / 2
    least = np.maximum(true_positives, 1)
    low = stats.beta.ppf(miss, least, num_positives - least + 1)
    low = np.where(true_positives == 0, 0.0, low)
    most = np.minimum(false_positives, num_negatives - 1)
    high = stats.beta.isf(miss, most + 1, num_negatives - most)
    return low, np.where(false_positives == num_negatives, 1.0, high)


def _check(delta: float, confidence: float = 0.5) -> None:
    """Raise ``ValueError`` unless delta lies in [0, 1) and confidence strictly between 0 and 1."""
    if not (0 <= delta < 1 and 0 < confidence < 1):
        raise ValueError(
            f"delta must lie in [0, 1) and confidence strictly between 0 and 1, got "
            f"delta={delta!r} and confidence={confidence!r}."
        )


def _check_counts(num_canaries: int, num_guesses: int, num_right: int) -> None:
    """Raise ``ValueError`` unless the counts of a one-run audit can be."""
    if not (0 <= num_right <= num_guesses <= num_canaries and num_canaries > 0):
        raise ValueError(
            f"right guesses, guesses and canaries must be numbers from 0 up in this order, got "
            f"{num_right!r}, {num_guesses!r} and {num_canaries!r}."
        )


def _check_guesses(num_canaries: int, guesses_in: int, guesses_out: int) -> None:
    """Raise ``ValueError`` unless there is a guess, and no more guesses than canaries."""
    if min(guesses_in, guesses_out) < 0 or not 1 <= guesses_in + guesses_out <= num_canaries:
        raise ValueError(
            f"guesses_in={guesses_in!r} and guesses_out={guesses_out!r} must be at least 0, "
            f"together from 1 to the number of canaries, {num_canaries!r}."
        )
