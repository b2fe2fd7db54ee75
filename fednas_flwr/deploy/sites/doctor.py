"""``fednas doctor``: faults of a machine of a deployment, and their remedies.

The checks work on a folder that ``provision`` wrote, for the server or for a site, and change
nothing. A check returns its result, or raises :class:`Trouble` with a remedy. Of a connection,
where Flower's own messages name the symptom, these name the cause: TLS or clocks. Main function:
:func:`examine`.
"""

import importlib.metadata
import os
import platform
import shlex
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

import fednas_flwr
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.readers import site_dataset
from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.sites.provision import SERVER_FILE, SITE_FILE
from fednas_flwr.privacy.policy import load_policy
from fednas_flwr.settings.names import CLIENT, SPLITS

LEAST_FREE_GB, SCARCE_FREE_GB = 0.5, 5.0
_ANY_RUN = ("runtime=deployment", "runtime.superlink=server", "partition=sites", "clients=1")
NODE_KEY = Path("state") / "node.key"
TIMEOUT_S = 10.0
LARGEST_LEAD_S, LARGEST_LAG_S = 4.0, 300.0  # of a node's clock; Flower's limits are 5 s and 305 s
SOON_DAYS = 30
# Numbers of OpenSSL's verification errors.
_EXPIRED, _NOT_YET = 10, 9
_WRONG_NAME = (62, 64)  # host name, IP address


class Trouble(Exception):
    """Something is broken; the message says what it is, and the remedy."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        name: Name of the check.
        text: The result; if something is broken, with a remedy.
        broken: True if the machine cannot do its work in this state.
    """

    name: str
    text: str
    broken: bool


def examine(folder: Path) -> list[Finding]:
    """Return the findings on a machine's folder.

    Raises:
        ConfigError: ``provision`` did not write this folder.
    """
    kinds = {SITE_FILE: _SITE, SERVER_FILE: _SERVER}
    file = next((file for file in kinds if (folder / file).is_file()), None)
    if file is None:
        raise ConfigError(
            f"{folder} has no {SITE_FILE} or {SERVER_FILE}: give a folder of `fednas provision`."
        )
    settings, findings = read_settings(folder / file), list[Finding]()
    for check in kinds[file]:
        name = check.__name__.rpartition("_")[2]
        try:
            findings.append(Finding(name, check(folder, settings), broken=False))
        except KeyError as error:
            findings.append(Finding(name, f"{error.args[0]} is not set in the settings", True))
        except (Trouble, ConfigError, OSError, RuntimeError) as error:
            text = " ".join(str(error).split())
            same = [finding.name for finding in findings if finding.text == text]
            findings.append(Finding(name, f"see {same[0]}" if same else text, broken=True))
    return findings


def read_settings(path: Path) -> dict[str, str]:
    """Return the settings in a file of ``KEY=value`` lines, as the shell reads them.

    Raises:
        ConfigError: A line is not of that form.
    """
    settings = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = ["", ""]
        if words:
            key, is_setting, value = words[0].partition("=")
            if len(words) > 1 or not is_setting:
                raise ConfigError(f"{path}, line {number} is not KEY=value: {line!r}.")
            settings[key] = value
    return settings


Settings = Mapping[str, str]


def _versions(folder: Path, settings: Settings) -> str:
    """Return the versions that must agree between server and sites."""
    flwr = importlib.metadata.version("flwr")
    if flwr.rpartition(".")[0] not in flower_patches.VERSIONS:
        raise Trouble(
            f"flwr {flwr} is installed: install fednas_flwr anew, which needs "
            f"{' or '.join(f'{version}.x' for version in flower_patches.VERSIONS)}."
        )
    torch = importlib.metadata.version("torch")
    return (
        f"fednas_flwr {fednas_flwr.__version__}, flwr {flwr}, torch {torch}, Python "
        f"{platform.python_version()}"
    )


def _disk(folder: Path, settings: Settings) -> str:
    """Return the free disk space for the state; everything else may be read-only."""
    state = (folder / "state").resolve()
    free_gb = shutil.disk_usage(state).free / 1e9
    if free_gb < LEAST_FREE_GB:
        raise Trouble(f"{free_gb:.1f} GB free on {state}: make room.")
    if not os.access(state, os.W_OK):
        raise Trouble(f"{state} cannot be written: give it to the user that runs this.")
    scarce = "; soon too little" if free_gb < SCARCE_FREE_GB else ""
    return f"{free_gb:.0f} GB free{scarce}"


def _secrets(folder: Path, settings: Settings) -> str:
    """Check that no secret can be read by other users."""
    secrets = [folder / "server.key", folder / "signing.key", *(folder / "state").glob("*.key")]
    secrets += [folder / NODE_KEY, *(folder / "state").glob("*.secret")]
    found = [path for path in secrets if path.is_file()]
    for path in found:
        if path.stat().st_mode & 0o077:
            raise Trouble(f"{path} can be read by other users: chmod 600 {path}.")
    return f"{len(set(found))} files, readable by this user only"


def _server_certificate(folder: Path, settings: Settings) -> str:
    """Return the names in the certificate in a server's folder, and its validity.

    Raises:
        Trouble: It is not valid now, or does not match ``server.key`` or ``ca.crt``.
    """
    renew = "make a new one by `fednas provision`"
    try:
        certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
        issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = load_pem_private_key((folder / "server.key").read_bytes(), password=None)
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise Trouble(f"server.crt is not of the authority ca.crt ({error}): {renew}.") from error
    if key.public_key() != certificate.public_key():
        raise Trouble(f"server.key does not belong to server.crt: {renew}.")
    now = datetime.now(UTC)
    if now < certificate.not_valid_before_utc:
        raise Trouble(
            f"server.crt is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M}: is this "
            "clock right?"
        )
    days = (certificate.not_valid_after_utc - now).total_seconds() / 86400
    if days < 0:
        raise Trouble(f"server.crt expired {-days:.0f} days ago: {renew}.")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    shown = ", ".join(str(name.value) for name in names)
    soon = f"; {renew} soon" if days < SOON_DAYS else ""
    return f"for {shown}, valid {days:.0f} more days{soon}"


def _server_port(folder: Path, settings: Settings) -> str:
    """Check that a SuperLink answers, or that the port is free for one."""
    port = _port(settings)
    if not is_open(port):
        return f"{port} is free; the server is not running"
    ask_date("127.0.0.1", port, folder / "ca.crt")
    return f"a SuperLink answers on {port}"


def _site_server(folder: Path, settings: Settings) -> str:
    """Check that the server can be reached and is the one that the authority names."""
    host, port = _superlink(settings)
    shake_hands(host, port, folder / "ca.crt")
    return f"{host}:{port} is reached, and its certificate is good"


def _site_clock(folder: Path, settings: Settings) -> str:
    """Check that Flower will accept this machine's signatures; it refuses clocks that are off."""
    skew_s = clock_skew_s(*_superlink(settings), folder / "ca.crt")
    if not -LARGEST_LAG_S < skew_s < LARGEST_LEAD_S:
        side = "ahead of" if skew_s > 0 else "behind"
        raise Trouble(
            f"this clock is {abs(skew_s):.0f} s {side} the server's, which refuses it therefore: "
            "synchronise both by NTP."
        )
    return "agrees with the server's" if abs(skew_s) < 2 else f"{skew_s:+.0f} s off the server's"


def _site_key(folder: Path, settings: Settings) -> str:
    """Check that the node has the key by which the server knows it."""
    key = folder / NODE_KEY
    if not key.is_file():
        raise Trouble(f"there is no {key}: make it by `fednas key {key}`.")
    return f"the server's operator registers {key}.pub; the server's log names refused nodes"


def _site_data(folder: Path, settings: Settings) -> str:
    """Check that policy and data settings are valid and the data can be read."""
    site_dataset(folder / "dataset.yaml", cache=str(folder / "state" / "cache"))
    policy = load_policy(folder / "policy.yaml")
    if settings["DATA_SET"] not in policy.data_sets:
        raise Trouble(
            f"DATA_SET={settings['DATA_SET']} is not in policy.yaml, which has "
            f"{', '.join(policy.data_sets)}: set it to one of these."
        )
    if not settings["DATA_PATH"]:
        raise Trouble(f"DATA_PATH is empty: set it in {folder / SITE_FILE}.")
    data = Path(settings["DATA_PATH"])
    if not data.is_absolute() or not data.exists() or not os.access(data, os.R_OK):
        raise Trouble(f"DATA_PATH={data} is not an absolute path that this user can read.")
    return f"{data} is readable, policy and settings are in order"


def _site_records(folder: Path, settings: Settings) -> str:
    """Describe the records and the share left out; refuse data that no run can use."""
    from fednas_flwr.client.making import check_public, check_unit
    from fednas_flwr.data.loaders import make_client_data
    from fednas_flwr.data.oddities import off_scale
    from fednas_flwr.data.prepared import make_site_data
    from fednas_flwr.data.summary import reading_notes
    from fednas_flwr.pipeline.feasible import check_delta, check_features
    from fednas_flwr.server.reply_checks import MORE_RECORDS
    from fednas_flwr.settings.configuration import parse_config
    from fednas_flwr.settings.hydra_config import compose_tree

    _site_data(folder, settings)
    allowed = load_policy(folder / "policy.yaml").data_sets[settings["DATA_SET"]]
    dataset = site_dataset(folder / "dataset.yaml", cache=str(folder / "state" / "cache"))
    space = "mlp_small" if dataset.name == "csv" else "darts_small"  # any space that takes the data
    config = parse_config(compose_tree([*_ANY_RUN, f"search_space={space}"]))
    config = replace(config, dataset=dataset.at(settings["DATA_PATH"]))
    prepared, (rows,) = make_site_data(config)
    check_public(config, prepared)
    check_unit(allowed.unit, prepared.train)
    if not len(prepared.train):
        raise Trouble("; ".join(["there is no record that can be read", *prepared.train.notes]))
    key = folder / "state" / "split.key"
    text = key.read_text() if key.exists() else "none yet"  # the first start creates it
    shares = allowed.fractions
    parts = make_client_data(prepared, rows, key=text.encode(), fractions=shares, trains=False)
    if not parts.train.num_units:
        none = f"none of the {len(rows):,} records that can be read is one to train on"
        raise Trouble("; ".join([none, *prepared.train.notes]))
    read, notes = prepared.train, reading_notes(prepared)
    if read.schema:  # in units other than those of declared ranges, for example
        notes = [*notes, *off_scale(read.features, read.schema, prepared.mean, prepared.std)]
    try:
        check_features(prepared, [parts])
    except ConfigError as error:
        if not prepared.train.schema:  # for images the settings decide, for a table single records
            raise
        notes = [*notes, f"{error}"]
    if allowed.unit == CLIENT:
        return "; ".join(["the site is protected as a whole", *notes])
    numbers = {split: getattr(parts, split).num_units for split in SPLITS}
    number, declared = sum(numbers.values()), sum(allowed.by_split.values())
    check_delta(allowed, number=number)
    words = f"{number:,} {allowed.unit}s, {numbers['train']:,} of them to train on"
    if number > MORE_RECORDS * declared:
        raise Trouble(
            f"{words}, but policy.yaml declares {declared:,}, and answers of more than "
            f"{MORE_RECORDS:g} times as many may be refused: set records there to a round number "
            "near them, and keep it."
        )
    if number < declared / MORE_RECORDS:
        words += f"; policy.yaml declares {declared:,}: more noise than need be"
    return "; ".join([words, *notes])


def _site_ledger(folder: Path, settings: Settings) -> str:
    """Return the number of rows of the ledger; the check never creates a ledger."""
    from fednas_flwr.privacy.books.ledger import Ledger

    path, key = folder / "state" / "ledger" / "ledger.sqlite", folder / "state" / "ledger.key"
    if not path.exists() and not key.exists():
        return "none yet; the first run makes it"
    with Ledger(path, key) as ledger:
        return f"{ledger.verify()} rows, all intact"


def _site_device(folder: Path, settings: Settings) -> str:
    """Describe the device on which training runs."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if settings["DEVICE"] == "cuda":
        raise Trouble("DEVICE=cuda, but torch finds no GPU: see `nvidia-smi`, or set DEVICE=cpu.")
    return f"no GPU, {os.cpu_count()} cores"


_COMMON: list[Callable[[Path, Settings], str]] = [_versions, _disk, _secrets]
_SERVER = [*_COMMON, _server_certificate, _server_port]
_SITE = [*_COMMON, _site_server, _site_clock, _site_key, _site_data, _site_records]
_SITE += [_site_ledger, _site_device]


def _port(settings: Settings) -> int:
    port = settings["PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise Trouble(f"PORT={port} is not a number from 1 to 65535: correct the settings.")
    return int(port)


def _superlink(settings: Settings) -> tuple[str, int]:
    host, _, port = settings["SUPERLINK"].rpartition(":")
    return host.strip("[]"), _port({"PORT": port})


def shake_hands(host: str, port: int, authority: Path) -> None:
    """Make a TLS connection and close it.

    Raises:
        Trouble: Nothing listens there, or the handshake failed; the message names the cause.
    """
    context = _context(authority)
    try:
        with (
            socket.create_connection((host, port), timeout=TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        raise Trouble(_certificate_trouble(error, host, port)) from error
    except ssl.SSLError as error:
        raise Trouble(
            f"{host}:{port} does not speak TLS ({error.reason}): the server runs with --insecure, "
            "or something else listens there; its operator must start the provisioned one."
        ) from error
    except OSError as error:
        raise Trouble(
            f"{host}:{port} cannot be reached ({error}): is the server running, is the address in "
            "the settings right, do firewalls let this port through?"
        ) from error


def clock_skew_s(host: str, port: int, authority: Path) -> float:
    """Return the seconds by which this clock is ahead of the server's, given in whole seconds.

    Raises:
        Trouble: The server does not answer.
    """
    before = time.time()
    date = ask_date(host, port, authority)
    now = (before + time.time()) / 2
    theirs = parsedate_to_datetime(date).timestamp()
    return min(0.0, now - theirs) or max(0.0, now - theirs - 1)


def ask_date(host: str, port: int, authority: Path) -> str:
    """Return the Date header of the SuperLink's answer to a health check.

    Raises:
        Trouble: No SuperLink answers.
    """
    shake_hands(host, port, authority)  # its errors are plainer
    where, context = f"[{host}]" if ":" in host else host, _context(authority)
    try:
        answer = httpx.get(f"https://{where}:{port}/health", verify=context, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        raise Trouble(f"{host}:{port} does not answer ({error}): restart the server.") from error
    date = answer.headers.get("Date")
    if answer.status_code != 200 or date is None:
        raise Trouble(f"what answers on {host}:{port} is no SuperLink: correct address or port.")
    return date


def is_open(port: int) -> bool:
    """Return True if anything listens on a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _context(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise Trouble(
            f"{authority} is no certificate ({error}): take it from the operator."
        ) from error


def _certificate_trouble(error: ssl.SSLCertVerificationError, host: str, port: int) -> str:
    """Explain a failed verification."""
    where = f"the certificate of {host}:{port}"
    if error.verify_code == _EXPIRED:
        return f"{where} has expired: its operator makes a new one by `fednas provision`."
    if error.verify_code == _NOT_YET:
        return f"{where} is not valid yet: is this machine's clock right?"
    if error.verify_code in _WRONG_NAME:
        return (
            f"{where} does not name {host}: use an address that it names, or its operator adds "
            "this one to server.addresses of sites.yaml and provisions again."
        )
    return (
        f"{where} is not from the authority in ca.crt: this is another server, or ca.crt is not "
        "the one that its operator sent."
    )
