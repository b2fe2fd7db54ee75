"""Who is asked in a round: unbiased to the last fraction, and the same whenever it is asked."""

from collections import Counter
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.server.exchange import Participants, Sampling, midzuno
from fednas_flwr.settings.names import SAMPLINGS


def sampling(by="uniform", *, clients=20, per_round=5, backups=0, seed=1, sizes=None):
    sizes = {} if sizes is None else {"search": np.array(sizes)}
    return Sampling(seed, per_round, backups, by, sizes, clients)


@given(sizes=st.lists(st.integers(0, 6), min_size=2, max_size=4).filter(any), data=st.data())
def test_over_all_uniform_draws_the_average_by_size_is_that_over_all_clients(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    values = [Fraction(data.draw(st.integers(-9, 9))) for _ in sizes]
    drawn = Fraction(0)
    cases = [
        midzuno(np.array(sizes), np.array(order), record=record)[:count].tolist()
        for order in permutations(range(len(sizes)))
        for record in range(sum(sizes))
    ]
    for asked in cases:
        assert len(set(asked)) == count
        weight = sum(sizes[client] for client in asked)
        drawn += sum(sizes[client] * values[client] for client in asked) / Fraction(weight)
    whole = sum(size * value for size, value in zip(sizes, values, strict=True))
    assert drawn / len(cases) == whole / Fraction(sum(sizes))


def test_the_draws_of_a_run_are_those_whose_expectation_is_exact():
    """Over the seeds: the frequencies of clients are those of the design, within 6 sigma."""
    sizes, per_round, rounds = [1, 2, 3, 10, 4], 2, 5_000
    own = sampling(clients=5, per_round=per_round, sizes=sizes)
    total, asked, estimate = sum(sizes), Counter(), 0.0
    for number in range(1, rounds + 1):
        participants = own.participants("search", number)
        weights = {client: float(sizes[client]) for client in participants.clients}
        asked.update(participants.clients)
        estimate += sum(w * c for c, w in weights.items()) / sum(weights.values())
    mean = sum(size * client for client, size in enumerate(sizes)) / total
    assert abs(estimate / rounds - mean) < 6 * 1.5 / rounds**0.5
    for client, size in enumerate(sizes):
        share = size / total + (1 - size / total) * (per_round - 1) / 4
        assert abs(asked[client] / rounds - share) < 6 * 0.8 / rounds**0.5


@pytest.mark.parametrize("by", SAMPLINGS)
def test_who_is_asked_depends_on_seed_stage_and_round_alone(by):
    sizes = np.arange(1, 21)
    own = sampling(by, backups=3, sizes=sizes)
    rounds = [own.participants("search", number) for number in range(1, 31)]
    again = sampling(by, backups=3, sizes=sizes)
    assert [again.participants("search", number) for number in range(30, 0, -1)] == rounds[::-1]
    assert len({participants.clients for participants in rounds}) >= 4
    for participants in rounds:
        assert list(participants.clients) == sorted(set(participants.clients))
        assert set(participants.candidates) <= set(range(20))
        assert not set(participants.clients) & set(participants.backups)
        assert len(participants.backups) == 3
        assert len(participants.clients) == 5
    other = sampling(by, backups=3, sizes=sizes, seed=2)
    others = [other.participants("search", number) for number in range(1, 31)]
    assert others != rounds
    others = [own.participants("retrain", number).clients for number in range(1, 31)]
    assert others != [participants.clients for participants in rounds]


def test_round_robin_gives_all_clients_as_many_turns():
    own = sampling("round_robin", clients=10, per_round=4, backups=2)
    asked = Counter(c for number in range(1, 6) for c in own.participants("search", number).clients)
    assert asked == dict.fromkeys(range(10), 2)
    first, second = own.participants("search", 1), own.participants("search", 2)
    assert set(first.backups) < set(second.clients)


def test_who_stands_in_stays_for_the_round_and_others_are_asked_again():
    participants = Participants((1, 4, 6), (9, 2, 3))
    assert participants.after({1, 4, 6}) == participants
    assert participants.after({1, 2, 6}) == Participants((1, 2, 6), (9, 3))
    assert participants.after({6}) == participants
