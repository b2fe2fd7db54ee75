"""The quickstart through `flwr run .` beside `fednas run`, and Flower's own start-up.

    python scripts/bench_flwr_run.py [--repeats 3] [overrides]

Each repeat runs, one after the other and in the same environment: `fednas run`; `flwr run .` on a
SuperLink of its own that simulates; and an app that asks as many nodes one empty question, which is
Flower's own start-up (of its command, its server app's process, Ray and its actors, with torch).
The ratio is that of `flwr run .`, less that start-up, to `fednas run`; genotype and model must have
the same bits. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
NODES = 3
RESULTS = ("genotype.json", "model.safetensors", "model.onnx")
HELLO = """
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
server = ServerApp()
client = ClientApp()

@client.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    replies = list(grid.send_and_receive([Message(RecordDict(), n, "query") for n in nodes]))
    assert len(replies) == len(nodes) and not any(r.has_error() for r in replies)
"""
PROJECT = """
[project]
name = "hello"
version = "1.0.0"
license = {file = "LICENSE"}
[tool.flwr.app]
publisher = "hello"
[tool.flwr.app.components]
serverapp = "hello.apps:server"
clientapp = "hello.apps:client"
"""


def main() -> int:
    """Measure; returns 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    options, overrides = parser.parse_known_args()
    base = Path(tempfile.mkdtemp(prefix="fednas-flwr-"))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    (base / "home").mkdir()
    (base / "home" / "config.toml").write_text(
        f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    (base / "hello" / "hello").mkdir(parents=True)
    files = {"hello/__init__.py": "", "hello/apps.py": HELLO, "pyproject.toml": PROJECT}
    for name, text in (files | {"LICENSE": "None"}).items():
        (base / "hello" / name).write_text(text)
    environment = os.environ | {"FLWR_HOME": str(base / "home")}
    environment["PATH"] = f"{BIN}:{os.environ['PATH']}"
    environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"

    def timed(*command: str) -> float:
        begun = time.monotonic()
        with (base / "log").open("a") as log:
            subprocess.run(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                check=True,
            )
        return time.monotonic() - begun

    def flwr(app: str, *arguments: str) -> float:
        nodes = ("--federation-config", f"num-supernodes={NODES}")
        seconds = timed("flwr.cli.app", "run", app, "here", "--stream", *nodes, *arguments)
        listing = subprocess.run(
            [sys.executable, "-m", "flwr.cli.app", "ls", "here", "--format", "json"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(listing.stdout)["runs"][0]["status"] == "finished:completed", base
        return seconds

    superlink = subprocess.Popen(
        [str(BIN / "flower-superlink"), *("--insecure", "--simulation", "--host", "127.0.0.1")]
        + ["--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    times: dict[str, list[float]] = {"fednas run": [], "flwr run .": [], "start-up": []}
    try:
        time.sleep(10)
        for repeat in range(options.repeats):
            own, theirs = base / f"fednas-{repeat}", base / f"flwr-{repeat}"
            asked = ("fednas_flwr", "run", f"clients={NODES}", f"run_dir={own}", *overrides)
            times["fednas run"].append(timed(*asked))
            text = json.dumps(" ".join([*overrides, f"run_dir={theirs}"]))
            times["flwr run ."].append(flwr(".", "--run-config", f"overrides={text}"))
            times["start-up"].append(flwr(str(base / "hello")))
            differ = [n for n in RESULTS if (own / n).read_bytes() != (theirs / n).read_bytes()]
            if differ:
                print(f"not the same bits: {', '.join(differ)} of {own} and {theirs}")
                return 1
            print({name: round(values[-1], 1) for name, values in times.items()}, flush=True)
    finally:
        superlink.terminate()
        superlink.wait()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = (medians["flwr run ."] - medians["start-up"]) / medians["fednas run"]
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in medians.items())
    print(f"medians of {options.repeats}: {told}; ratio {ratio:.2f}; the same bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
