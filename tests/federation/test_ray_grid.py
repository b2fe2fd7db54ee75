"""Clients in actors of Ray: how many at a time, and what becomes of one that dies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.config import Config
from fednas_flwr.federation.clusters import places


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8)), max_size=4),
    st.sampled_from([0.1, 0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_a_machine_holds_what_fits_it_alone(
    compose_config: Callable[..., Config], nodes: list[tuple[int, int]], cpus: float, gpus: float
) -> None:
    runtime = compose_config("runtime=ray").runtime
    runtime = replace(runtime, client_cpus=cpus, client_gpus=gpus)
    by_filling = 0
    for node_cpus, node_gpus in nodes:
        held = 0
        while (held + 1) * cpus <= node_cpus + 1e-6 and (held + 1) * gpus <= node_gpus + 1e-6:
            held += 1
        by_filling += held
    assert places(runtime, tuple(nodes)) == by_filling


# In a process of its own: what Ray leaves behind would be errors of the test's.
DYING = """
import json, os
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fednas_flwr import compose
from fednas_flwr.federation.ray_grid import ray_grid

app = ClientApp()

@app.query("pid")
def pid(message, context):
    if message.content["ask"]["die"]:
        os._exit(1)
    return Message(RecordDict({"told": MetricRecord({"pid": os.getpid()})}), reply_to=message)

@app.query("raise")
def fail(message, context):
    raise ZeroDivisionError("no record")

def ask(grid, verb, dying=None):
    messages = [
        Message(RecordDict({"ask": MetricRecord({"die": int(node == dying)})}), node, verb)
        for node in sorted(grid.get_node_ids())
    ]
    ids, replies = list(grid.push_messages(messages)), {}
    while len(replies) < len(ids):
        for reply in grid.pull_messages(ids):
            told = reply.error.reason if reply.has_error() else reply.content["told"]["pid"]
            replies[reply.metadata.src_node_id] = told
    return [replies[node] for node in sorted(replies)]

runtime = compose("runtime=ray", "runtime.client_cpus=0.5").runtime
with ray_grid(app, 3, runtime) as grid:
    told = [ask(grid, "query.pid", dying=3), ask(grid, "query.pid"), ask(grid, "query.raise")]
print(json.dumps([os.getpid(), *told]))
"""


@pytest.mark.ray
def test_a_client_process_that_dies_costs_one_reply() -> None:
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server, first, again, failed = json.loads(done.stdout.splitlines()[-1])
    assert "process has died" in first[1]
    assert all(isinstance(pid, int) for pid in (first[0], first[2], *again))
    assert server not in again
    assert failed == ["ZeroDivisionError: no record"] * 3
