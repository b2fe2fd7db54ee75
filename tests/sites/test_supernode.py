"""A SuperNode asks often after a message, and gives up a reply whose process was killed."""

import math
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResultStatus
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal

from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.sites import supernode
from fednas_flwr.deploy.sites.executor import IMPORTED, NAME

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


# --- A site's executor runs client apps alone, each in a process that has nothing left to import


def spec(task):
    where = {"runtime_api_address": "127.0.0.1:1", "insecure": True, "root_certificates_path": None}
    how = {"runtime_dependency_install": False, "suppress_output": False}
    own = {"task_type": task, "token": "secret", "parent_pid": os.getpid()}
    return ExecutionSpec(**own, **where, **how, task_id=1)


@pytest.mark.parametrize("task", TaskType)
def test_client_apps_are_started_and_no_other_task_is(task, monkeypatch):
    started: list[ExecutionSpec] = []
    monkeypatch.setattr(SubprocessExecutor, "launch", SubprocessExecutor.launch)
    flower_patches.start_clients_by(started.append)
    result = SubprocessExecutor().launch(spec(task))
    ours = task == TaskType.CLIENT_APP
    assert started == [spec(task)] * ours
    assert result.status == (LaunchResultStatus.ACCEPTED if ours else LaunchResultStatus.FAILED)


def test_the_process_of_a_message_can_be_told_from_the_one_that_it_is_forked_from():
    """Whose arguments name the modules that it has imported."""
    assert len(NAME) < 16  # all that Linux keeps
    assert not any(NAME in module for module in IMPORTED)


def _train(connection):
    """Send what the process had imported, and the sum of weights after a step on two threads."""
    imported = [name for name in IMPORTED if name in sys.modules]
    torch.set_num_threads(2)
    layer = torch.nn.Conv2d(3, 8, 3)
    layer(torch.ones(64, 3, 32, 32)).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    connection.send((imported, layer.weight.sum().item()))


def fork_twice():
    """Fork as a site's executor does, in an interpreter whose forkserver has not begun."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    for _ in range(2):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train, args=(sender,), daemon=True)
        process.start()
        sender.close()
        imported, total = receiver.recv()
        process.join()
        assert process.exitcode == 0
        assert imported == IMPORTED
        assert math.isfinite(total)


@pytest.mark.run
def test_forked_processes_have_imported_all_and_train_on_several_threads():
    """In an interpreter of its own, as other tests start this one's forkserver."""
    run = f"from {__name__} import fork_twice; fork_twice()"
    subprocess.run([sys.executable, "-c", run], check=True, cwd=Path(__file__).parents[2])
