"""Clients in actors of Ray: how many at a time, and what those cost that die."""

import json
import os
import pickle
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr import api
from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.grids import check_cluster, places, without_arrays

from ..processes import told
from ..refusals import refuses


@pytest.fixture(scope="module")
def runtime(compose_config):
    return compose_config("runtime=ray").runtime


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8)), max_size=4),
    st.sampled_from([0.1, 0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_a_machine_holds_what_fits_it_alone(runtime, nodes, cpus, gpus):
    runtime = replace(runtime, client_cpus=cpus, client_gpus=gpus)
    by_filling = 0
    for node_cpus, node_gpus in nodes:
        held = 0
        while (held + 1) * cpus <= node_cpus + 1e-6 and (held + 1) * gpus <= node_gpus + 1e-6:
            held += 1
        by_filling += held
    assert places(runtime, tuple(nodes)) == by_filling


def test_arrays_are_parted_from_a_message_and_the_message_stays_as_it_is():
    flower_patches.begin_task(1)  # Flower makes no message before
    weights = ArrayRecord({"float32": Array(np.zeros(50_000, np.float32))})
    content = RecordDict({"header": ConfigRecord({"a": 1}), "weights": weights})
    message = Message(content, 2, "query")
    small, arrays = without_arrays(message)
    flower_patches.set_message_id(small, "7")
    assert message.metadata.message_id == "7"
    assert list(message.content) == ["header", "weights"]
    assert arrays["weights"] is weights
    assert list(small.content) == ["header"]
    assert len(pickle.dumps(small)) < 2_000
    small.content.update(arrays)
    assert small.content == message.content


# In processes of their own: what Ray leaves behind would be errors of the test's.
ASKING = """
import json, os, time
from pathlib import Path
import numpy as np
import ray
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from fednas_flwr import compose
from fednas_flwr.deploy.grids import ray_grid

app, GO, CLIENTS = ClientApp(), Path("go"), range(2, 10)

@app.query("told")
def told(message, context):
    asked = message.content["ask"]
    if asked["waits"]:  # until enough others have answered
        begun = GO.with_name(f"begun-{message.metadata.dst_node_id}")
        begun.write_text(ray.get_runtime_context().get_node_id())
        while not GO.exists():
            time.sleep(.01)
    if asked["dies"]:
        os._exit(1)
    sums = [array.numpy().sum().item() for array in message.content["arrays"].values()]
    where = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "sums": sums}
    return Message(RecordDict({"told": ConfigRecord(where)}), reply_to=message)

@app.query("raise")
def fail(message, context):
    raise ZeroDivisionError("no record")

def ask(grid, action="query.told", *, waits=(), dies=(), go=lambda replies: True):
    arrays = ArrayRecord({"float32": Array(np.ones(100_000, np.float32))})
    messages = [
        Message(
            RecordDict(
                {
                    "ask": ConfigRecord({"waits": node in waits, "dies": node in dies}),
                    "arrays": arrays,
                }
            ), node, action
        )
        for node in CLIENTS
    ]
    GO.unlink(missing_ok=True)
    ids, replies = list(grid.push_messages(messages)), {}
    while len(replies) < len(ids):
        if not GO.exists() and go(replies):
            GO.touch()
        for reply in grid.pull_messages(ids):
            told = reply.error.reason if reply.has_error() else dict(reply.content["told"])
            replies[reply.metadata.src_node_id] = told
    return [replies[node] for node in CLIENTS]
"""

DYING = """
runtime = compose("runtime=ray", f"runtime.client_cpus={os.cpu_count() / 2}").runtime
with ray_grid(app, len(CLIENTS), runtime) as grid:
    first = ask(grid)
    half = lambda replies: len(replies) >= len(CLIENTS) / 2  # more may wait behind one that waits
    died = ask(grid, waits=[3], dies=[3], go=half)
    print(json.dumps([os.getpid(), first, died, ask(grid), ask(grid, "query.raise")]))
"""


def asked(script, folder, **environment):
    """Return what a script in a process of its own tells in its last line."""
    return json.loads(told("-c", ASKING + script, cwd=folder, env=environment).splitlines()[-1])


@pytest.mark.run
@pytest.mark.ray
def test_a_client_process_that_dies_costs_the_replies_that_it_worked_on(tmp_path):
    # sockets have short names
    with tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp") as short:
        left = Path(short, "ray", "ray_current_cluster")  # by a cluster that has ended
        left.parent.mkdir()
        left.write_text("127.0.0.1:9")
        server, first, died, again, failed = asked(DYING, tmp_path, RAY_TMPDIR=short)
    assert "process has died" in died[1]
    told = [*first, *(one for one in died if one != died[1]), *again]
    assert len(told) >= 20
    assert all(one["sums"] == [100_000] for one in told)
    assert len({one["pid"] for one in first}) <= 2
    assert server not in {one["pid"] for one in told}
    assert failed == ["ZeroDivisionError: no record"] * 8


LOSING = """
from ray.cluster_utils import Cluster

cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
lost = cluster.add_node(num_cpus=1)
runtime = compose("runtime=ray", f"runtime.ray_address='{cluster.address}'").runtime

def lose(replies):
    begun = [path for path in Path().glob("begun-*") if path.read_text() == lost.node_id]
    if begun:
        cluster.remove_node(lost, allow_graceful=False)
    return bool(begun)

with ray_grid(app, len(CLIENTS), runtime) as grid:
    first = ask(grid)
    while len({told["node"] for told in first}) < 2:  # till both actors are there
        first = ask(grid)
    found = [lost.node_id, first, ask(grid, waits=CLIENTS, go=lose), ask(grid)]
cluster.shutdown()
print("\\n" + json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_machine_that_is_lost_costs_the_replies_that_it_worked_on(tmp_path):
    lost, first, meanwhile, again = asked(LOSING, tmp_path)
    assert lost in {told["node"] for told in first}
    (error,) = {told for told in meanwhile if isinstance(told, str)}
    assert "process has died" in error
    others = [told for told in [*meanwhile, *again] if told != error]
    assert len(others) >= 12
    assert lost not in {told["node"] for told in others}


# --- Clusters that are silent or closed


@pytest.mark.parametrize("kind", [pytest.param("silent", marks=pytest.mark.slow), "closed"])
def test_a_cluster_that_does_not_answer_is_refused(compose_config, kind):
    """A host that takes connections and says nothing, or a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if kind == "closed":
            server.close()
        config = compose_config("runtime=ray", f"runtime.ray_address='{address}'")
        refuses(f"^runtime.ray_address={address}: no Ray cluster answer", api.check, config)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", "127.0.0.1:99999999"])
def test_what_is_no_address_is_refused(compose_config, address):
    config = compose_config("runtime=ray", f"runtime.ray_address='{address}'")
    refuses(f"^runtime.ray_address={address}: ", check_cluster, config)


@pytest.mark.parametrize("kind", ["client_cpus", "client_gpus"])
def test_clients_that_fit_on_no_machine_are_refused(compose_config, kind):
    config = compose_config("runtime=ray", f"runtime.{kind}=5000")
    refuses(rf"runtime.{kind}=5000.*there are {os.cpu_count()} CPUs", check_cluster, config)
    check_cluster(compose_config("runtime=inline"))
    check_cluster(compose_config("runtime=ray"))


SUPERLINKS = [
    (None, "local", "local, supergrid"),  # as Flower writes it then
    ('[superlink]\ndefault = "a"\n[superlink.a]\naddress = "x"', "a", "a"),
]


@pytest.mark.parametrize(("text", "good", "known"), SUPERLINKS)
def test_an_unknown_superlink_is_refused(compose_config, tmp_path, monkeypatch, text, good, known):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    if text is not None:
        (tmp_path / "config.toml").write_text(text)
    api.check(compose_config("runtime=deployment", f"runtime.superlink={good}"))
    for wrong in ("nothing", "default"):
        own = (f"runtime.superlink={wrong}", f"run_dir={tmp_path / 'run'}")
        assert refuses("", api.run, compose_config("runtime=deployment", *own)) == (
            f"runtime.superlink={wrong} is unknown: choose one of {known}, or add "
            f"[superlink.{wrong}] with its address to {tmp_path / 'config.toml'}."
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["=", "superlink = 3", "", "\x00"])
def test_a_broken_configuration_of_flower_is_named(compose_config, tmp_path, monkeypatch, text):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(text)
    config = compose_config("runtime=deployment", "runtime.superlink=a")
    refuses(f"^runtime.superlink=a: {tmp_path / 'config.toml'} has", check_cluster, config)
