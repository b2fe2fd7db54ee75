"""Time of an exchange with three sites, over an empty exchange of Flower itself.

    python scripts/bench_exchange.py [--exchanges 8]

Both run on this machine, one after the other. Flower's is an app of a few lines on a SuperLink and
three SuperNodes as Flower starts them, without TLS; its messages are empty. Ours is a search by
FNAS on sites that `fednas provision` has made, whose clients compute a gradient of a small supernet
on 8 images. Each number is a median over exchanges; the exit code is 1 if the ratio is above its
limit. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench import is_met, spread
from deploy_local import local_machines
from loopback import SITES, free_ports, listens, until

from fednas_flwr.runs.events import read_events
from fednas_flwr.runs.numbers import EVENTS_FILE

LIMIT = 1.3
PROJECT = """
[project]
name = "empty"
version = "1.0.0"
license = {file = "LICENSE"}
dependencies = ["flwr>=1.41.0"]
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "nobody"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "empty.apps:server"
clientapp = "empty.apps:client"
[tool.flwr.app.config]
exchanges = 8
"""
APPS = """
import json, time
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.query("nothing")
def answer(message, context):
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.5)
    took = []
    for _ in range(int(context.run_config["exchanges"])):
        begun = time.monotonic()
        messages = [Message(RecordDict(), node, "query.nothing") for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
        assert len(replies) == 3 and all(reply.has_content() for reply in replies)
        took.append(time.monotonic() - begun)
    print("took", json.dumps(took), flush=True)
"""


def main() -> int:
    """Measure both; return 1 if ours takes too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exchanges", type=int, default=8)
    number = parser.parse_args().exchanges
    with tempfile.TemporaryDirectory() as folder:
        flowers = flowers_exchanges(Path(folder) / "flower", number)
        ours = our_exchanges(Path(folder) / "ours", number)
    print(f"Flower's, empty: {spread(flowers, 2)} s\nours: {spread(ours, 2)} s")
    return 0 if is_met("ratio", median(ours) / median(flowers), LIMIT) else 1


def flowers_exchanges(folder: Path, number: int) -> list[float]:
    """Return the seconds of each empty exchange."""
    package = folder / "app" / "empty"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (folder / "app" / "LICENSE").write_text("Apache-2.0")
    (package / "apps.py").write_text(APPS)
    (folder / "app" / "pyproject.toml").write_text(PROJECT.replace("= 8", f"= {number}"))
    link, *nodes = free_ports(1 + len(SITES))
    home = folder / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{link}"\n'
        "insecure = true\n"
    )
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }

    superlink = ("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(link))
    node = ("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}", "--port")
    with (folder / "log").open("ab") as log, ExitStack() as stack:

        def start(*command: str) -> None:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        start(*superlink)
        until("the SuperLink", lambda: listens(link))
        for port in nodes:
            start(*node, str(port))
        command = ["flwr", "run", str(folder / "app"), "here", "--stream"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "took [" in line]
    if not lines:
        raise RuntimeError(f"Flower's run failed: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    times: list[float] = json.loads(lines[0].partition("took ")[2])
    return times


def our_exchanges(folder: Path, number: int) -> list[float]:
    """Return the seconds per exchange of a search, as the mean of each round's two."""
    machines = local_machines(folder)
    machines.make_private(False)
    run = folder / "run"
    try:
        machines.begin()
        machines.operate(
            *("fednas", "run", "runtime=deployment", "runtime.superlink=server", f"run_dir={run}"),
            *("partition=sites", "dataset=npz", f"dataset.root={folder / 'data'}", "clients=3"),
            *("dataset.server_test=false", "algorithm=fnas", f"rounds={number // 2}"),
            *("algorithm.batch_size=8", "algorithm.evaluate_every=0", "search_space.channels=4"),
            *("stages=[search]", "trackers=[]", "runtime.device=cpu"),
        )
    finally:
        machines.stop()
    rounds = [event for event in read_events(run / EVENTS_FILE) if event["event"] == "round"]
    return [event["seconds"] / event["exchanges"] for event in rounds]


if __name__ == "__main__":
    sys.exit(main())
