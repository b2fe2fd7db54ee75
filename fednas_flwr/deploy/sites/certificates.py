"""Keys and certificates of a deployment: an authority, the server's certificate, a node's key.

The authority's key stays with the operator. It signs the server's certificate, which names every
address that sites use; a site holds the authority's certificate alone, and a key of its own that
never leaves it. Files of secrets are readable by their owner only. Used by ``provision``.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fednas_flwr.base.files import write_atomically, write_secret
from fednas_flwr.protocol.secure_sum.roster import SiteKeys

AUTHORITY_DAYS = 3650
_CLOCK_SLACK = timedelta(hours=1)  # a site's clock that is slow must not refuse a new certificate


def make_authority(folder: Path, *, name: str) -> None:
    """Write ``ca.key`` and ``ca.crt`` (P-256, valid for ten years) into ``folder``.

    Args:
        folder: Exists; holds no authority yet.
        name: Of the federation; stands in the certificate.

    Raises:
        FileExistsError: There is a key already: an authority is never replaced.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"{name} authority")
    usage = x509.KeyUsage(
        **dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
    )
    certificate = (
        _builder(subject, subject, key.public_key(), days=AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_secret(folder / "ca.key", _private_pem(key))
    write_atomically(folder / "ca.crt", certificate.public_bytes(Encoding.PEM))


def issue_certificate(
    authority: Path, folder: Path, *, addresses: Sequence[str], days: float
) -> None:
    """Write ``server.key`` and ``server.crt`` into ``folder``, with a new key every time.

    Args:
        authority: Folder of ``ca.key`` and ``ca.crt``.
        folder: Exists; an old key and certificate in it are replaced.
        addresses: Host names and IP addresses under which the server is reached; the first is the
            certificate's common name.
        days: How long it is valid; negative numbers give an expired one, for tests.
    """
    issuer_key = load_pem_private_key((authority / "ca.key").read_bytes(), password=None)
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(**dict.fromkeys(_USAGES, False) | {"digital_signature": True})
    certificate = (
        _builder(_name(addresses[0]), issuer.subject, key.public_key(), days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([general_name(address) for address in addresses]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )
    (folder / "server.key").unlink(missing_ok=True)
    write_secret(folder / "server.key", _private_pem(key))
    write_atomically(folder / "server.crt", certificate.public_bytes(Encoding.PEM))


def make_node_key(path: Path) -> Path:
    """Write a SuperNode's key (P-384, OpenSSH) to ``path`` and return its public half's path.

    Raises:
        FileExistsError: There is a key already: the server knows a node by it.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return write_atomically(path.with_name(path.name + ".pub"), text)


def make_sum_key(path: Path) -> Path:
    """Write a site's keys of secure sums to ``path``; return the path of their public halves.

    Raises:
        FileExistsError: There are keys already: the other sites know this one by them.
    """
    if path.exists():
        raise FileExistsError(path)
    own = SiteKeys.at(path).public("")
    public = path.with_suffix(".pub")
    write_atomically(public, json.dumps({"mask": own.mask, "signature": own.signature}) + "\n")
    return public


def general_name(address: str) -> x509.GeneralName:
    """Return an address as a certificate holds it: an IP address, or else a host name.

    Example:
        >>> general_name("10.0.0.7"), general_name("fl.example.org")
        (<IPAddress(value=10.0.0.7)>, <DNSName(value='fl.example.org')>)
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, days: float
) -> x509.CertificateBuilder:
    """Return a certificate without extensions that begins now, or a day before it expired."""
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now - _CLOCK_SLACK, end - timedelta(days=1)))
        .not_valid_after(end)
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
