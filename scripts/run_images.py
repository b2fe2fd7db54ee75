"""Run a search on a server and three sites in images of `scripts/build_images.sh`, by crun as root.

Every service of docker/compose.yaml is a separate container with the settings in that file: image,
command, volumes, user 49999, a read-only root, a tmpfs, no capabilities, no new privileges. Host
names are 127.0.0.1, since all containers share this machine's network. The file's networks, and
what else docker/README.md names, are not tried. Arguments are further overrides of `fednas run`;
FEDNAS_TAG is the images' tag, FEDNAS_RESULTS a new folder for all results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from deploy_local import check_books, write_data
from loopback import SITES, Machines, Part, edit, free_ports

from fednas_flwr.deploy.sites.provision import Server, load_sites
from fednas_flwr.runs.events import read_events
from fednas_flwr.runs.numbers import EVENTS_FILE

DOCKER = Path(__file__).parents[1] / "docker"
USER = 49999
AS_USER = ("--cwd", "/fednas", "--user", f"{USER}:{USER}", "--no-new-privs")
RUN = Path("/fednas/state/run")  # in the server's containers
# crun refuses a machine with both versions of cgroups, and should use none.
ONE_CGROUP = "umount -R -l /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup"
CRUN = (
    *("unshare", "--mount", "sh", "-c"),
    f'{ONE_CGROUP}; exec crun --cgroup-manager=disabled "$@"',
    "crun",
)
SEARCH = [
    *("runtime=deployment", "runtime.superlink=server", "runtime.quorum=1", "partition=sites"),
    *("dataset=npz", "dataset.server_test=false", "clients=3", "rounds=1", "retrain.rounds=1"),
    *("algorithm=dp_fnas", "privacy=dp", "privacy.data_set=my-data", "privacy.epsilon=50"),
    *("algorithm.batch_size=64", "search_space.channels=4", "retrain.channels=4"),
    *("runtime.device=cpu", "trackers=[]", f"run_dir={RUN}"),
]


class Containers(Machines):
    """The machines' parts as containers.

    Args:
        base: See :class:`Machines`.
        services: Services of the compose file.
        roots: Mounted files and settings of each image.
        **others: See :class:`Machines`.
    """

    def __init__(
        self, base: Path, services: dict[str, Any], roots: dict[str, Any], **others: Any
    ) -> None:
        """Create the folders, and a bundle for every service."""
        parts = {name: Part(machine_of(service)) for name, service in services.items()}
        super().__init__(base, parts=parts, **others)
        self.prefix = f"{base.name}-"
        for site in SITES:
            edit(self.folder / site / "site.env", r"DATA_PATH=.*", f"DATA_PATH=/data/{site}.npz")
            policy = self.folder / site / "policy.yaml"
            edit(policy, r"least_noise_multiplier: .*", "least_noise_multiplier: .1")  # few records
        for name, service in services.items():
            part, bundle = parts[name], base / "bundles" / name
            bundle.mkdir(parents=True)
            root, image = roots[service["image"]]
            volumes = {"./deployment": self.folder, "${": base / "data" / part.machine}
            spec = specification(service, root, image, volumes)
            (bundle / "config.json").write_text(json.dumps(spec))
            command = (*CRUN, "run", "-b", str(bundle), self.prefix + name)
            parts[name] = replace(part, command=command)
        for machine in ("server", *SITES):
            (self.folder / machine / "state").mkdir(exist_ok=True)
        for path in [self.folder, *self.folder.rglob("*")]:
            os.chown(path, USER, USER)

    def launch(self, *command: str) -> subprocess.Popen[str]:
        """Start a command of the server's operator in the SuperLink's container."""
        given = []
        for argument in command:
            if argument.startswith(str(self.folder)):  # a site's public key
                key = Path(argument)
                copied = self.folder / "server" / "state" / f"{key.parts[-3]}.pub"
                shutil.copy(key, copied)
                os.chown(copied, USER, USER)
                argument = f"state/{copied.name}"
            given.append(argument)
        inside = ("exec", *AS_USER, f"{self.prefix}superlink", "./operate", *given)
        return self.started(*CRUN, *inside)

    def stop(self) -> list[str]:
        """End everything and remove the containers; return the processes that were left."""
        left = super().stop()
        for name in self.parts:
            subprocess.run([*CRUN, "delete", "--force", self.prefix + name], capture_output=True)
        return left


def machine_of(service: dict[str, Any]) -> str:
    """Return the folder of ``deployment`` that belongs to a service."""
    return Path(service["volumes"][0].split(":")[0]).name


def specification(
    service: dict[str, Any], root: str, image: dict[str, Any], volumes: dict[str, Path]
) -> dict[str, Any]:
    """Return the OCI runtime's configuration of a service.

    Args:
        service: Service of the compose file.
        root: Folder of the image's files.
        image: Settings of the image.
        volumes: Replacements for the beginnings of volumes' sources.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["crun", "spec"], cwd=folder, check=True)
        spec: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    own = {k: local(v) for k, v in service.get("environment", {}).items()}
    user, group = (int(number) for number in service["user"].split(":"))
    spec["root"] = {"path": root, "readonly": service["read_only"]}
    spec["process"] |= {
        "terminal": False,
        "user": {"uid": user, "gid": group},
        "args": service["command"],
        "cwd": service["working_dir"],
        "env": [*image["Env"], "HOME=/home/app", *(f"{k}={v}" for k, v in own.items())],
        "capabilities": {},
        "noNewPrivileges": "no-new-privileges:true" in service["security_opt"],
        "rlimits": [],
    }
    assert service["cap_drop"] == ["ALL"]
    spec["mounts"] = [m for m in spec["mounts"] if m["type"] != "cgroup"]
    spec["mounts"] += [
        {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]}
        for path in service["tmpfs"]
    ]
    bound = {"/etc/hosts": "/etc/hosts:ro"}
    for volume in service["volumes"]:
        beginning = next(start for start in volumes if volume.startswith(start))
        inside = volume.removesuffix(":ro").rpartition(":")[0]
        own_part = inside.removeprefix(beginning) if beginning.startswith(".") else ""
        bound[f"{volumes[beginning]}{own_part}"] = volume.removeprefix(f"{inside}:")
    for source, target in bound.items():
        path, _, mode = target.partition(":")
        options = ["rbind", mode or "rw"]
        spec["mounts"] += [
            {"destination": path, "type": "bind", "source": source, "options": options}
        ]
    kinds = [n for n in spec["linux"]["namespaces"] if n["type"] not in ("network", "cgroup")]
    spec["linux"] = spec["linux"] | {"namespaces": kinds, "resources": {}}
    return spec


def local(value: str) -> str:
    """Return a service's setting with host names of the compose file replaced by this machine."""
    return re.sub(r"^[a-z-]+$", "127.0.0.1", value)


def buildah(*arguments: str) -> str:
    """Run a command of buildah and return its output."""
    done = subprocess.run(["buildah", *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def main(overrides: list[str]) -> int:
    """Run the search; return the exit code."""
    tag = os.environ.get("FEDNAS_TAG", "latest")
    results = os.environ.get("FEDNAS_RESULTS") or tempfile.mkdtemp(prefix="fednas-images-")
    base = Path(results).resolve()
    base.mkdir(exist_ok=True)
    base.chmod(0o755)
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    data, records = write_data(base / "data")
    for site, path in data.items():
        (base / "data" / site).mkdir()
        data[site] = path.rename(base / "data" / site / f"{site}.npz")
    listed = load_sites(DOCKER / "sites.yaml")
    deployment = replace(listed, server=Server(("127.0.0.1",), free_ports(1)[0]))
    names, begun = [str(digit) for digit in range(10)], time.monotonic()
    made = {}
    try:
        roots = {}
        for image in {service["image"] for service in services.values()}:
            made[image] = buildah("from", "--pull-never", f"{image}:{tag}")
            settings = json.loads(buildah("inspect", "--type", "image", f"{image}:{tag}"))
            roots[image] = (buildah("mount", made[image]), settings["OCIv1"]["config"])
        machines = Containers(
            *(base, services, roots),
            deployment=deployment,
            data=data,
            records=records,
            class_names=names,
        )
        try:
            machines.begin()
            print(f"{len(services)} containers are up after {time.monotonic() - begun:.0f} s")
            print(machines.operate("fednas", "run", *SEARCH, *overrides))
        finally:
            left = machines.stop()
    finally:
        for container in made.values():
            buildah("rm", container)
    events = read_events(machines.folder / "server" / RUN.relative_to("/fednas") / EVENTS_FILE)
    failed = [event for event in events if event["event"] == "client_failed"]
    check_books(machines)
    print(f"{events[-1].get('status')}, {len(failed)} failures, {len(left)} processes were left")
    return int(events[-1].get("status") != "completed" or bool(failed) or bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
