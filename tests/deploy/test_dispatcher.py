"""Who is dealt which messages: nobody idle, clients where they were, handfuls of short ones."""

from __future__ import annotations

from random import Random

import pytest
from flwr.app import Message, RecordDict

from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.grids import AHEAD, SHARE, SHORT_S, Dispatcher

SHORT, LONG = "query.short", "train.long"
SECONDS = {SHORT: SHORT_S / 4.5, LONG: SHORT_S * 4}


@pytest.fixture(scope="module", autouse=True)
def _task() -> None:
    flower_patches.begin_task(1)  # Flower makes no message before


def message(message_id: int, client: int, action: str = SHORT) -> Message:
    made = Message(RecordDict(), client, action)
    flower_patches.set_message_id(made, str(message_id))
    return made


def dispatcher(workers: int, messages: list[Message]) -> Dispatcher:
    made = Dispatcher()
    for worker in range(workers):
        made.join(worker)
    for one in messages:
        made.queue(one)
    return made


def named(dealt: list[tuple[int, list[Message]]]) -> list[tuple[int, list[int]]]:
    """Return worker and clients of what was dealt."""
    return [(worker, [one.metadata.dst_node_id for one in held]) for worker, held in dealt]


def warm(made: Dispatcher, action: str) -> None:
    """Have every worker that is idle answer messages, so that it is known how long these take."""
    for worker, held in made.deal():
        made.finish(worker, [SECONDS[action]] * len(held))


def test_a_client_goes_back_to_its_worker_if_that_is_free() -> None:
    made = dispatcher(2, [message(1, 11, LONG), message(2, 12, LONG)])
    assert named(made.deal()) == [(0, [11]), (1, [12])]
    for worker in (0, 1):
        made.finish(worker, [SECONDS[LONG]])
    for number, client in enumerate((12, 13, 11), start=3):
        made.queue(message(number, client, LONG))
    assert named(made.deal()) == [(0, [11]), (1, [12])]  # 13, whom nobody knows, waits
    made.finish(1, [SECONDS[LONG]])
    assert named(made.deal()) == [(1, [13])]


def test_no_client_waits_for_its_worker_while_another_is_idle() -> None:
    made = dispatcher(2, [message(1, 11), message(2, 12)])
    warm(made, SHORT)
    for number, client in enumerate((11, 11, 11, 11, 11), start=3):
        made.queue(message(number, client))
    # one each, and only then the others, to their own
    assert named(made.deal()) == [(0, [11, 11]), (1, [11, 11])]


def test_short_messages_are_handed_out_together_and_long_ones_are_not() -> None:
    for action, held in ((SHORT, 4), (LONG, 1)):
        made = dispatcher(2, [message(n, n, action) for n in range(18)])
        assert [len(ids) for _, ids in named(made.deal())] == [1, 1]  # nobody knows yet
        for worker in (0, 1):
            made.finish(worker, [SECONDS[action]])
        assert [len(ids) for _, ids in named(made.deal())] == [held, held]
        assert made.deal() == []


def test_a_worker_is_handed_no_more_than_its_share_of_the_queue() -> None:
    made = dispatcher(2, [message(1, 1), message(2, 2)])
    warm(made, SHORT)
    for number in range(3, 3 + 2 * SHARE + 1):
        made.queue(message(number, number))
    dealt = made.deal()
    assert [len(held) for _, held in dealt] == [2, 2]
    for worker, held in dealt:
        made.finish(worker, [SECONDS[SHORT]] * len(held))
    assert named(made.deal()) == [(0, [2 * SHARE + 3])]  # the last one, not two


def test_no_short_message_goes_with_a_long_one() -> None:
    made = dispatcher(1, [message(1, 1, LONG), message(2, 2, SHORT)])
    warm(made, LONG)
    warm(made, SHORT)
    for number, action in enumerate([LONG, SHORT, SHORT, LONG, SHORT, SHORT], start=3):
        made.queue(message(number, number, action))
    assert named(made.deal()) == [(0, [3])]
    made.finish(0, [SECONDS[LONG]])
    assert named(made.deal()) == [(0, [4, 5, 7])]  # short ones, beyond a long one


def test_messages_leave_the_queue_nearly_in_order() -> None:
    made = dispatcher(2, [message(1, 1, LONG), message(2, 2, LONG)])
    warm(made, LONG)
    far = AHEAD * 2
    for number in range(far):
        made.queue(message(10 + number, 100 + number, LONG))
    made.queue(message(50, 1, LONG))
    assert named(made.deal()) == [(0, [100]), (1, [101])]


def test_what_a_dead_worker_held_is_lost_and_nothing_else() -> None:
    made = dispatcher(2, [message(1, 1), message(2, 2)])
    warm(made, SHORT)
    for number in range(3, 11):
        made.queue(message(number, number))
    assert named(made.deal()) == [(0, [3, 5]), (1, [4, 6])]
    assert [one.metadata.message_id for one in made.lose(0)] == ["3", "5"]
    made.finish(1, [SECONDS[SHORT]] * 2)
    assert named(made.deal()) == [(1, [7, 8])]
    for last in ("9", "10"):
        first = made.give_up()
        assert first is not None
        assert first.metadata.message_id == last
    assert made.give_up() is None


@pytest.mark.parametrize("seed", range(50))
def test_every_message_is_answered_or_lost_once_and_nobody_is_idle_before(seed: int) -> None:
    rng = Random(seed)
    actions = rng.choices([SHORT, LONG], k=60)
    waiting = [message(n, rng.randrange(2, 10), action) for n, action in enumerate(actions)]
    made, ended, queued = dispatcher(3, []), list[int](), 0
    held: dict[int, list[int]] = {worker: [] for worker in range(3)}  # of the living
    while len(ended) < len(actions):
        for _ in range(rng.randint(0, len(waiting))):
            made.queue(waiting.pop(0))
            queued += 1
        for worker, dealt in made.deal():
            assert not held[worker]
            held[worker] = [int(one.metadata.message_id) for one in dealt]
            queued -= len(dealt)
        assert not queued or all(held.values())
        several = [ids for ids in held.values() if len(ids) > 1]
        assert all({actions[i] for i in ids} == {SHORT} for ids in several)
        assert all(sum(SECONDS[actions[i]] for i in ids) <= SHORT_S for ids in several)
        for worker in [worker for worker, ids in held.items() if ids]:
            event = rng.choice(["works on", "answers", "answers", "dies"])
            if event == "answers":
                done = made.finish(worker, [SECONDS[actions[i]] for i in held[worker]])
            elif event == "dies":
                done = made.lose(worker)
            else:
                continue
            assert [int(one.metadata.message_id) for one in done] == held[worker]
            ended += held[worker]
            held[worker] = []
            if event == "dies":
                del held[worker]
                held[max([worker, *held]) + 1] = []
                made.join(max(held))
    assert sorted(ended) == list(range(len(actions)))
