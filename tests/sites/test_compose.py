"""docker/compose.yaml: its form, and its own commands as processes on loopback, three sites."""

import json
import re
from pathlib import Path

import pytest
import yaml

from fednas_flwr.deploy.bundle import write_bundle
from fednas_flwr.deploy.flower_patches import VERSIONS
from fednas_flwr.deploy.sites.doctor import examine
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.runs.events import read_events

from ..processes import told
from .test_faults import DEPLOYMENT, PRIVATE, RUN

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = DOCKER / "compose.yaml"
SITES = ("north", "south", "east")
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]


def test_compose_file_is_of_the_compose_specification():
    told("-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_every_service_is_confined_and_comes_back():
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


@pytest.mark.parametrize("site", SITES)
def test_a_sites_runtime_interface_is_on_its_own_network(site):
    supernode, clientapp = SERVICES[f"{site}-supernode"], SERVICES[f"{site}-clientapp"]
    assert supernode["networks"] == {"sites": {}, site: {"aliases": ["runtime"]}}
    assert clientapp["networks"] == [site]
    for service in (supernode, clientapp):
        assert service["environment"] == {"RUNTIME_HOST": "runtime"}


def test_images_are_flowers_of_the_version_in_use():

    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"ARG FLOWER=(\d+\.\d+)\.\d+-", text)[1] in VERSIONS
    images = ["flwr/superlink:${FLOWER}", "flwr/superexec:${FLOWER}", "package", "package"]
    assert re.findall(r"^FROM (\S+)", text, re.M) == images


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
def cluster(machines):
    """All services of the compose file, of sites with a policy."""
    return machines(private=True)


@pytest.mark.slow
def test_code_that_comes_with_a_run_is_never_executed_at_a_site(cluster):
    app = write_bundle(cluster.base / "foreign")
    marker = cluster.base / "executed"
    project = (app / "pyproject.toml").read_text()
    for side, code in (("server", SERVER_APP), ("client", CLIENT_APP)):
        (app / f"own_{side}_app.py").write_text(code.replace("{marker!r}", repr(str(marker))))
        project = project.replace(f"fednas_flwr.deploy.{side}_app", f"own_{side}_app")
    project = project.replace("fab-include = [", 'fab-include = ["/own_*.py", ')
    (app / "pyproject.toml").write_text(project)
    output = cluster.operate("flwr", "run", str(app), "server", "--stream")
    answers = [line for line in output.splitlines() if "ANSWER" in line]
    assert len(answers) == 3, output
    assert all("is refused: this site runs the fednas_flwr" in answer for answer in answers)
    assert not marker.exists()
    for site in SITES:
        assert "is refused" in cluster.read(f"{site}-clientapp")
        assert not list((cluster.folder / site / "state").rglob("*.py"))


@pytest.mark.slow
def test_a_private_search_on_three_sites(cluster, loopback):
    """At one of them a person types the command that releases the schedule."""
    run_dir = cluster.folder / "server" / "state" / "run"
    loopback.edit(cluster.folder / SITES[0] / "policy.yaml", r"approve: \w+", "approve: manual")
    own = ("rounds=1", "runtime.quorum=1", "runtime.approval_s=600", f"run_dir={run_dir}")
    running = cluster.launch("fednas", "run", *DEPLOYMENT, *RUN, *PRIVATE, *own)
    file = run_dir / "events.jsonl"

    def awaited():
        events = read_events(file) if file.exists() else []
        assert running.poll() is None, running.communicate()[0]
        return [event["clients"] for event in events if event["event"] == "approval_awaited"]

    ((asked,),) = loopback.until("the question for approval", awaited)
    assert asked["client"] == 0
    for command in (["approve"], ["approve", asked["schedule"]]):
        printed = told("-m", "fednas_flwr", *command, cwd=cluster.folder / SITES[0])
        assert "train.weight_gradient" in printed
    assert f"fednas approve {asked['schedule']}" in cluster.read(f"{SITES[0]}-clientapp")
    output, _ = running.communicate()
    assert running.returncode == 0, output
    events = read_events(file)
    assert events[-1]["event"] == "run_finished"
    assert events[-1]["status"] == "completed"
    assert sum(event["event"] == "round" for event in events) == 1
    assert not [event for event in events if event["event"] == "client_failed"]
    for site in SITES:
        state = cluster.folder / site / "state"
        with Ledger(state / "ledger" / "ledger.sqlite", state / "ledger.key") as ledger:
            assert ledger.verify() == 2  # weights, alphas
        assert not [finding for finding in examine(state.parent) if finding.broken]


# --- ``flwr run .`` onto real sites, as `fednas provision` makes them


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
