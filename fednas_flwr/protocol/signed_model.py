"""Signatures of models that return to the sites: Ed25519, by a key of the server's operator.

A site holds the public half, which came with its provisioned folder and not from the server, so
that it knows whose model it keeps and can show so later. Main functions: :func:`sign_model` and
:func:`is_signed`; :func:`make_signing_key` makes the pair of files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import write_atomically, write_secret

SIGNING_KEY = "FEDNAS_SIGNING_KEY"  # environment variable of the server: path of the private key


def make_signing_key(path: Path) -> Path:
    """Write a new key to ``path`` (PEM, for its owner only) and return its public half's path.

    Raises:
        FileExistsError: There is a key already: sites know the operator by it.
    """
    key = Ed25519PrivateKey.generate()
    write_secret(
        path, key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    )
    public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    return write_atomically(path.with_suffix(".pub"), public)


def sign_model(key_path: Path, *, run: str, model: bytes, card: str) -> str:
    """Return the signature of a run's model and card, 128 hex digits.

    Raises:
        ConfigError: The file holds no private key of Ed25519.
    """
    try:
        key = pem.load_pem_private_key(key_path.read_bytes(), password=None)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"the signing key {key_path} cannot be used: {error}.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the signing key {key_path} is not one of Ed25519.")
    return key.sign(_message(run, model, card)).hex()


def is_signed(public_path: Path, signature: str, *, run: str, model: bytes, card: str) -> bool:
    """Return whether the owner of a public key has signed this model and card of this run.

    Raises:
        ConfigError: The file holds no public key of Ed25519.
    """
    try:
        key = pem.load_pem_public_key(public_path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the public key {public_path} cannot be used: {error}.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"the public key {public_path} is not one of Ed25519.")
    try:
        key.verify(bytes.fromhex(signature), _message(run, model, card))
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(run: str, model: bytes, card: str) -> bytes:
    """Return the bytes to sign: hashes of the model's file and of the card, and the run's name."""
    digests = [hashlib.sha256(part).hexdigest() for part in (model, card.encode())]
    return json.dumps(["fednas model", run, *digests]).encode()
