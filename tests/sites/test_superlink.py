"""What the SuperLink makes of a node that comes back: on Flower's own states, with their clocks."""

import pytest
from flwr.server.superlink.linkstate import InMemoryLinkState, SqlLinkState
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from fednas_flwr.deploy import flower_patches

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
