"""A SuperNode asks often after a message, and gives up a reply whose process was killed."""

from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal

from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.sites import supernode

from ..refusals import refuses


@pytest.fixture
def pushing(monkeypatch):
    """``pushing(whole)``: sends one reply of which all objects are there, or all but one."""
    monkeypatch.setattr(supernode, "PATIENCE_S", 0.2)
    for name in ("_push_messages", "time"):  # restored after the test
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    monkeypatch.setattr(supernode, "flower_supernode", lambda: None)
    supernode.main()
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1

    def push(whole):
        content = RecordDict({"a": ConfigRecord({"x": 1}), "b": ConfigRecord({"x": 2})})
        message = Message(content, 1, "train.search")
        store = ObjectStoreFactory(":flwr-in-memory:").store()
        store.preregister(7, get_object_tree(message))
        objects = get_all_nested_objects(message)
        for name in sorted(objects) if whole else sorted(objects)[1:]:
            store.put(name, objects[name].deflate())
        message.metadata.__dict__["_message_id"] = message.object_id
        deleted: list[str] = []
        state = SimpleNamespace(
            get_messages_legacy=lambda is_reply: [message],
            get_message_processing_duration=lambda message_id: 1.0,
            delete_messages=lambda message_ids: deleted.extend(message_ids),
        )
        sent: list[str] = []
        start_client_internal._push_messages(
            state=state,
            object_store=store,
            send=lambda message, tree, runtime: (set(objects), "session"),
            push_object=lambda run, session, name, content: sent.append(name),
        )
        return SimpleNamespace(sent=sent, objects=objects, deleted=deleted, left=len(store))

    return push


def test_a_whole_reply_is_sent(pushing):
    pushed = pushing(whole=True)
    assert set(pushed.sent) == set(pushed.objects)


def test_a_reply_that_was_cut_off_is_given_up_and_the_node_goes_on(pushing):
    pushed = pushing(whole=False)
    assert set(pushed.sent) < set(pushed.objects)
    assert pushed.deleted
    assert pushed.left == 0


def test_a_node_asks_the_more_seldom_the_longer_no_message_has_come():
    pace = supernode.Pace()
    waits = [pace(3) for _ in range(60)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.2, 3.0)
    assert sum(waits[:10]) <= 2.0
    assert pace(0.5) == 0.1  # for the reply to a message
    assert pace(3) == 0.2


def test_the_waits_of_flowers_supernode_are_ours(monkeypatch):
    """Replies come at the third look: Flower's own loop would wait for a second."""
    slept: list[float] = []
    monkeypatch.setattr(start_client_internal, "time", SimpleNamespace(sleep=slept.append))
    flower_patches.ask_sooner(supernode.Pace())
    looks: list[list[Message]] = [[], [], []]

    def look(is_reply):
        looks.pop()
        if not looks:
            raise StopIteration
        return []

    none = dict.fromkeys(("object_store", "send", "push_object"))
    state = SimpleNamespace(get_messages_legacy=look)
    refuses("", start_client_internal._push_messages, state=state, **none, error=StopIteration)
    assert slept == [0.1, 0.1]
