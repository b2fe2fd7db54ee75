"""docker/compose.yaml: its form, and its own commands as processes on loopback, three sites."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from fednas_flwr.federation.bundle import write_bundle
from fednas_flwr.federation.doctor import examine
from fednas_flwr.federation.provision import load_sites, provision
from fednas_flwr.privacy.ledger import Ledger
from fednas_flwr.reporting.events import read_events

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = DOCKER / "compose.yaml"
SITES = ("north", "south", "east")
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]


def test_compose_file_is_of_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(COMPOSE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_confined_and_comes_back() -> None:
    pairs = {f"{site}-{part}" for site in SITES for part in ("supernode", "clientapp")}
    assert set(SERVICES) == {"superlink", "serverapp"} | pairs
    for name, service in SERVICES.items():
        assert service["user"] == "49999:49999"
        assert service["restart"] == "on-failure"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        (folder, state, *_) = service["volumes"]
        machine = "server" if name.startswith("server") or name == "superlink" else name[:-10]
        assert folder == f"./deployment/{machine}:/fednas:ro"
        assert state == f"./deployment/{machine}/state:/fednas/state"
        assert ("sites" in service["networks"]) == name.endswith(("superlink", "supernode"))


def test_images_are_flowers_of_the_version_in_use() -> None:
    import flwr

    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"ARG FLOWER=([\d.]+)-", text)[1] == flwr.__version__
    assert re.findall(r"^FROM (\S+)", text, re.M) == [
        *("flwr/superlink:${FLOWER}", "flwr/superexec:${FLOWER}", "package", "package")
    ]


# --- the commands themselves


SERVER_APP = """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    asked = [Message(RecordDict(), node, "query.describe") for node in nodes]
    for reply in grid.send_and_receive(asked, timeout=300):
        print("ANSWER", reply.error.reason if reply.has_error() else "of foreign code", flush=True)
"""
CLIENT_APP = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

Path({marker!r}).touch()
app = ClientApp()


@app.query("describe")
def describe(message, context):
    return Message(RecordDict(), reply_to=message)
"""


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]
) -> Iterator[SimpleNamespace]:
    """All services of the compose file, each host name in it replaced by 127.0.0.1."""
    base = tmp_path_factory.mktemp("compose")
    port, *ports = free_ports(1 + len(SITES))
    listed = base / "sites.yaml"
    text = (DOCKER / "sites.yaml").read_text().replace("[superlink]", "[127.0.0.1]")
    listed.write_text(text.replace("8000", str(port)))
    provision(load_sites(listed), base / "deployment", as_zip=False)
    rng = np.random.default_rng(0)
    for index, site in enumerate(SITES):
        labels = rng.integers(0, 3, 50)
        images = rng.integers(0, 120, (50, 3, 8, 8)).astype(np.uint8)
        images[np.arange(50), labels] += 100
        np.savez(base / f"{site}.npz", x_train=images, y_train=labels)
        folder = base / "deployment" / site
        edit(folder / "site.env", r"PORT=.*", f"PORT={ports[index]}")
        edit(folder / "site.env", r"DATA_PATH=.*", f"DATA_PATH={base / site}.npz")
        edit(folder / "site.env", r"DEVICE=.*", "DEVICE=cpu")
        edit(folder / "policy.yaml", r"records: \d+", "records: 50")
        edit(folder / "policy.yaml", r"epsilon: .*", "epsilon: 100.0")
        edit(folder / "dataset.yaml", r"class_names: .*", 'class_names: ["0", "1", "2"]')
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    logs = base / "logs"
    logs.mkdir()
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str) -> subprocess.Popen[bytes]:
        service = SERVICES[name]
        own = {
            key: re.sub(r"^[a-z-]+$|^0\.0\.0\.0$", "127.0.0.1", value)
            for key, value in service.get("environment", {}).items()
        }
        with (logs / name).open("ab") as log:
            process = subprocess.Popen(
                service["command"],
                cwd=base / service["volumes"][0].split(":")[0],
                env=os.environ | {"PATH": path} | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        running[name] = process
        return process

    def operate(*command: str) -> subprocess.CompletedProcess[str]:
        script = base / "deployment" / "server" / "operate"
        return subprocess.run(
            [str(script), *command],
            cwd=base,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
        )

    try:
        for site in SITES:  # the first start makes the key and ends
            assert start(f"{site}-supernode").wait() == 0
        start("superlink")
        until(lambda: "Uvicorn running" in (logs / "superlink").read_text(), running["superlink"])
        for site in SITES:
            key = base / "deployment" / site / "state" / "node.key.pub"
            done = operate("flwr", "supernode", "register", str(key), "server", "--name", site)
            assert done.returncode == 0, done.stdout + done.stderr
        for name in SERVICES:
            if name != "superlink":
                start(name)
        for site in SITES:
            read = (logs / f"{site}-supernode").read_text
            until(lambda read=read: "SuperNode ID" in read(), running[f"{site}-supernode"])
        yield SimpleNamespace(base=base, logs=logs, operate=operate, running=running)
    finally:
        stop(list(running.values()))


def edit(path: Path, pattern: str, text: str) -> None:
    found, number = re.subn(f"^(\\s*){pattern}", rf"\g<1>{text}", path.read_text(), flags=re.M)
    assert number == 1, (path, pattern)
    path.write_text(found)


def until(done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not done():
        assert process.poll() is None, "a service ended: see its log"
        time.sleep(0.2)


def stop(services: Sequence[subprocess.Popen[bytes]]) -> None:
    """End services and what they have started, as an engine does: gently, after 20 s by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in services:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        end = time.monotonic() + 20
        for process in services:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


@pytest.mark.slow
def test_code_that_comes_with_a_run_is_never_executed_at_a_site(cluster: SimpleNamespace) -> None:
    app = write_bundle(cluster.base / "foreign")
    marker = cluster.base / "executed"
    (app / "fednas_launched" / "server_app.py").write_text(SERVER_APP)
    (app / "fednas_launched" / "client_app.py").write_text(CLIENT_APP.format(marker=str(marker)))
    done = cluster.operate("flwr", "run", str(app), "server", "--stream")
    answers = [line for line in done.stdout.splitlines() if "ANSWER" in line]
    assert len(answers) == 3, done.stdout + done.stderr
    assert all("is refused: this site runs the fednas_flwr" in answer for answer in answers)
    assert not marker.exists()
    for site in SITES:
        assert "is refused" in (cluster.logs / f"{site}-clientapp").read_text()
        assert not list((cluster.base / "deployment" / site / "state").rglob("*.py"))


@pytest.mark.slow
def test_a_private_search_on_three_sites(cluster: SimpleNamespace) -> None:
    run_dir = cluster.base / "deployment" / "server" / "state" / "run"
    done = cluster.operate(
        *("fednas", "run", "runtime=deployment", "runtime.superlink=server", "runtime.quorum=1"),
        *("partition=sites", "dataset=npz", "dataset.server_test=false", "clients=3", "rounds=1"),
        *("algorithm=dp_fnas", "privacy=dp", "privacy.data_set=my-data", "privacy.epsilon=1000"),
        *("algorithm.batch_size=8", "search_space.norm=group", "search_space.channels=2"),
        *("search_space.num_cells=1", "stages=[search]", "tensorboard=false", f"run_dir={run_dir}"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(run_dir / "events.jsonl")
    assert events[-1]["event"] == "run_finished"
    assert events[-1]["status"] == "completed"
    assert sum(event["event"] == "round" for event in events) == 1
    assert not [event for event in events if event["event"] == "client_failed"]
    for site in SITES:
        state = cluster.base / "deployment" / site / "state"
        with Ledger(state / "ledger" / "ledger.sqlite", state / "ledger.key") as ledger:
            assert ledger.verify() == 2  # weights, alphas
        assert not [finding for finding in examine(state.parent) if finding.broken]
