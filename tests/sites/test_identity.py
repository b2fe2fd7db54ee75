"""Who is let in to a SuperLink, what both sides say of a refusal: real processes on loopback."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from flwr.superlink.main import create_app

from fednas_flwr.deploy.sites import doctor
from fednas_flwr.deploy.sites.provision import issue_certificate, make_authority, make_node_key
from fednas_flwr.deploy.sites.superlink import REFUSAL, Guard, is_loopback, paths_for_all

from ..processes import told, until
from ..refusals import refuses

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def net(tmp_path_factory, loopback):
    """Two SuperLinks, one with an expired certificate, and SuperNodes of which one is let in."""
    folder = tmp_path_factory.mktemp("net")
    for name in ("ca", "other", "good", "expired"):
        (folder / name).mkdir()
    make_authority(folder / "ca", name="ours")
    make_authority(folder / "other", name="theirs")
    issue_certificate(folder / "ca", folder / "good", addresses=["127.0.0.1"], days=1)
    issue_certificate(folder / "ca", folder / "expired", addresses=["127.0.0.1"], days=-1)
    for name in ("known", "unknown"):
        make_node_key(folder / name)
    link, expired, *ports = loopback.free_ports(8)
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(
        f'[superlink.ours]\naddress = "127.0.0.1:{link}"\n'
        f'root-certificates = "{folder}/ca/ca.crt"\n'
    )
    environment = os.environ | {"FLWR_HOME": str(folder / "home")}
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(name, *command):
        own = {"env": environment, "cwd": folder}
        with (folder / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(command, stdout=log, stderr=log, **own)

    def start_link(name, port):
        files = {"ca-certfile": "ca/ca.crt", "certfile": f"{name}/server.crt"}
        files |= {"keyfile": f"{name}/server.key"}
        module, own = "fednas_flwr.deploy.sites.superlink", ["--enable-supernode-auth"]
        own += [f"--ssl-{option}={path}" for option, path in files.items()]
        own += ["--isolation=process", f"--database={name}/state.db", f"--port={port}"]
        start(name, sys.executable, "-m", module, *own)

    def start_node(name, *, address, authority, key):
        tls = ["--insecure"] if not authority else [f"--root-certificates={authority}/ca.crt"]
        own = [f"--auth-supernode-private-key={key}"] if key else []
        own += [f"--superlink={address}", "--max-retries=0", "--isolation=process"]
        start(name, str(BIN / "flower-supernode"), *tls, *own, f"--port={ports.pop()}")

    def flwr(*command):
        named = ("-m", "flwr.cli.app", "supernode", *command, "--format=json")
        return dict(json.loads(told(*named, env=environment, cwd=folder)))

    def read(name):
        return re.sub(r"\x1b\[\d+m", "", (folder / f"{name}.log").read_text())

    def listens(name, port):
        assert processes[name].poll() is None, read(name)
        return doctor.is_open(port)

    try:
        start_link("good", link)
        start_link("expired", expired)
        until(lambda: listens("good", link), "the SuperLink")
        flwr("register", "known.pub", "ours", "--name=known")
        until(lambda: listens("expired", expired), "the expired SuperLink")
        here, there = f"127.0.0.1:{link}", f"127.0.0.1:{expired}"
        start_node("let in", address=here, authority="ca", key="known")
        start_node("wrong authority", address=here, authority="other", key="known")
        start_node("wrong name", address=f"localhost:{link}", authority="ca", key="known")
        start_node("expired node", address=there, authority="ca", key="known")
        start_node("unregistered", address=here, authority="ca", key="unknown")
        start_node("no TLS", address=here, authority="", key="")
        yield SimpleNamespace(
            folder=folder, port=link, expired=expired, flwr=flwr, read=read, processes=processes
        )
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


REFUSED = {
    # node: a pattern of what it says, and what the server says unless its TLS lets nobody in
    "wrong authority": ("certificate verify failed: unable to get local issuer", ""),
    "wrong name": ("certificate is not valid for 'localhost'", ""),
    "expired node": ("certificate has expired", ""),
    "unregistered": ("Failed to activate SuperNode", "at 127.0.0.1: its key is not registered"),
    # whichever of its two sockets' calls meets the closed connection first
    "no TLS": ("Server disconnected without|Connection reset by peer|Broken pipe", ""),
}


@pytest.mark.run
@pytest.mark.parametrize("node", REFUSED)
def test_a_node_that_is_not_right_is_refused_and_told_why(net, node):
    said, told = REFUSED[node]
    until(lambda: net.processes[node].poll() is not None, "the end of the node")
    assert net.processes[node].returncode != 0
    assert re.search(said, net.read(node)), net.read(node)
    assert "SuperNode ID" not in net.read(node)
    assert told in net.read("good")


@pytest.mark.run
def test_doctor_names_the_causes(net):
    ours, theirs = (net.folder / name / "ca.crt" for name in ("ca", "other"))
    doctor.shake_hands("127.0.0.1", net.port, ours)
    assert abs(doctor.clock_skew_s("127.0.0.1", net.port, ours)) < 120  # the same clock
    for host, port, authority, words in (
        ("127.0.0.1", net.port, theirs, "is not from the authority in ca.crt"),
        ("localhost", net.port, ours, "does not name localhost: use an address that it names"),
        ("127.0.0.1", net.expired, ours, "has expired: its operator makes a new one"),
        ("127.0.0.1", 1, ours, "cannot be reached"),
    ):
        refuses(words, doctor.shake_hands, host, port, authority, error=doctor.Trouble)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as plain:
        threading.Thread(target=plain.handle_request).start()
        with pytest.raises(doctor.Trouble, match="does not speak TLS"):
            doctor.shake_hands("127.0.0.1", plain.server_port, ours)


@pytest.mark.run
def test_a_registered_node_is_let_in_and_put_out_when_its_key_is_revoked(net):
    until(lambda: "SuperNode ID" in net.read("let in"), "the node")
    assert [node["status"] for node in net.flwr("list", "ours")["nodes"]] == ["online"]
    (node,) = net.flwr("list", "ours")["nodes"]
    net.flwr("unregister", str(node["node-id"]), "ours")
    until(lambda: net.processes["let in"].poll() is not None, "the end of the node")
    assert "refused the node at 127.0.0.1: its key was revoked" in net.read("good")


def test_only_the_servers_own_machine_may_command_it():
    app = create_app()
    paths = [route.path for route in app.routes if hasattr(route, "path")]
    paths += app.openapi()["paths"]
    assert {"/v1/control/register-node", "/v1/control/start-run", "/docs"} <= set(paths)

    async def refused(peer):
        transport = httpx.ASGITransport(Guard(app, paths_for_all(app)), client=(peer, 5))
        async with httpx.AsyncClient(transport=transport, base_url="https://link") as client:
            answers = {path: await client.post(path) for path in paths}
        return {path for path, answer in answers.items() if answer.text.startswith(REFUSAL)}

    closed = {path for path in paths if not path.startswith(("/v1/fleet/", "/health"))}
    assert asyncio.run(refused("10.0.0.9")) == asyncio.run(refused("::ffff:10.0.0.9")) == closed
    assert asyncio.run(refused("127.0.0.1")) == set()
    app.state.superexec_auth_secret = b"secret"
    assert "/v1/runtime/" in paths_for_all(app)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True)]
    + [("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("localhost", False), ("", False)],
)
def test_loopback(address, expected):
    assert is_loopback(address) is expected
