"""``runtime=deployment`` and the settings of a real site's node."""

import io
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args

from fednas_flwr.api import execute
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.prepared import make_server_data
from fednas_flwr.data.records import Column
from fednas_flwr.deploy import deployment, server_app
from fednas_flwr.deploy.bundle import CONFIG_KEY, write_bundle
from fednas_flwr.deploy.client_app import site_config
from fednas_flwr.deploy.deployment import deploy, print_event, read_event, read_status
from fednas_flwr.protocol.keys import SIGNING_KEY, make_signing_key
from fednas_flwr.protocol.messages import Header, decode_reply, encode_request
from fednas_flwr.protocol.requests import Describe
from fednas_flwr.runs.events import STOPPED, read_events
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import dump_config
from fednas_flwr.settings.configuration import load_config

from ..finished_runs import assert_same_files, in_process, stop_at
from ..processes import told
from ..refusals import raising, refuses
from ..rows import seldom

DEPLOYMENT = ("runtime=deployment", "runtime.superlink=site")
REAL_SITES = (*DEPLOYMENT, "partition=sites", "dataset.server_test=false")

# As `flwr ls site --run-id 12884540773031768585 --format json` of Flower 1.41 printed it.
LISTING = """{"success": true, "runs": [{"run-id": "12884540773031768585",
"federation-id": "@none/default", "fab-id": "fednas/fednas-launched",
"fab-name": "fednas-launched", "fab-version": "0.1.0",
"fab-hash": "1ea5f14b6817acb703f02d43c38777fd1d47a1c505371f2ffe561b9725344e19", "status":
"running", "status-details": "N/A", "elapsed": 156.77317, "pending-at": "2026-11-20 18:45:08Z",
"starting-at": "2026-11-20 18:45:09Z", "running-at": "2026-11-20 18:45:15Z", "finished-at":
"N/A", "network-traffic": {"inbound-bytes": 1225894, "outbound-bytes": 1523792, "total-bytes":
2749686}, "compute-time": {"serverapp-seconds": 156.77317, "clientapp-seconds":
250.78146600723267, "total-seconds": 407.55463600723266}}]}"""


# --- what is handed to Flower


@pytest.mark.run
def test_flower_builds_the_bundle_and_it_holds_no_code_of_ours(tmp_path):
    bundle = write_bundle(tmp_path / deployment.BUNDLE)
    home = {"FLWR_HOME": str(tmp_path / "home")}
    told("-m", "flwr.cli.app", "build", "--app", bundle, cwd=tmp_path, env=home)
    (fab,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(io.BytesIO(fab.read_bytes())) as archive:
        names = set(archive.namelist())
        project = tomllib.loads(archive.read("pyproject.toml").decode())
    assert names == {"pyproject.toml", "LICENSE", "hatch_build.py", ".info/CONTENT"}
    apps = project["tool"]["flwr"]["app"]["components"]
    assert apps["clientapp"] == "fednas_flwr.deploy.client_app:app"


def test_run_configuration_survives_flowers_toml(tmp_path, compose_config):
    config = compose_config(*DEPLOYMENT)
    awkward = ["Größe", 'a "quoted" name', "back\\slash", "new\nline", "😀", "key = 'value'"]
    config = replace(config, dataset=replace(config.dataset, class_names=awkward))
    path = deployment.write_run_config(tmp_path / "run-config.toml", config, resumed=True)
    values = parse_config_args([str(path)])
    assert load_config(values[CONFIG_KEY]) == config
    assert values["resumed"] is True


# --- what Flower says


def test_status_of_a_real_listing():
    listing = json.loads(LISTING)
    assert read_status(listing) == ("running", "")
    listing["runs"][0] |= {"status": "finished:failed", "status-details": "ServerApp failed"}
    assert read_status(listing) == ("finished:failed", "ServerApp failed")


def test_events_are_lines_of_the_log(capsys):
    event = {"event": "client_failed", "client": 1, "reason": "no\nöther", "loss": None}
    print_event(event)
    line, rest = capsys.readouterr().out.split("\n")
    assert rest == ""
    assert read_event(line) == event
    assert read_event(line[:-3]) is None
    assert read_event("\x1b[92mINFO \x1b[0m:      Starting logstream") is None


FAKE_FLWR = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
command = sys.argv[2]
with (folder / "commands").open("a") as file:
    print(*sys.argv[2:], file=file)
calls = (folder / "commands").read_text().count(command + " ")
if command == "run":
    answer = json.loads((folder / "run.json").read_text())
    print(json.dumps(answer))
elif command == "log":
    lines = (folder / "log").read_text().splitlines()
    print("\\n".join(lines[:2] if calls == 1 else lines))  # the first connection breaks
elif command == "ls":
    status = json.loads((folder / "status.json").read_text())
    run = ["running", "N/A"] if calls == 1 else status
    print(json.dumps({"success": True, "runs": [{"status": run[0], "status-details": run[1]}]}))
else:
    print(json.dumps({"success": True}))
"""


@pytest.fixture
def fake_flwr(tmp_path, monkeypatch):
    """``fake_flwr(events, status)``: commands that answer as Flower's; returns their folder."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "flwr.py").write_text(FAKE_FLWR)
    (folder / "run.json").write_text('{"success": true, "run-id": "7"}')
    monkeypatch.setattr(deployment, "_FLWR", (sys.executable, str(folder / "flwr.py"), str(folder)))

    def prepare(events, *status):
        told = [f"{deployment.EVENT_MARK}{json.dumps(event)}" for event in events]
        lines = ["INFO : flower's own", *told, "Traceback (most recent call last):", ""]
        (folder / "log").write_text("\n".join(lines))
        (folder / "status.json").write_text(json.dumps(status))
        return folder

    return prepare


STAMP = {"time": "2026-11-20T18:45:16.000+00:00", "elapsed": 1.0}
STARTED = STAMP | {"event": "run_started", "resumed": False}
FINISHED = STAMP | {"event": "run_finished", "status": "completed", "reason": None, "seconds": 1.0}


@pytest.fixture
def deployed_config(tmp_path, compose_config):
    return create_run_folder(compose_config(*DEPLOYMENT, f"run_dir={tmp_path / 'run'}"))


@pytest.mark.parametrize("here", [False, True])
def test_events_are_seen_once_each_and_kept_in_the_run_folder(fake_flwr, deployed_config, here):
    events = [STARTED, STAMP | {"event": "warning", "message": "it is slow"}, FINISHED]
    folder, run_dir = fake_flwr(events, "finished:completed", "N/A"), deployed_config.folder
    if here:  # the SuperLink is on this machine
        (run_dir / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    seen: list[dict] = []
    deploy(deployed_config, listeners=[seen.append], resumed=False)
    assert seen == events
    assert read_events(run_dir / "events.jsonl") == events
    assert (run_dir / "report.html").exists() == (not here)
    commands = (folder / "commands").read_text().splitlines()
    assert commands[0].startswith(f"run {run_dir / 'bundle'} site -c ")
    assert [command.split()[0] for command in commands[1:]] == ["log", "ls", "log", "ls", "ls"]


def test_a_model_elsewhere_has_no_baselines_here(fake_flwr, tmp_path, compose_config, capsys):
    folder = tmp_path / "run"
    config = compose_config(*DEPLOYMENT, "evaluation.baselines=2", f"run_dir={folder}")
    fake_flwr([STARTED, FINISHED], "finished:completed", "N/A")
    execute(create_run_folder(config), resumed=False)
    lines = capsys.readouterr().out.splitlines()
    (told,) = (line for line in lines if "evaluation.baselines=2" in line)
    assert f"fednas run resume={folder}" in told
    assert not (folder / "baselines").exists()


LOST = "ServerApp failed with exception: No module named 'fednas_flwr'"


FAILURES = [
    ("QuorumError: client 1: no data", "ServerApp failed", QuorumError, "client 1: no data"),
    ("ConfigError: a is b.", "N/A", ConfigError, "a is b."),
    ("", LOST, RuntimeError, f"{LOST} (finished:failed)"),
    (STOPPED[SystemExit], LOST, RuntimeError, f"{LOST} (finished:failed)"),
]


@pytest.mark.parametrize(("reason", "details", "kind", "message"), FAILURES)
def test_failed_run_says_the_first_error_and_keeps_the_log_for_debugging(
    fake_flwr, deployed_config, reason, details, kind, message
):
    events = [STARTED, FINISHED | {"status": "failed", "reason": reason}] if reason else []
    fake_flwr(events, "finished:failed", details)
    with pytest.raises(kind) as caught:
        deploy(deployed_config, listeners=[], resumed=False)
    assert str(caught.value) == message
    assert "Traceback" in str(caught.value.__cause__)


def test_run_is_stopped_with_its_launcher(fake_flwr, deployed_config, monkeypatch):
    monkeypatch.setattr(deployment, "write_report", raising(OSError("the disk is full")))
    folder = fake_flwr([STARTED, FINISHED], "finished:completed", "N/A")
    stop = [stop_at("run_started")]
    refuses("", deploy, deployed_config, listeners=stop, resumed=False, error=KeyboardInterrupt)
    assert (folder / "commands").read_text().splitlines()[-1] == "stop 7 site --format json"
    begun, ended = read_events(deployed_config.folder / "events.jsonl")
    assert (begun, ended["status"], ended["reason"]) == (STARTED, "failed", "stopped by Ctrl-C")


def test_unknown_superlink_is_one_sentence(fake_flwr, deployed_config):
    answer = {"success": False, "error-message": "SuperLink connection\n 'site' not found."}
    (fake_flwr([], "finished:completed", "N/A") / "run.json").write_text(json.dumps(answer))
    with pytest.raises(RuntimeError, match="^flwr run failed: SuperLink connection 'site' not "):
        deploy(deployed_config, listeners=[], resumed=False)


# --- the server app


def server_context(config, *, resumed):
    run_config = {CONFIG_KEY: dump_config(config), "resumed": resumed, "overrides": ""}
    return Context(1, 1, node_config={}, state=RecordDict(), run_config=run_config)


def test_resumed_is_what_the_launcher_says(tmp_path, compose_config):
    config = create_run_folder(compose_config("stages=[search]", f"run_dir={tmp_path / 'run'}"))
    grid = in_process(config)

    def starts():
        return [event["resumed"] for event in read_run(tmp_path / "run").of_kind("run_started")]

    server_app.main(grid, new := server_context(config, resumed=False))  # config.yaml is there
    assert starts() == [False]
    refuses("already holds a run on the SuperLink's machine", server_app.main, grid, new)
    server_app.main(grid, server_context(config, resumed=True))
    assert starts() == [False, True]
    assert len(read_run(tmp_path / "run").of_kind("round")) == config.rounds


def test_a_run_that_flower_has_ended_is_recorded_as_stopped(tmp_path, compose_config, monkeypatch):
    config = compose_config("stages=[search]", f"run_dir={tmp_path / 'run'}")
    asked = httpx.Request("POST", "https://127.0.0.1:8000/v1/runtime/pull-messages")
    grid, answer = in_process(config), httpx.Response(401, request=asked)
    monkeypatch.setattr(grid, "pull_messages", lambda _: answer.raise_for_status())
    context = server_context(config, resumed=False)
    refuses("401", server_app.main, grid, context, error=httpx.HTTPStatusError)
    assert read_run(config.folder).reason == STOPPED[SystemExit]


def test_server_app_makes_a_missing_folder(tmp_path, compose_config):
    config = compose_config("stages=[search]", "rounds=1", f"run_dir={tmp_path / 'new'}")
    server_app.main(in_process(config), server_context(config, resumed=False))
    assert (tmp_path / "new" / "config.yaml").exists()


# --- real sites


@pytest.fixture
def sites(tmp_path, made_data):
    """A folder with an npz file per site, of unequal sizes."""
    folder = tmp_path / "sites"
    folder.mkdir()
    with np.load(made_data) as arrays:
        for name, rows in {"a": slice(0, 50), "b": slice(30, 65), "c": slice(45, 80)}.items():
            own = {key: arrays[key][rows] for key in ("x_train", "y_train")}
            np.savez(folder / f"{name}.npz", **own)
    return folder


@pytest.fixture
def files(sites):
    return [sites / f"{name}.npz" for name in "abc"]


def describe(config, node_config):
    """Return the properties in a client app's answer, or raise its error."""
    grid = in_process(config, 1)
    (context,) = grid._contexts.values()
    context.node_config |= node_config
    content = encode_request(Header("run", "connect", 0, 1, 0, "n"), Describe(), {})
    message = grid.create_message(content, "query.describe", context.node_id, "")
    (reply,) = grid.send_and_receive([message])
    if reply.has_error():
        raise RuntimeError(reply.error.reason)
    return dict(decode_reply(reply.content)[1].properties)


def test_nodes_own_data_are_all_the_clients(tmp_path, sites, compose_config):
    config = compose_config(*REAL_SITES, "dataset.root=/nowhere", "runtime.device=cuda")
    own = {"data-path": str(sites / "a.npz"), "cache": str(tmp_path / "own cache")}
    properties = describe(config, {"partition-id": 2, "tag": "north", "device": "cpu", **own})
    assert sum(properties["splits"].values()) == 50
    assert (properties["client"], properties["tag"]) == (2, "north")
    assert properties["hardware"].startswith("cpu ")
    assert properties["input_shape"] == [3, 8, 8]
    assert list((tmp_path / "own cache").iterdir())


MIXED = [(DEPLOYMENT, {"data-path": "/x"}), (REAL_SITES, {}), ((), {"data-path": "/x"})]


@pytest.mark.parametrize(("overrides", "node_config"), MIXED)
def test_own_data_and_pooled_data_do_not_mix(compose_config, overrides, node_config):
    with pytest.raises(RuntimeError, match="a node with data of its own needs runtime=deploy"):
        describe(compose_config(*overrides), node_config)


def test_node_overrules_the_servers_settings(compose_config):
    config = compose_config(*REAL_SITES)
    own = site_config(config, {"data-path": "/data", "device": "cuda", "cache": "/fast"})
    assert (own.dataset.root, own.runtime.device, own.dataset.cache) == ("/data", "cuda", "/fast")
    assert site_config(config, {"data-path": str(config.dataset.root)}) == config
    refuses("device", site_config, config, {"data-path": "/data", "device": "gpu"})


FEATURES = ("dataset.scattering={scales: 1, angles: 2}",)


@pytest.mark.parametrize(
    "features",
    [pytest.param((), id="images"), pytest.param(FEATURES, id="features", marks=pytest.mark.run)],
)
def test_real_sites_give_the_same_bits_as_simulated_ones(sites, files, quick_run, features):
    common = ("partition=sites", "dataset.server_test=false", *features)
    inline = quick_run(*common, f"dataset.root={sites}")
    deployed = quick_run(*REAL_SITES, "dataset.root=null", *features, sites=files)
    names = ("genotype.json", "model.safetensors", "checkpoints/search-000002.safetensors")
    assert_same_files(inline.folder, deployed.folder, *names)
    assert inline.the("partition")["counts"] == deployed.the("partition")["counts"]


def test_server_of_real_sites_may_hold_a_public_test_set(files, quick_run):
    brief = ("partition=sites", "rounds=1", "retrain.rounds=1")
    evaluated = quick_run(*DEPLOYMENT, *brief, sites=files).the("evaluated")
    assert evaluated["central"]["num_examples"] == 80
    assert len(evaluated["clients"]) == 3


def test_a_server_test_set_that_does_not_fit_the_sites_is_refused(compose_config):
    config = compose_config(*REAL_SITES)
    empty = dict.fromkeys(("image_shape", "transform", "schema", "target"), [])
    properties = empty | {"input_shape": [3, 8, 8], "mean": [0.5] * 3, "std": [0.5] * 3}
    properties |= {"class_names": ["0", "1", "2"], "multi_label": False}
    assert make_server_data(config, properties).num_classes == 3
    number = {"schema": [Column("age")], "target": [0.5, 0.1], "class_names": ["days"]}
    assert make_server_data(config, properties | number).train.label == "days"
    public = replace(config.dataset, server_test=True)
    other = properties | {"class_names": ["0", "1", "2", "3"]}
    refuses("the server's test set", make_server_data, replace(config, dataset=public), other)


@pytest.mark.parametrize("own", [seldom({}), {"scattering": {"scales": 1, "angles": 4}}])
def test_features_that_sites_do_not_share_are_refused(tmp_path, files, quick_run, own):
    """The sites' dataset.yaml decides what they do; the run's setting would do nothing."""
    dataset = {"name": "npz", "class_names": ["0", "1", "2"]} | own
    (tmp_path / "dataset.yaml").write_text(yaml.safe_dump(dataset))
    more = {"dataset": str(tmp_path / "dataset.yaml"), "cache": str(tmp_path / "cache")}
    nodes = [{"data-path": str(file), **more} for file in files]
    run = quick_run(*REAL_SITES, *FEATURES, sites=nodes, fails=True)
    assert isinstance(run.error, ConfigError)
    assert re.match(r"the run has the features .*scattering.*, but its sites ", str(run.error))
    assert not run.named("round")


def test_first_error_of_a_site_is_in_the_runs_error(sites, quick_run):
    run = quick_run(*REAL_SITES, sites=[sites / "missing.npz"] * 3, fails=True)
    assert isinstance(run.error, QuorumError)
    assert re.search(r"ConfigError: dataset\.root=.*missing\.npz is not a fi", str(run.error))


# --- the model returns


@pytest.fixture
def kept_run(tmp_path, files, quick_run):
    """``kept_run(names)``: a run of which these sites keep the model, and where each has it."""

    def run(keeping, *more):
        make_signing_key(tmp_path / "signing.key")
        signer = str(tmp_path / "signing.pub")
        places = {name: tmp_path / name / "models" for name in keeping}
        nodes = [{"data-path": str(file)} for file in files]
        for name, place in places.items():
            nodes["abc".index(name)] |= {"models": str(place), "signer": signer}
        return quick_run(*REAL_SITES, "rounds=1", "retrain.rounds=1", *more, sites=nodes), places

    return run


def test_every_site_that_keeps_models_has_the_runs(tmp_path, sites, kept_run, monkeypatch, prints):
    monkeypatch.setenv(SIGNING_KEY, str(tmp_path / "signing.key"))
    run, places = kept_run("ac")
    handed = run.the("handed_over")
    assert (handed["clients"], handed["asked"]) == ([0, 2], [0, 2])
    assert not run.named("client_failed", "warning")
    file = (run.folder / "model.safetensors").read_bytes()
    for name, place in places.items():
        (folder,) = place.iterdir()
        assert (folder / "model.safetensors").read_bytes() == file
        assert "unfinished" not in (folder / "MODEL_CARD.md").read_text()
        tested = json.loads((folder / "test.json").read_text())
        own = next(c for c in run.the("evaluated")["clients"] if c["client"] == "abc".index(name))
        assert tested["num_examples"] == own["num_examples"]
        assert tested["accuracy"] == pytest.approx(own["accuracy"])
    output = tmp_path / "predictions.csv"
    assert "50 records" in prints("predict", folder, sites / "a.npz", "--output", output)
    names = [Path(line).name for line in prints("export", folder, "--to", tmp_path / "to").split()]
    assert names == ["model.safetensors", "README.md"]
    assert "Files: model.safetensors.\n" in (tmp_path / "to" / "README.md").read_text()
    assert len(output.read_text().splitlines()) == 51


def test_a_site_that_prefers_a_copy_of_its_own_has_that(tmp_path, kept_run, monkeypatch):
    monkeypatch.setenv(SIGNING_KEY, str(tmp_path / "signing.key"))
    run, places = kept_run("ab", "evaluation.personalised=true", "retrain.evaluate_every=1")
    evaluated = run.the("evaluated")
    assert run.the("personalised")["clients"] == [0, 1, 2]  # after one round all have much to gain
    assert run.the("handed_over")["clients"] == [0, 1]
    for client, place in enumerate(places.values()):
        (folder,) = place.iterdir()
        file = run.folder / "copies" / f"client_{client}" / "model.safetensors"
        assert (folder / "model.safetensors").read_bytes() == file.read_bytes()
        tested = json.loads((folder / "test.json").read_text())
        assert tested["accuracy"] == pytest.approx(evaluated["copies"][client]["accuracy"])


def test_a_server_without_a_key_warns_and_its_run_has_its_model(kept_run, monkeypatch):
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    run, places = kept_run("a")
    warning = run.the("warning")["message"]
    assert f"the model does not return to the sites: {SIGNING_KEY} is not set" in warning
    assert not places["a"].exists()
    assert (run.folder / "model.safetensors").is_file()


def test_a_site_that_does_not_say_whose_models_it_keeps_is_refused(sites, compose_config):
    node = {"partition-id": 0, "data-path": str(sites / "a.npz"), "models": "/models"}
    with pytest.raises(RuntimeError, match="the node keeps models but lacks signer"):
        describe(compose_config(*REAL_SITES), node)


# --- all of it


@pytest.mark.slow
def test_deployment_on_loopback_gives_the_bits_of_inline(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "deploy_local.sh"
    environment = os.environ | {"FEDNAS_VENV": str(Path(sys.executable).parents[1])}
    done = subprocess.run(
        ["bash", str(script), "rounds=1", "retrain.rounds=1"],
        env=environment | {"FEDNAS_RESULTS": str(tmp_path / "results")},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deployment and inline agree in every bit." in done.stdout
    assert "equal: model.safetensors" in done.stdout
    assert done.stdout.count(": keeps the model, which it has tested on ") == 3
