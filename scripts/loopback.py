"""A server and sites, as made by `fednas provision`, in processes of this machine.

:class:`Machines` runs each part and restarts it if it fails, as systemd or a container engine
would. `deploy_local.py` and the tests of deployments use it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fednas_flwr.deploy.sites.provision import Deployment, provision, read_roster

T = TypeVar("T")

SITES = ("north", "south", "east")
PATIENCE_S = 900.0  # for steps that take seconds on an idle machine
RESTART_S = 10.0  # until a part that has failed is restarted
# Without these lines of its start script a site answers requests that are not private.
PRIVATE = re.compile(r"^(policy|ledger|ledger-key|split-key|data-set) = .*\n", re.M)


@dataclass(frozen=True)
class Part:
    """A command that runs permanently in the folder of its machine."""

    machine: str
    command: Sequence[str] = ("./start.sh",)
    environment: Mapping[str, str] = field(default_factory=dict)


WHOLE_MACHINES = {name: Part(name) for name in ("server", *SITES)}


class Machines:
    """A server and sites, each with its own folder, TLS and a registered key.

    Args:
        base: A new folder; in it ``deployment`` has the machines' folders, ``logs`` the output.
        deployment: Names, the server's port, and 127.0.0.1 as its address.
        data: The npz file of each site.
        records: Number of records that each site declares.
        class_names: Names of the classes.
        parts: The parts to run, by name; a machine's first part comes first.
    """

    def __init__(
        self,
        base: Path,
        deployment: Deployment,
        data: Mapping[str, Path],
        *,
        records: int,
        class_names: Sequence[str],
        parts: Mapping[str, Part] = WHOLE_MACHINES,
    ) -> None:
        """Make the folders."""
        self.base, self.sites, self.parts = base, deployment.sites, parts
        self.folder, self.logs = base / "deployment", base / "logs"
        ports = free_ports(len(data))
        self.ports = {"server": deployment.server.port, **dict(zip(data, ports, strict=True))}
        self.logs.mkdir(parents=True)
        provision(deployment, self.folder)
        edit(self.folder / "server" / "server.env", r"HOST=.*", "HOST=127.0.0.1")
        for site, path in data.items():
            folder = self.folder / site
            edit(folder / "site.env", r"PORT=.*", f"PORT={self.ports[site]}")
            edit(folder / "site.env", r"DATA_PATH=.*", f"DATA_PATH={path}")
            edit(folder / "site.env", r"DEVICE=.*", "DEVICE=cpu")
            edit(folder / "policy.yaml", r"records: \d+", f"records: {records}")
            edit(folder / "policy.yaml", r"epsilon: .*", "epsilon: 100.0")
            edit(folder / "dataset.yaml", r"class_names: .*", f"class_names: {list(class_names)}")
        self._deployment = deployment
        self._scripts = {site: (self.folder / site / "start.sh").read_text() for site in data}
        self._chosen = dict(self._scripts)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = os.environ | {"PATH": path}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._read_from: dict[str, int] = {}  # part -> beginning of its newest start in its log
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._others: list[subprocess.Popen[str]] = []

    def make_private(self, private: bool) -> None:
        """Let the sites, from their next start on, answer only private requests, or any."""
        for site, script in self._scripts.items():
            self._chosen[site] = script if private else PRIVATE.sub("", script)
            (self.folder / site / "start.sh").write_text(self._chosen[site])

    def protect_sites(self) -> None:
        """Have every site's policy protect the site as a whole."""
        for site in self.sites:
            edit(self.folder / site / "policy.yaml", r"unit: \w+$", "unit: client")
            edit(self.folder / site / "policy.yaml", r"records: \d+", "records: 1")

    def begin(self, *, sums: str | None = None) -> None:
        """Start everything: sites create their keys, the server registers them, all go on-line.

        Args:
            sums: Terms of secure sums for every site's policy, without the roster.
        """
        first = {part.machine: name for name, part in reversed(self.parts.items())}
        for site in self.sites:
            self.start(first[site])
        for site in self.sites:  # the first start creates the key and ends
            if code := self._running.pop(first[site]).wait():
                raise RuntimeError(f"{site} ended with {code}: see {self.logs}")
        if sums is not None:
            self._share_roster(sums)
        self.start(first["server"])
        until("the SuperLink", lambda: listens(self.ports["server"]))
        for site in self.sites:
            key = self.folder / site / "state" / "node.key.pub"
            self.operate("flwr", "supernode", "register", str(key), "server", "--name", site)
        for name in self.parts:
            if name not in self._running:
                self.start(name)
        threading.Thread(target=self._restart_what_fails, daemon=True).start()
        for site in self.sites:
            self.wait_online(site)

    def _share_roster(self, terms: str) -> None:
        """Provision again, with the sites' public keys, and have every policy name the roster."""
        keys = self.base / "sum-keys"
        keys.mkdir()
        for site in self.sites:
            shutil.copy(self.folder / site / "state" / "sum.pub", keys / f"{site}.pub")
        roster = read_roster(self._deployment, keys)
        provision(self._deployment, self.folder, roster=roster)
        line = f"secure_sum: {{roster: {roster.fingerprint}, {terms}}}"
        for site in self.sites:
            edit(self.folder / site / "policy.yaml", "# secure_sum: .*", line)
            (self.folder / site / "start.sh").write_text(self._chosen[site])

    def start(self, name: str) -> None:
        """Start a part."""
        part = self.parts[name]
        with self._lock, (self.logs / name).open("ab") as log:
            self._read_from[name] = log.tell()
            self._running[name] = subprocess.Popen(
                part.command,
                cwd=self.folder / part.machine,
                env=self._environment | dict(part.environment),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all processes of a part; if they end, the part is restarted."""
        os.killpg(self._running[name].pid, number)

    def end(self, names: Iterable[str]) -> None:
        """End parts and their processes like an engine: gently, after 20 s by force."""
        with self._lock:  # so that none of them is restarted
            processes = [self._running.pop(name) for name in names if name in self._running]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + 20
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> list[str]:
        """End everything; return the command lines of processes that are left, ideally none."""
        self._stopping.set()
        for process in self._others:
            process.kill()
            process.wait()
        self.end(list(self._running))
        deadline = time.monotonic() + 30  # Flower's processes notice that others are gone
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return list(left.values())

    def read(self, name: str) -> str:
        """Return the output of a part since its newest start."""
        text = (self.logs / name).read_bytes()[self._read_from[name] :].decode(errors="replace")
        return re.sub(r"\x1b\[\d+m", "", text)

    def wait_online(self, site: str) -> None:
        """Wait until a site's SuperNode has been let in."""
        names = [name for name, part in self.parts.items() if part.machine == site]
        until(site, lambda: any("SuperNode ID" in self.read(name) for name in names))

    def processes(self, kind: str = "", machine: str = "") -> dict[int, str]:
        """Return ids, names and command lines of our running processes, or of one machine's.

        They work in one of our folders, or name such a folder or a port.
        """
        ports = [self.ports[machine]] if machine else self.ports.values()
        ours = [f"127.0.0.1:{port}" for port in ports] + ([] if machine else [str(self.base)])
        folder = self.folder / machine if machine else self.base
        listing = subprocess.run(
            ["ps", "-wweo", "pid=,stat=,comm=,args="], capture_output=True, text=True
        )
        found = {}
        for line in listing.stdout.splitlines():
            process, state, command = line.split(maxsplit=2)
            with suppress(OSError):  # the process has ended
                works_there = Path(f"/proc/{process}/cwd").readlink().is_relative_to(folder)
                named = any(own in command for own in ours)
                if kind in command and (works_there or named) and state[0] != "Z":
                    found[int(process)] = command
        return found

    def launch(self, *command: str) -> subprocess.Popen[str]:
        """Start a command of the server's operator."""
        return self.started(str(self.folder / "server" / "operate"), *command)

    def started(self, *command: str) -> subprocess.Popen[str]:
        """Start a command whose output is read; it is ended with everything else."""
        process = subprocess.Popen(
            command,
            cwd=self.base,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._others.append(process)
        return process

    def operate(self, *command: str) -> str:
        """Run a command of the server's operator and return its output.

        Raises:
            RuntimeError: The command failed; the message is its output.
        """
        process = self.launch(*command)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: {output}")
        return output

    def _restart_what_fails(self) -> None:
        """Restart parts that have ended with an error, each after a while."""
        while not self._stopping.wait(RESTART_S):
            with self._lock:
                for name, process in self._running.items():
                    if process.poll():
                        self.start(name)


def edit(path: Path, pattern: str, text: str) -> None:
    """Replace the only matching line of a file, keeping its indentation."""
    found, number = re.subn(f"^(\\s*){pattern}", rf"\g<1>{text}", path.read_text(), flags=re.M)
    if number != 1:
        raise ValueError(f"{path} has {number} lines like {pattern}")
    path.write_text(found)


def until(what: str, found: Callable[[], T]) -> T:
    """Return the first true value of ``found``."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s")
        time.sleep(0.1)
    return value


def listens(port: int) -> bool:
    """Return True if a server on this machine answers on a port."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def free_ports(number: int) -> list[int]:
    """Return loopback ports on which nothing listens."""
    with ExitStack() as stack:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
        for one in sockets:
            stack.enter_context(one)
        return [int(one.getsockname()[1]) for one in sockets]
