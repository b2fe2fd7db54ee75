"""The one counter of what requests make a site write in a day."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import DayFullError
from fednas_flwr.privacy.books.anchor import MOST_BYTES, counter_of, take

from ..refusals import refuses

DAY = 86_400


@pytest.fixture
def counter(tmp_path):
    return counter_of(tmp_path / "ledger.key")


def test_a_day_takes_so_much_and_the_next_one_as_much_again(counter):
    assert MOST_BYTES == 256 * 2**20  # as policy.yaml says
    take(counter, MOST_BYTES - 10, now=5 * DAY)
    for _ in range(3):
        with pytest.raises(DayFullError, match="^refused: .*as it writes in a day .* tomorrow.$"):
            take(counter, 11, now=6 * DAY - 1)
    take(counter, 10, now=6 * DAY - 1)  # what is left can still be taken
    refuses("", take, counter, 1, now=6 * DAY - 1)
    day, used, refused = map(int, counter.read_text().split())
    assert (day, used, refused) == (5, MOST_BYTES, 4)
    take(counter, MOST_BYTES, now=6 * DAY)
    assert list(map(int, counter.read_text().split())) == [6, MOST_BYTES, 0]


def test_refusals_write_nothing_but_their_number(counter):
    take(counter, MOST_BYTES, now=0)
    before = sorted(counter.parent.iterdir()), counter.stat().st_size
    for _ in range(1000):
        refuses("", take, counter, 1, error=DayFullError, now=1)
    assert (sorted(counter.parent.iterdir()), counter.stat().st_size) == before
    assert counter.read_text().split()[2] == "1000"
    assert counter.stat().st_mode & 0o077 == 0


def test_what_says_that_it_is_spent_may_go_a_little_beyond(counter):
    take(counter, MOST_BYTES, now=0)
    take(counter, 60, now=0, beyond=100)
    refuses("", take, counter, 60, error=DayFullError, now=0, beyond=100)
    refuses("", take, counter, 1, error=DayFullError, now=0)


@pytest.mark.parametrize("text", ["", "5 6", "a b c", "0" * 500])
def test_a_counter_that_is_none_starts_anew(counter, text):
    take(counter, 1, now=0)
    counter.write_text(text)
    take(counter, 7, now=0)
    assert counter.read_bytes()[:55].split() == [b"0", b"7", b"0"]


@given(amounts=st.lists(st.integers(0, MOST_BYTES), max_size=20))
def test_no_sequence_takes_more_than_the_allowance(amounts, tmp_path_factory):
    counter, taken = counter_of(tmp_path_factory.mktemp("site") / "key"), 0
    for amount in amounts:
        try:
            take(counter, amount, now=0)
        except DayFullError:
            assert taken + amount > MOST_BYTES
        else:
            taken += amount
    assert taken <= MOST_BYTES


def test_threads_share_a_counter(counter):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: take(counter, 3, now=0), range(8 * 50)))
    assert counter.read_text().split()[1] == str(8 * 50 * 3)
