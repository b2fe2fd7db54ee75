"""The cohort over grids that reorder, repeat, withhold and lose messages."""

from collections import Counter
from dataclasses import asdict
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.data.records import Column
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.requests import Describe
from fednas_flwr.server.cohort import LONGEST_POLL_S, QuorumError
from fednas_flwr.server.exchange import Exchange, Participants, Sampling, midzuno
from fednas_flwr.settings.names import SAMPLINGS

from ..refusals import raising, refuses
from ..watched import noting
from .conftest import SEARCH, client_reply

FIRST_NODE = 2  # of client 0


class AllAtOnce(InProcessGrid):
    """Gives all replies at once, the last client's first, each of them twice."""

    def pull_messages(self, message_ids):
        replies = [m for i in message_ids for m in super(AllAtOnce, self).pull_messages([i])]
        return [reply for reply in reversed(replies) for _ in range(2)]


class Withholding(InProcessGrid):
    """Keeps the replies of ``withheld`` clients until ``released``, then gives all of them."""

    withheld: frozenset[int] = frozenset()
    released = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = []

    def pull_messages(self, message_ids):
        replies = []
        if self.released:
            replies, self.kept = self.kept, []
        for reply in [m for i in message_ids for m in InProcessGrid.pull_messages(self, [i])]:
            late = reply.metadata.src_node_id - FIRST_NODE in self.withheld and not self.released
            (self.kept if late else replies).append(reply)
        return replies


class Unreachable(InProcessGrid):
    """Cannot send to client 1, once it is connected."""

    connected = False

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        lost = FIRST_NODE + 1 if self.connected else None
        return [i for i, m in zip(ids, messages, strict=True) if m.metadata.dst_node_id != lost]


class Growing(InProcessGrid):
    """Its nodes appear one by one, each time somebody looks."""

    visible = 0

    def get_node_ids(self):
        self.visible += 1
        return list(super().get_node_ids())[: self.visible]


def left_out(federation, *connected):
    """Return the only event of a federation of whose clients all but one are connected."""
    assert federation.cohort.clients == [*connected]
    (event,) = federation.events
    return event


def train_losses(replies):
    return [(client, reply.metrics["train_loss"]) for client, reply in replies]


def test_a_client_that_does_not_say_what_is_needed_is_not_connected(federation):
    budget = {"budget": {"epsilon": 8.0, "delta": 1e-5}}
    said = {"properties": {0: budget, 2: budget}, "needed": ("client", "budget")}
    event = left_out(federation(3, **said), 0, 2)
    assert (event["client"], event["reason"]) == (1, "node 3: does not say its budget")


def test_replies_come_in_client_order_once_whatever_the_arrival(federation):
    unruly = federation(5, grid=AllAtOnce)
    assert unruly.cohort.clients == [0, 1, 2, 3, 4]
    assert train_losses(unruly.ask()) == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0), (4, 5.0)]
    assert unruly.events == []


def test_a_client_is_who_it_says_it_is_not_where_its_node_stands(federation):
    swapped = federation(3, claims={0: 2, 1: 0, 2: 1})
    assert train_losses(swapped.ask()) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    told = [properties["client"] for _, properties in sorted(swapped.cohort.properties.items())]
    assert told == [0, 1, 2]


def test_a_client_answers_only_when_the_reply_before_is_consumed(federation):
    order = []

    def noting(client):
        def note(content):
            order.append(f"answers {client}")
            return content

        return note

    for client, _ in federation(3, damage={client: noting(client) for client in range(3)}).ask():
        order.append(f"consumed {client}")
    assert order == [f"{what} {client}" for client in range(3) for what in ("answers", "consumed")]


def test_replies_are_looked_for_the_more_seldom_the_longer_none_has_come(federation):
    cohort = federation(3).cohort
    waits, waited_s = [], 0.0
    cohort.wait = waits.append
    for _ in range(100):
        waited_s += cohort.pause(waited_s)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.05, 1.0)
    assert sum(waits[:20]) <= 1.0 + 1e-9


def test_a_client_that_never_answers_is_dropped_at_the_deadline(federation, monkeypatch):
    forgotten = noting(monkeypatch, InProcessGrid, "forget", lambda _, grid, ids: len(ids))
    silent = federation(3, grid=Withholding, deadline_s=0.3)
    silent.grid.withheld = frozenset({1})
    assert silent.answering(4) == [0, 2]
    assert 0.3 <= silent.clock.seconds < 0.3 + LONGEST_POLL_S
    place = {"stage": "search", "round": 4, "action": "train.search"}
    failure = {"event": "client_failed", **place, "client": 1, "reason": "no reply within 0.3 s"}
    assert silent.events == [failure]
    assert forgotten == [1]


def test_a_late_reply_is_not_taken_for_the_next_exchange(federation):
    seen = []

    def count(content):
        seen.append(len(seen))
        return content

    late = federation(3, grid=Withholding, deadline_s=0.3, damage={1: count})
    late.grid.withheld = frozenset({1})
    assert late.answering(1) == [0, 2]
    assert len(late.grid.kept) == 1
    late.grid.released = True
    assert late.answering(2) == [0, 1, 2]
    assert late.grid.kept == []
    assert seen == [0, 1]
    assert [event["event"] for event in late.events] == ["client_failed", "client_back"]


fail_by_error = raising(RuntimeError("disk full"))


def test_exactly_the_quorum_is_enough(federation):
    for failing, quorum, enough in (([1, 3], 0.5, 2), ([0, 1, 3], 0.5, 0), ([2], 1.0, 0)):
        shaky = federation(4, damage=dict.fromkeys(failing, fail_by_error), quorum_share=quorum)
        if enough:
            assert len(shaky.answering()) == enough
        else:
            refuses("RuntimeError: disk full", list, shaky.ask(), error=QuorumError)
        assert [event["client"] for event in shaky.events] == failing


def test_a_client_that_stands_in_is_held_to_the_largest_share(federation):
    shaky = federation(4, damage={2: fail_by_error}, largest_share=0.5)
    shaky.cohort._max_examples[3] = 5000  # of 100 of the others
    replies = dict(shaky.ask(participants=Participants((0, 1, 2), (3,))))
    weights = {client: reply.num_examples for client, reply in replies.items()}
    assert weights == {0: 10.0, 1: 17.0, 3: pytest.approx(31 * 200 / 5000)}


def test_a_client_that_is_not_connected_is_missed_in_its_part(federation):
    whole = federation(4, nodes=3, connect_s=0.1)
    whole.cohort.predicts_numbers = True
    whole.cohort.declared[3] = {"train": 7}  # as of a run that was begun with it
    part = whole.cohort.part([1, 3], run="part", emit=lambda event, **fields: None)
    assert (part.clients, part.left, part.quorum) == ([1], {3: "it is not connected"}, 1)
    assert part.predicts_numbers
    assert part.declared == {1: {}, 3: {"train": 7}}
    alone = whole.cohort.part([3], run="part", emit=lambda event, **fields: None)
    exchange = Exchange("train.search", stage="search", settings=SEARCH)
    refuses("^client 3: it is not connected", list, alone.ask(exchange), error=QuorumError)


def test_a_sum_of_nobody_has_no_quorum(federation):
    empty = federation(2, secure_sum=True)
    for client in range(2):
        empty.cohort.dismiss(client, "gone", expelled=True)
    terms = {"batch_size": 8, "steps": 1, "max_grad_norm": 1.0, "noise_multiplier": 1.0}
    shared = PlannedRelease("search", "train.search", "weights", ("train",), **terms, shared=True)
    exchange = Exchange("train.search", stage="search", settings=SEARCH, releases=[shared])
    refuses("^client 0: gone", list, empty.cohort.ask(exchange), error=QuorumError)


def test_the_error_names_every_missing_client_with_its_reason(federation):
    terms = {"grid": Withholding, "deadline_s": 0.2, "quorum_share": 0.6}
    shaky = federation(3, damage={0: fail_by_error}, **terms)
    shaky.grid.withheld = frozenset({2})
    message = r"^client 0: RuntimeError: disk full \(train\.search in round 7: 1 of 3 clients "
    message += r"answered, 2 are needed; client 2: no reply within 0\.2 s\)$"
    refuses(message, list, shaky.ask(7), error=QuorumError)


FAILING = [([], [1, 4, 6]), ([4], [1, 6, 9]), ([1, 9], [4, 6, 2]), ([1, 4, 6, 9], [2, 3])]


@pytest.mark.parametrize(("failing", "answering"), FAILING)
def test_clients_that_fail_are_replaced_by_the_next_in_order(federation, failing, answering):
    shaky = federation(10, damage=dict.fromkeys(failing, fail_by_error), quorum_share=0.6)
    participants = Participants((1, 4, 6), (9, 2, 3))
    for _ in range(2):
        assert shaky.answering(participants=participants) == answering
    assert [e["client"] for e in shaky.named("client_failed")] == 2 * failing


def test_the_quorum_of_a_turn_is_one_of_its_clients(federation):
    shaky = federation(10, damage=dict.fromkeys([1, 4, 9], fail_by_error), quorum_share=0.6)
    shaky.cohort.names = {4: "charite"}
    replies = shaky.ask(participants=Participants((1, 4, 6), (9,)))
    told = refuses("1 of 3 clients answered, 2 are needed", list, replies, error=QuorumError)
    assert all(f"client {client}: RuntimeError" in told for client in ("1", "4 (charite)", "9"))
    shaky.cohort.dismiss(7, "it has left")
    assert [c for c, _ in shaky.ask(participants=Participants((6, 7), (8,)))] == [6, 8]


def test_a_request_that_cannot_be_sent_is_a_failure_at_once(federation):
    cut = federation(3, grid=Unreachable)
    cut.grid.connected = True
    assert cut.answering() == [0, 2]
    assert cut.events[0]["client"] == 1
    assert cut.events[0]["reason"] == "the request could not be sent"


def test_clients_may_appear_one_by_one(federation):
    assert federation(3, grid=Growing).cohort.clients == [0, 1, 2]


def test_a_missing_client_is_named_and_the_others_go_on(federation):
    short = federation(3, nodes=2, claims={1: 2}, connect_s=0.2)
    event = left_out(short, 0, 2)
    assert (event["stage"], event["action"]) == ("connect", "query.describe")
    assert event["client"] == 1
    assert event["reason"] == "only 2 nodes appeared"
    assert short.answering() == [0, 2]


def test_too_few_nodes_end_the_run_with_their_number(federation):
    words = r"1 of 3 clients appeared within 0.2 s; 2 are needed"
    refuses(words, federation, 3, error=QuorumError, nodes=1, connect_s=0.2)


def test_a_node_that_does_not_say_who_it_is_is_left_out(federation):
    event = left_out(federation(3, claims={0: None, 1: 0, 2: 1}), 0, 1)
    assert event["client"] == 2
    said = "node 2: says client=null has the wrong type: expected a whole number."
    assert event["reason"] == said
    with pytest.raises(QuorumError, match=r"^node 2: says client=.*1 of 3 clients answered, 2 are"):
        federation(3, claims={0: None, 1: "1", 2: 1})


def test_two_nodes_cannot_be_one_client(federation):
    doubled = federation(4, claims={3: 0})
    assert doubled.cohort.clients == [1, 2]
    assert [event["client"] for event in doubled.events] == [0, 3]
    assert "nodes 2 and 5 say that they are the same client, 0" in doubled.events[0]["reason"]
    with pytest.raises(QuorumError, match=r"same client, 0: give .*2 of 4 clients answered, 3 are"):
        federation(4, claims={3: 0}, quorum_share=0.75)


@pytest.mark.parametrize("index", [3, -1])
def test_a_client_of_another_federation_is_left_out(index, federation):
    event = left_out(federation(3, claims={1: index}), 0, 2)
    assert event["reason"] == f"node 3 says that it is client {index} of clients=3"


def test_a_site_with_other_columns_is_named_with_the_lines_that_join_it(federation):
    age, chol, other = (asdict(Column(name)) for name in ("age", "chol", "cholesterol"))
    columns = {"schema": [age, chol], "tag": "va"}
    said = {0: columns, 1: columns, 2: {"schema": [age, other], "tag": "hungarian"}, 3: {}}
    mixed = federation(4, properties=said, needed=("client", "schema"), alike=("schema",))
    assert mixed.events[1]["reason"].endswith(": does not say its schema")
    assert mixed.events[0]["reason"] == (
        "client 2 (hungarian): its columns are not those of the others: it lacks chol; it has "
        "cholesterol besides; lines of its dataset.yaml that would join it, to be checked: rename: "
        '{"cholesterol": "chol"}'
    )


SHAPE = {"input_shape": [3, 8, 8], "class_names": ["0", "1", "2"], "mean": [0.0, 50.0]}
SHAPE |= {"schema": [asdict(Column("age")), asdict(Column("chol"))]}


UNLIKE = [{"input_shape": [1, 8, 8]}, {"class_names": ["2", "1", "0"]}, {"mean": [0.0, 40.0]}]
UNLIKE += [{"class_names": ["0", "1"]}]


@pytest.mark.parametrize("said", UNLIKE)
@pytest.mark.parametrize("strange", [0, 1, 2])
def test_a_client_whose_data_is_not_like_that_of_most_is_left_out(said, strange, federation):
    properties = dict.fromkeys(range(3), SHAPE) | {strange: SHAPE | said}
    terms = {"properties": properties, "needed": ("client", *SHAPE), "alike": tuple(SHAPE)}
    event = left_out(federation(3, **terms), *sorted({0, 1, 2} - {strange}))
    (key,) = said
    assert event["client"] == strange
    ours, theirs = ({"chol": of[key][1]} if key == "mean" else of[key] for of in (said, SHAPE))
    assert f"its {key}={ours} is not that of the others, {theirs}: set" in event["reason"]
    with pytest.raises(QuorumError, match=f"client {strange}: its {key}="):
        federation(3, **terms, quorum_share=1.0)


def test_connecting_can_be_tried_again(federation):
    short = federation(2, grid=Withholding, connected=False, connect_s=0.2, deadline_s=0.2)
    short.grid.withheld = frozenset({0, 1})
    with pytest.raises(QuorumError, match="query.describe: 0 of 2 clients answered"):
        short.cohort.connect(short.grid)
    short.grid.withheld = frozenset()
    short.cohort.connect(short.grid)
    assert short.answering() == [0, 1]
    describes = short.cohort.bytes_sent
    short.cohort.connect(short.grid)  # connected already: asks nobody
    assert short.cohort.bytes_sent == describes


def test_bytes_are_counted_per_client_and_direction(federation):
    counted = federation(3)
    states = client_reply(0).states
    exchange = Exchange("train.search", stage="search", settings=SEARCH, states=states)
    refuses("were asked for", list, counted.cohort.ask(exchange), error=QuorumError)
    sent, received = counted.cohort.bytes_sent, counted.cohort.bytes_received
    assert sent == received
    assert sent % 3 == 0
    vectors = 4 * (10 + 4)
    assert vectors < sent // 3 <= vectors + 2 * 128


def test_a_part_has_a_name_a_quorum_and_counts_of_its_own(federation):
    whole = federation(4)
    assert whole.answering() == [0, 1, 2, 3]
    whole.cohort.wait = pytest.fail  # of the whole, whose thread it is called in
    part = whole.cohort.part([1, 3], run="of two", emit=whole.cohort.emit)
    assert (part.run, part.clients, part.quorum) == ("of two", [1, 3], 1)
    assert (part.bytes_sent, part.wait) == (0, whole.clock.sleep)
    assert part._limited is not whole.cohort._limited


def test_a_dismissed_client_is_not_asked_unless_it_is_meant(federation):
    smaller = federation(3)
    smaller.cohort.dismiss(1, "it is late")
    assert smaller.cohort.clients == [0, 2]
    assert smaller.answering() == [0, 2]
    again = Exchange("query.describe", stage="evaluate", settings=Describe(), also_left=True)
    assert [client for client, _ in smaller.cohort.ask(again)] == [0, 1, 2]


# --- Who is asked in a round: unbiased to the last fraction, and the same whenever it is asked


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
