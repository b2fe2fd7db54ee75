"""``fednas provision``: from a list of sites one folder per machine, with all that it needs.

``ca/`` stays with the operator and is kept when sites are added. ``server/`` holds the server's key
and certificate, and the key that signs models; a site's folder holds no secret at all: its keys are
made on the site, by its start script, which is the same file for every site. What differs from
machine to machine is in ``server.env`` and ``site.env``. Main function: :func:`provision`.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import OTHERS_WRITE, make_folder, umask, write_secret
from fednas_flwr.base.foreign import load_json, read_yaml
from fednas_flwr.deploy.sites.certificates import issue_certificate, make_authority
from fednas_flwr.privacy.policy import template
from fednas_flwr.protocol.secure_sum.roster import PublicKeys, Roster
from fednas_flwr.protocol.signed_model import make_signing_key
from fednas_flwr.settings.parser import (
    Between,
    Checked,
    Length,
    Text,
    check_distinct,
    check_range,
    parse,
)

AUTHORITY, SERVER = "ca", "server"  # names of folders
SERVER_FILE, SITE_FILE = "server.env", "site.env"
ROSTER_FILE = "roster.json"
SIGNING_KEY_FILE = "signing.key"  # beside it signing.pub, by which sites know models that return
CERTIFICATE_DAYS = 365
SETTINGS = (SERVER_FILE, SITE_FILE, "policy.yaml", "dataset.yaml")  # for people to edit
UNIT = "fednas.service"
SCRIPTS = ("start.sh", "operate")  # which one starts
_MACHINE = Path(__file__).parent / "folder"  # scripts, the same for all, and patterns of settings
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


Names = Annotated[tuple[Text, ...], Length(Between(1, 1000))]


@dataclass(frozen=True)
class Server(Checked):
    """The server of a deployment.

    Attributes:
        addresses: Host names and IP addresses; sites use the first.
        port: TCP port.
    """

    addresses: Names
    port: Annotated[int, Between(1, 65535)]

    def __post_init__(self) -> None:
        """Check the range of the port, and every address."""
        super().__post_init__()
        check_distinct("addresses", self.addresses)
        for address in self.addresses:
            expected = "a host name or an IP address, without port"
            check_range(_is_address(address), "addresses", address, expected)


@dataclass(frozen=True)
class Deployment(Checked):
    """Contents of ``sites.yaml``.

    Attributes:
        federation: A name for the certificates.
        server: Where sites reach it.
        sites: Names of the sites; a site's place in the list is its partition.
    """

    federation: Text
    server: Server
    sites: Names

    def __post_init__(self) -> None:
        """Check the names."""
        super().__post_init__()
        shown = self.federation.strip() and self.federation.isprintable()
        check_range(bool(shown), "federation", self.federation, "a name that can be printed")
        check_distinct("sites", self.sites)
        for name in self.sites:
            usable = _NAME.fullmatch(name) is not None and name not in (AUTHORITY, SERVER)
            expected = "names of small letters, digits and -, at most 40, other than ca and server"
            check_range(usable, "sites", name, expected)


def provision(
    deployment: Deployment, output: Path, *, as_zip: bool, roster: Roster | None = None
) -> list[Path]:
    """Write the authority, if there is none yet, and what every machine needs.

    The server's certificate is made anew each time, so provisioning again renews it. Settings that
    are there are kept: they may have been edited. Keys of nodes are not here to be lost.

    Args:
        deployment: What :func:`load_sites` returns.
        output: A folder, created if missing.
        as_zip: Write a zip archive per machine in place of its folder.
        roster: Of secure sums, which every site gets; None leaves out what there may be.

    Returns:
        The paths for server and sites, in their order.
    """
    with umask(OTHERS_WRITE):
        return _provision(deployment, output, as_zip=as_zip, roster=roster)


def _provision(
    deployment: Deployment, output: Path, *, as_zip: bool, roster: Roster | None
) -> list[Path]:
    authority, server = output / AUTHORITY, output / SERVER
    output.mkdir(parents=True, exist_ok=True)
    make_folder(authority)
    if not (authority / "ca.key").exists():
        make_authority(authority, name=deployment.federation)
    if not (authority / SIGNING_KEY_FILE).exists():
        make_signing_key(authority / SIGNING_KEY_FILE)
    machines = [_write_server(deployment, authority, server)]
    for index, name in enumerate(deployment.sites):
        machines.append(_write_site(deployment, index, authority, output / name))
        if roster is not None:
            roster.write(output / name / ROSTER_FILE)
    for folder in (authority, *machines):
        for path in (folder, *folder.iterdir()):
            path.chmod(path.stat().st_mode & ~OTHERS_WRITE)  # also what was there before
    if not as_zip:
        return machines
    archives = [folder.with_name(f"{folder.name}.zip") for folder in machines]
    for folder, archive in zip(machines, archives, strict=True):
        archive.touch(mode=0o600)
        archive.chmod(0o600)
        shutil.make_archive(str(folder), "zip", folder)
        shutil.rmtree(folder)
    return archives


def read_roster(deployment: Deployment, folder: Path) -> Roster:
    """Return the roster of the public keys that sites have sent, ``<site>.pub`` in a folder.

    Raises:
        ConfigError: One is missing or is none, or two sites have the same keys.
    """
    sites = []
    for name in deployment.sites:
        path = folder / f"{name}.pub"
        try:
            sites.append(PublicKeys(name, **load_json(path.read_text(encoding="ascii"))))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} holds no public keys of {name} ({error}): have state/sum.pub sent by the "
                "site, which makes it at its first start."
            ) from error
    return Roster.of(sites)


def load_sites(path: Path) -> Deployment:
    """Read a ``sites.yaml``.

    Raises:
        ConfigError: It cannot be read, or a key or value is wrong.
    """
    origin = f"the list of sites {path}"
    tree = read_yaml(path, origin)
    try:
        deployment: Deployment = parse(Deployment, tree, key="")
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return deployment


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(_HOST.fullmatch(text)) and len(text) < 254
    return True


def _write_server(deployment: Deployment, authority: Path, folder: Path) -> Path:
    """Write the server's folder; its own processes and its operator reach it by loopback."""
    kept = _copy(SERVER, authority, folder)
    addresses = list(dict.fromkeys([*deployment.server.addresses, "localhost", "127.0.0.1"]))
    issue_certificate(authority, folder, addresses=addresses, days=CERTIFICATE_DAYS)
    (folder / SIGNING_KEY_FILE).unlink(missing_ok=True)
    write_secret(folder / SIGNING_KEY_FILE, (authority / SIGNING_KEY_FILE).read_bytes())
    facts = {"federation": deployment.federation, "port": deployment.server.port, "name": SERVER}
    if SERVER_FILE not in kept:
        _fill(folder / SERVER_FILE, folder / SERVER_FILE, facts)
    _fill(_MACHINE / UNIT, folder / f"fednas-{SERVER}.service", facts)
    return folder


def _write_site(deployment: Deployment, index: int, authority: Path, folder: Path) -> Path:
    """Write a site's folder, with a policy and settings for its engineer to edit."""
    kept = _copy("site", authority, folder)
    address, name = deployment.server.addresses[0], deployment.sites[index]
    host = f"[{address}]" if ":" in address else address
    facts = {
        "federation": deployment.federation,
        "name": name,
        "superlink": f"{host}:{deployment.server.port}",
        "partition": index,
        "partitions": len(deployment.sites),
    }
    if SITE_FILE not in kept:
        _fill(folder / SITE_FILE, folder / SITE_FILE, facts)
    _fill(_MACHINE / UNIT, folder / f"fednas-{name}.service", facts)
    if "policy.yaml" not in kept:
        (folder / "policy.yaml").write_text(template())
    return folder


def _copy(kind: str, authority: Path, folder: Path) -> set[str]:
    """Write the files that all machines of a kind share; return the settings left as they were."""
    kept = {name for name in SETTINGS if (folder / name).exists()}
    folder.mkdir(exist_ok=True)
    for path in (*(_MACHINE / kind).iterdir(), _MACHINE / "parts.sh"):
        if path.name not in kept:  # without modes: an installed package has lost them
            shutil.copyfile(path, folder / path.name)
    for script in SCRIPTS:
        if (folder / script).exists():
            (folder / script).chmod(0o755)
    for public in ("ca.crt", "signing.pub"):
        shutil.copyfile(authority / public, folder / public)
    make_folder(folder / "state")
    (folder / "state").chmod(0o700)
    return kept


def _fill(pattern: Path, path: Path, facts: Mapping[str, object]) -> None:
    """Write a file with each ``$name`` in it replaced."""
    path.write_text(Template(pattern.read_text()).substitute(facts))
