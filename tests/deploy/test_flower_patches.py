"""What is changed in Flower: all of it is in one table, and missing in Flower it is refused."""

import importlib.metadata
import inspect
import re
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from flwr.server.superlink.linkstate import InMemoryLinkState, SqlLinkState
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp

from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.deploy.sites import superlink

from ..refusals import refuses

ROOT = Path(__file__).parents[2]
CHANGES = {  # of each function: whose attributes it replaces, which, and what it is given
    "guard_superlink": (uvicorn, ["run"], [print]),
    "let_begin_slowly": (in_memory_corestate, ["HEARTBEAT_DEFAULT_INTERVAL"], [90.0]),
    "give_up_replies": (start_client_internal, ["_push_messages"], [list]),
    "ask_sooner": (start_client_internal, ["time"], [float]),
    "start_clients_by": (SubprocessExecutor, ["launch"], [print]),
    "answer_with": (run_clientapp, ["install_from_fab", "get_load_client_app_fn"], [print, print]),
    "finish_only_with_a_reply": (run_clientapp, ["push_message", "push_task_output"], []),
    "begin_task": (TaskIdentity, ["_task_id", "_run_id", "_node_id"], [1]),
}
CASES = [(name, one) for name, (_, attributes, _) in CHANGES.items() for one in attributes]


@pytest.mark.parametrize(("name", "attribute"), CASES)
def test_what_flower_no_longer_has_is_not_replaced(name, attribute, monkeypatch):
    owner, attributes, given = CHANGES[name]
    for present in attributes:  # restored after the test
        monkeypatch.setattr(owner, present, getattr(owner, present))
    monkeypatch.delattr(owner, attribute)
    refuses(attribute, getattr(flower_patches, name), *given, error=AttributeError)


def test_objects_of_another_flower_are_not_changed_either():
    bare = SimpleNamespace(metadata=SimpleNamespace())
    for words, change, *given in (
        ("activate_node", flower_patches.let_be_missed, SimpleNamespace, 1.0),
        ("push_messages", flower_patches.send_along, bare, {}),
        ("_message_id", flower_patches.set_message_id, bare, "1"),
    ):
        refuses(words, change, *given, error=AttributeError)


def test_the_table_has_every_function():
    functions = [
        name
        for name, value in vars(flower_patches).items()
        if inspect.isfunction(value)
        and value.__module__ == flower_patches.__name__
        and name[0] != "_"
    ]
    table = re.split(r"^=+ .*$\n", flower_patches.__doc__, flags=re.MULTILINE)[2]
    assert re.findall(r"^(\w+)", table, flags=re.MULTILINE) == functions


def test_nothing_else_replaces_attributes_of_others():
    assigned = re.compile(r"setattr\(|ignore\[(method-assign|assignment)|metadata\.__dict__")
    modules = (ROOT / "fednas_flwr/deploy").rglob("*.py")
    found = [path.name for path in modules if assigned.search(path.read_text())]
    assert found == ["flower_patches.py"]


def test_the_version_is_the_one_that_is_installed_and_required():
    assert importlib.metadata.version("flwr").rpartition(".")[0] in flower_patches.VERSIONS
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    major, minor = flower_patches.VERSIONS[-1].split(".")
    required = f"flwr[simulation]>={flower_patches.VERSIONS[0]},<{major}.{int(minor) + 1}"
    assert required in tools["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]


def test_what_is_sent_along_comes_with_every_message():
    grid = InProcessGrid(ClientApp(), 1)
    flower_patches.send_along(grid, {"key": "value"})
    message = grid.create_message(RecordDict(), "query.x", 2, "")
    grid.push_messages([message])
    assert flower_patches.take_along(message) == {"key": "value"}
    assert list(message.content) == []
    assert flower_patches.take_along(message) == {}


def test_a_client_process_says_that_it_has_finished_only_after_its_reply(monkeypatch):
    said = []
    monkeypatch.setattr(run_clientapp, "push_message", lambda *_: said.append("reply"))
    monkeypatch.setattr(run_clientapp, "push_task_output", lambda *_: said.append("finished"))
    flower_patches.finish_only_with_a_reply()
    run_clientapp.push_task_output(None, None, "", "")  # it is stopped before
    assert said == []
    run_clientapp.push_message(None, None, None)
    run_clientapp.push_task_output(None, None, "", "")
    assert said == ["reply", "finished"]


def test_an_error_of_a_client_has_flowers_code():
    app = ClientApp()

    @app.query("x")
    def fail(message, context):
        raise ValueError("no")

    grid = InProcessGrid(app, 1)
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(), "query.x", 2, "")])
    assert (reply.error.code, reply.error.reason) == (2, "ValueError: no")


def test_a_superlink_has_time_for_what_it_has_had_started(monkeypatch):
    name, states, seen = "HEARTBEAT_DEFAULT_INTERVAL", (in_memory_corestate, sql_corestate), []
    replaced = [(uvicorn, "run"), *((state, name) for state in states)]
    replaced += [(state, "activate_node") for state in (SqlLinkState, InMemoryLinkState)]
    for owner, attribute in replaced:  # restored after the test
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))
    note = partial(seen.extend, (getattr(state, name) for state in states))  # once it is called
    monkeypatch.setattr(superlink, "flower_superlink", note)
    superlink.main()
    assert seen == [superlink.BEGIN_S] * 2


# --- A node that comes back, on Flower's own states with their clocks


HEARTBEAT_S = 30.0
AWAY_S = 1e6


def sql(path):
    class State(SqlLinkState):
        pass

    flower_patches.let_be_missed(State, AWAY_S)
    database = str(path / "state.db")
    state = State(database, NoOpFederationManager(), ObjectStoreFactory(database).store())
    state.initialize()
    return state


def memory(path):
    class State(InMemoryLinkState):
        pass

    flower_patches.let_be_missed(State, AWAY_S)
    return State(NoOpFederationManager(), ObjectStoreFactory(":flwr-in-memory:").store())


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # of Flower's database
@pytest.mark.parametrize("make", [sql, memory])
def test_a_node_that_is_started_again_at_once_is_missed_first(make, tmp_path, monkeypatch):
    state = make(tmp_path)
    node = state.create_node("owner", "owner", b"key", HEARTBEAT_S)

    def status():
        return state.get_node_info(node_ids=[node])[0].status

    waits = []
    monkeypatch.setattr(flower_patches.time, "sleep", lambda s: waits.append((status(), s)))
    assert state.activate_node(node, HEARTBEAT_S)  # for the first time
    assert not state.activate_node(node, HEARTBEAT_S)  # by another process: it is on-line
    assert waits == []
    assert state.deactivate_node(node)
    assert state.activate_node(node, HEARTBEAT_S)
    assert waits == [("offline", pytest.approx(1e6, rel=1e-3))]
    assert status() == "online"
