"""``fednas provision``: one folder for each machine of a list of sites, with all that it needs.

``ca/`` stays with the operator and is kept when sites are added. ``server/`` holds the server's key
and certificate, and the key that signs models. A site's folder holds no secret at all: its keys are
made on the site by its start script, which is the same file for every site. The settings that
differ between machines are in ``server.env`` and ``site.env``.

The authority's key signs the server's certificate, which names every address that sites use; a site
holds only the authority's certificate. Files with secrets are readable only by their owner. Main
function: :func:`provision`.
"""

import ipaddress
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from inspect import signature
from pathlib import Path
from string import Template
from typing import Annotated

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import OTHERS_WRITE, make_folder, umask, write_atomically, write_secret
from fednas_flwr.base.foreign import load_json, read_yaml
from fednas_flwr.privacy.policy import is_name, template
from fednas_flwr.protocol.keys import PublicKeys, Roster, SiteKeys, make_signing_key
from fednas_flwr.settings import parser

AUTHORITY_DAYS = 3650
_CLOCK_SLACK = timedelta(hours=1)  # a site whose clock is slow must not refuse a new certificate


def make_authority(folder: Path, *, name: str) -> None:
    """Write ``ca.key`` and ``ca.crt`` (P-256, valid for ten years) into ``folder``.

    Args:
        folder: An existing folder without an authority.
        name: Name of the federation, for the certificate.

    Raises:
        FileExistsError: There is already a key; an authority is never replaced.
    """
    key, subject = ec.generate_private_key(ec.SECP256R1()), _name(f"{name} authority")
    extensions = [
        x509.BasicConstraints(ca=True, path_length=0),
        _usage("key_cert_sign", "crl_sign"),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
    ]
    _write(folder / "ca", key, subject, (subject, key), extensions, days=AUTHORITY_DAYS)


def issue_certificate(
    authority: Path, folder: Path, *, addresses: Sequence[str], days: float
) -> None:
    """Write ``server.key`` and ``server.crt`` into ``folder``, with a new key every time.

    Args:
        authority: Folder of ``ca.key`` and ``ca.crt``.
        folder: An existing folder; an old key and certificate in it are replaced.
        addresses: Host names and IP addresses at which the server is reached; the first is the
            certificate's common name.
        days: Days of validity; negative numbers give an expired certificate, for tests.
    """
    issuer_key = serialization.load_pem_private_key(
        (authority / "ca.key").read_bytes(), password=None
    )
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    extensions = [
        x509.BasicConstraints(ca=False, path_length=None),
        _usage("digital_signature"),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([general_name(address) for address in addresses]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
    ]
    (folder / "server.key").unlink(missing_ok=True)
    issuers = (issuer.subject, issuer_key)
    _write(folder / "server", key, _name(addresses[0]), issuers, extensions, days=days)


def make_node_key(path: Path) -> Path:
    """Write a SuperNode's key (P-384, OpenSSH) to ``path``; return the path of its public key.

    Raises:
        FileExistsError: There is already a key, by which the server knows the node.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH)
    write_secret(path, key.private_bytes(*form, serialization.NoEncryption()))
    text = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return write_atomically(path.with_name(path.name + ".pub"), text)


def make_sum_key(path: Path) -> Path:
    """Write a site's keys for secure sums to ``path``; return the path of its public keys.

    Raises:
        FileExistsError: There are already keys, by which the other sites know this one.
    """
    if path.exists():
        raise FileExistsError(path)
    keys = SiteKeys.at(path).public("")
    public = path.with_suffix(".pub")
    write_atomically(public, json.dumps({"mask": keys.mask, "signature": keys.signature}) + "\n")
    return public


def general_name(address: str) -> x509.GeneralName:
    """Return an address in the form for a certificate: an IP address, or else a host name.

    Example:
        >>> general_name("10.0.0.7"), general_name("fl.example.org")
        (<IPAddress(value=10.0.0.7)>, <DNSName(value='fl.example.org')>)
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*usages: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in usages for name in signature(x509.KeyUsage).parameters})


def _write(
    path: Path,
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey],
    extensions: Sequence[x509.ExtensionType],
    *,
    days: float,
) -> None:
    """Write ``<path>.key`` and ``<path>.crt``; it is valid from now, or a day before it expired."""
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now - _CLOCK_SLACK, end - timedelta(days=1)))
        .not_valid_after(end)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    certificate = builder.sign(issuer[1], hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_secret(path.with_suffix(".key"), key.private_bytes(pem, *plain))
    write_atomically(path.with_suffix(".crt"), certificate.public_bytes(pem))


AUTHORITY, SERVER = "ca", "server"  # names of folders
SERVER_FILE, SITE_FILE = "server.env", "site.env"
ROSTER_FILE = "roster.json"
SIGNING_KEY_FILE = "signing.key"  # next to it signing.pub, with which sites check models
CERTIFICATE_DAYS = 365
POLICY_FILE = "policy.yaml"
SETTINGS = (SERVER_FILE, SITE_FILE, POLICY_FILE, "dataset.yaml")  # files for people to edit
UNIT = "fednas.service"
SCRIPTS = ("start.sh", "operate")  # people start these
_MACHINE = Path(__file__).parent / "folder"  # scripts, the same for all, and templates of settings
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(_HOST.fullmatch(text)) and len(text) < 254
    return True


def _is_site(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name not in (AUTHORITY, SERVER)


MOST = parser.Length(parser.Between(1, 1000))
_EXPECTED = "names of small letters, digits and -, at most 40, other than ca and server"
Address = Annotated[str, parser.Where(_is_address, "a host name or an IP address, without port")]
Site = Annotated[str, parser.Where(_is_site, _EXPECTED)]


@dataclass(frozen=True)
class Server(parser.Checked):
    """The server of a deployment.

    Attributes:
        addresses: Host names and IP addresses of the server; sites use the first.
        port: TCP port.
    """

    addresses: Annotated[tuple[Address, ...], MOST, parser.Distinct()]
    port: Annotated[int, parser.Between(1, 65535)]


@dataclass(frozen=True)
class Deployment(parser.Checked):
    """Contents of ``sites.yaml``.

    Attributes:
        federation: Name for the certificates.
        server: Addresses at which sites reach the server.
        sites: Names of the sites; a site's place in the list is its partition.
    """

    federation: Annotated[parser.Text, parser.Where(is_name, "a name that can be printed")]
    server: Server
    sites: Annotated[tuple[Site, ...], MOST, parser.Distinct()]


@umask(OTHERS_WRITE)
def provision(deployment: Deployment, output: Path, *, roster: Roster | None = None) -> list[Path]:
    """Write the authority, if there is none yet, and the folder of every machine.

    The server's certificate is made anew each time, so provisioning again renews it. Existing
    settings are kept, as they may have been edited. Keys of nodes are not in these folders and
    cannot be lost.

    Args:
        deployment: Result of :func:`load_sites`.
        output: Folder, created if missing.
        roster: Roster of secure sums, which every site gets; None writes no roster.

    Returns:
        The folders of the server and the sites, in this order.
    """
    authority, server = output / AUTHORITY, output / SERVER
    output.mkdir(parents=True, exist_ok=True)
    make_folder(authority)
    if not (authority / "ca.key").exists():
        make_authority(authority, name=deployment.federation)
    if not (authority / SIGNING_KEY_FILE).exists():
        make_signing_key(authority / SIGNING_KEY_FILE)
    port, (first, *_) = deployment.server.port, deployment.server.addresses
    facts: dict[str, object] = {"federation": deployment.federation, "port": port}
    _write_machine("server", authority, server, facts | {"name": SERVER})
    # the server's own processes and its operator reach it by loopback
    addresses = list(dict.fromkeys([*deployment.server.addresses, "localhost", "127.0.0.1"]))
    issue_certificate(authority, server, addresses=addresses, days=CERTIFICATE_DAYS)
    (server / SIGNING_KEY_FILE).unlink(missing_ok=True)
    write_secret(server / SIGNING_KEY_FILE, (authority / SIGNING_KEY_FILE).read_bytes())
    facts["superlink"] = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    facts["partitions"] = len(deployment.sites)
    machines = [server]
    for index, name in enumerate(deployment.sites):
        machines.append(output / name)
        _write_machine("site", authority, output / name, facts | {"name": name, "partition": index})
        if not (output / name / POLICY_FILE).exists():
            (output / name / POLICY_FILE).write_text(template())
        if roster is not None:
            roster.write(output / name / ROSTER_FILE)
    for folder in (authority, *machines):
        for path in (folder, *folder.iterdir()):
            path.chmod(path.stat().st_mode & ~OTHERS_WRITE)  # also files that existed before
    return machines


def read_roster(deployment: Deployment, folder: Path) -> Roster:
    """Return the roster of the public keys that sites have sent, ``<site>.pub`` in a folder.

    Raises:
        ConfigError: A file is missing or has no keys, or two sites have the same keys.
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
    return Roster(tuple(sites))


def load_sites(path: Path) -> Deployment:
    """Read a ``sites.yaml``.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    origin = f"the list of sites {path}"
    tree = read_yaml(path, origin)
    try:
        return parser.parse(Deployment, tree, key="")
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _write_machine(kind: str, authority: Path, folder: Path, facts: Mapping[str, object]) -> None:
    """Write the files of all machines of a kind; existing settings stay unchanged."""
    kept = {name for name in SETTINGS if (folder / name).exists()}
    folder.mkdir(exist_ok=True)
    for path in (*(_MACHINE / kind).iterdir(), _MACHINE / "parts.sh"):
        if path.name not in kept:  # without modes, which an installed package has lost
            shutil.copyfile(path, folder / path.name)
    for script in SCRIPTS:
        if (folder / script).exists():
            (folder / script).chmod(0o755)
    for public in ("ca.crt", "signing.pub"):
        shutil.copyfile(authority / public, folder / public)
    make_folder(folder / "state")
    (folder / "state").chmod(0o700)
    settings = folder / f"{kind}.env"
    if settings.name not in kept:
        _fill(settings, settings, facts)
    _fill(_MACHINE / UNIT, folder / f"fednas-{facts['name']}.service", facts)


def _fill(pattern: Path, path: Path, facts: Mapping[str, object]) -> None:
    """Write a file with each ``$name`` in it replaced."""
    path.write_text(Template(pattern.read_text()).substitute(facts))
