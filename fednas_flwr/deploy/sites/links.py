"""Checks of the connection between two machines of a deployment, with causes: TLS and clocks.

Flower's own messages name the symptom; these name the cause and a remedy. ``doctor`` uses them.
"""

import socket
import ssl
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

TIMEOUT_S = 10.0
LARGEST_LEAD_S, LARGEST_LAG_S = 4.0, 300.0  # of a node's clock; Flower's limits are 5 s and 305 s
SOON_DAYS = 30
# Numbers of OpenSSL's verification errors.
_EXPIRED, _NOT_YET = 10, 9
_WRONG_NAME = (62, 64)  # host name, IP address


class Trouble(Exception):
    """Something is broken; the message says what it is, and the remedy."""


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


def describe_certificate(folder: Path) -> str:
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
