"""``flwr run .`` onto real sites, as `fednas provision` makes them."""

import json
from pathlib import Path

import pytest

from fednas_flwr.runs.events import read_events

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_sites_run_what_flwr_run_sends_and_nothing_else(machines):
    cluster = machines(private=False)
    run_dir = cluster.folder / "server" / "state" / "run"
    overrides = (
        "partition=sites dataset=npz dataset.server_test=false rounds=1 search_space.channels=2 "
        f"stages=[search] trackers=[] run_dir={run_dir}"
    )
    run_config = f"overrides={json.dumps(overrides)}"
    command = ("flwr", "run", str(ROOT), "server", "--stream", "--run-config", run_config)
    output = cluster.operate(*command)
    events = read_events(run_dir / "events.jsonl")
    assert events[-1]["status"] == "completed", output
    assert not [event for event in events if event["event"] == "client_failed"]
    (connected,) = [event for event in events if event["event"] == "partition"]
    assert connected["clients"] == [0, 1, 2]
    assert "search 1/1" in output
