"""Who is dealt which message: nobody idle, clients where they were, short ones ahead, none lost."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from flwr.app import Message, RecordDict

from fednas_flwr.federation import flower
from fednas_flwr.federation.dealer import AHEAD, SHORT_S, Dealer

SHORT, LONG = "query.short", "train.long"
SECONDS = {SHORT: SHORT_S / 4, LONG: SHORT_S * 4}


@pytest.fixture(scope="module", autouse=True)
def _task() -> None:
    flower.begin_task(1)  # Flower makes no message before


def message(message_id: int, client: int, verb: str = SHORT) -> Message:
    made = Message(RecordDict(), client, verb)
    flower.set_message_id(made, str(message_id))
    return made


def dealer(workers: int, messages: list[Message]) -> Dealer:
    made = Dealer()
    for worker in range(workers):
        made.join(worker)
    for one in messages:
        made.queue(one)
    return made


def named(dealt: list[tuple[int, Message]]) -> list[tuple[int, int]]:
    """Return worker and client of what was dealt."""
    return [(worker, one.metadata.dst_node_id) for worker, one in dealt]


def warm(made: Dealer, verb: str) -> None:
    """Have every worker that is idle answer a message, so that it is known how long that takes."""
    for worker, _ in made.deal():
        made.finish(worker, SECONDS[verb])


def test_a_client_goes_back_to_its_worker_if_that_is_free() -> None:
    made = dealer(2, [message(1, 11, LONG), message(2, 12, LONG)])
    assert named(made.deal()) == [(0, 11), (1, 12)]
    for worker in (0, 1):
        made.finish(worker, SECONDS[LONG])
    for number, client in enumerate((12, 13, 11), start=3):
        made.queue(message(number, client, LONG))
    assert named(made.deal()) == [(0, 11), (1, 12)]  # 13, whom nobody knows, waits
    made.finish(1, SECONDS[LONG])
    assert named(made.deal()) == [(1, 13)]


def test_no_client_waits_for_its_worker_while_another_is_idle() -> None:
    made = dealer(2, [message(1, 11), message(2, 12)])
    warm(made, SHORT)
    for number, client in enumerate((11, 11, 11), start=3):
        made.queue(message(number, client))
    # one each, and only then the third, to its own
    assert named(made.deal()) == [(0, 11), (1, 11), (1, 11)]


def test_short_messages_are_handed_out_ahead_and_long_ones_are_not() -> None:
    for verb, held in ((SHORT, 2), (LONG, 1)):
        made = dealer(2, [message(n, n, verb) for n in range(10)])
        assert Counter(worker for worker, _ in made.deal()) == {0: 1, 1: 1}  # nobody knows yet
        for worker in (0, 1):
            made.finish(worker, SECONDS[verb])
        assert Counter(worker for worker, _ in made.deal()) == {0: held, 1: held}


def test_no_short_message_is_put_behind_a_long_one() -> None:
    made = dealer(1, [message(1, 1, LONG), message(2, 2, SHORT)])
    warm(made, LONG)
    warm(made, SHORT)
    made.queue(message(3, 1, LONG))
    made.queue(message(4, 2, SHORT))
    assert named(made.deal()) == [(0, 1)]
    made.finish(0, SECONDS[LONG])
    made.queue(message(5, 1, LONG))
    made.queue(message(6, 2, SHORT))
    assert named(made.deal()) == [(0, 2), (0, 2)]  # short ones, beyond a long one


def test_messages_leave_the_queue_nearly_in_order() -> None:
    made = dealer(2, [message(1, 1, LONG), message(2, 2, LONG)])
    warm(made, LONG)
    far = AHEAD * 2
    for number in range(far):
        made.queue(message(10 + number, 100 + number, LONG))
    made.queue(message(50, 1, LONG))
    assert named(made.deal()) == [(0, 100), (1, 101)]


def test_what_a_dead_worker_was_to_do_next_is_first_in_the_queue() -> None:
    made = dealer(2, [message(1, 1), message(2, 2)])
    warm(made, SHORT)
    for number in range(3, 8):
        made.queue(message(number, number))
    assert named(made.deal()) == [(0, 3), (1, 4), (0, 5), (1, 6)]
    assert made.lose(0).metadata.message_id == "3"
    made.finish(1, SECONDS[SHORT])
    assert named(made.deal()) == [(1, 5)]
    first = made.give_up()
    assert first is not None
    assert first.metadata.message_id == "7"
    assert made.give_up() is None


@pytest.mark.parametrize("seed", range(50))
def test_every_message_is_answered_or_lost_once_and_nobody_is_idle_before(seed: int) -> None:
    rng = Random(seed)
    verbs = rng.choices([SHORT, LONG], k=30)
    waiting = [message(n, rng.randrange(2, 10), verb) for n, verb in enumerate(verbs)]
    made, ended, queued = dealer(3, []), list[int](), 0
    held: dict[int, list[int]] = {worker: [] for worker in range(3)}  # of the living
    while len(ended) < len(verbs):
        for _ in range(rng.randint(0, len(waiting))):
            made.queue(waiting.pop(0))
            queued += 1
        for worker, one in made.deal():
            held[worker].append(int(one.metadata.message_id))
            queued -= 1
        assert set(made.running) == {worker for worker, ids in held.items() if ids}
        assert not queued or all(held.values())
        ahead = [ids for ids in held.values() if len(ids) > 1]
        assert all(len(ids) == 2 and {verbs[i] for i in ids} == {SHORT} for ids in ahead)
        for worker in list(made.running):
            event = rng.choice(["works on", "answers", "answers", "dies"])
            if event == "answers":
                ended.append(held[worker].pop(0))
                answered = made.finish(worker, SECONDS[verbs[ended[-1]]])
                assert answered.metadata.message_id == str(ended[-1])
            elif event == "dies":
                first, *others = held.pop(worker)
                assert made.lose(worker).metadata.message_id == str(first)
                ended.append(first)
                queued += len(others)
                held[max([worker, *held]) + 1] = []
                made.join(max(held))
    assert sorted(ended) == list(range(len(verbs)))
