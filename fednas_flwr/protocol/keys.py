"""Keys and signatures: of the sites of a secure sum, and of the operator who signs models.

A site is known by its index, its place in the roster of all sites' public keys. Main classes:
:class:`SiteKeys`, :class:`Roster` and :class:`Context`.

Models that return to the sites are signed (Ed25519) with a key of the server's operator. A site
holds the public key, which came with its provisioned folder and not from the server. It therefore
knows whose model it keeps and can prove it later. Main functions: :func:`sign_model` and
:func:`is_signed`; :func:`make_signing_key` makes the pair of files.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import make_key, read_key, write_atomically, write_secret
from fednas_flwr.base.foreign import load_json
from fednas_flwr.settings.names import MOST_SITES
from fednas_flwr.settings.parser import Between, Checked, Conflicts, Length, Where, parse

KEY_BYTES = 32
SIGNING_KEY = "FEDNAS_SIGNING_KEY"  # environment variable of the server: path of the private key


def is_hex(digits: int, text: str) -> bool:
    """Return True if a text is a number of exactly ``digits`` hex digits."""
    return re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


Hex = Annotated[str, Where(partial(is_hex, 2 * KEY_BYTES), "64 hex digits")]


@dataclass(frozen=True)
class PublicKeys(Checked):
    """A site's public keys: X25519 for masks, Ed25519 for signatures."""

    site: str
    mask: Hex
    signature: Hex


class SiteKeys:
    """A site's own keys, in a file that only its owner can read.

    Args:
        seed: 64 random bytes: the secret keys of X25519 and of Ed25519.
    """

    def __init__(self, seed: bytes) -> None:
        self._mask = X25519PrivateKey.from_private_bytes(seed[:KEY_BYTES])
        self._signature = Ed25519PrivateKey.from_private_bytes(seed[KEY_BYTES:])

    @classmethod
    def at(cls, path: Path) -> "SiteKeys":
        """Return the keys in a file; if there is none, it is created with new keys.

        Raises:
            ConfigError: Others can read the file, or it holds no keys.
        """
        make_key(path, 2 * KEY_BYTES)
        return cls(read_key(path, 2 * KEY_BYTES))

    def public(self, site: str) -> PublicKeys:
        """Return the public keys under the name of the site."""
        mask = self._mask.public_key().public_bytes_raw()
        return PublicKeys(site, mask.hex(), self._signature.public_key().public_bytes_raw().hex())

    def shared_secret(self, other: PublicKeys) -> bytes:
        """Return the 32 bytes that only this site and another one share."""
        return self._mask.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other.mask)))

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes."""
        return self._signature.sign(message)


@dataclass(frozen=True)
class Roster(Checked):
    """The public keys of all sites, in the order of their indices."""

    sites: Annotated[tuple[PublicKeys, ...], Length(Between(2, MOST_SITES))]

    def conflicts(self) -> Conflicts:
        """Refuse a name or a key that occurs twice."""
        named = {site.site for site in self.sites}
        keys = {key for site in self.sites for key in (site.mask, site.signature)}
        twice = len(named) < len(self.sites) or len(keys) < 2 * len(self.sites)
        yield twice, "sites: a name or a key stands twice in the roster of secure sums"

    @property
    def fingerprint(self) -> str:
        """64 hex digits that people compare over a channel other than the server."""
        return hashlib.sha256(_canonical([asdict(site) for site in self.sites])).hexdigest()

    def write(self, path: Path) -> None:
        """Write the roster as JSON."""
        write_atomically(path, json.dumps([asdict(site) for site in self.sites], indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Roster":
        """Return the roster in a file.

        Raises:
            ConfigError: The file cannot be read, or is no roster.
        """
        try:
            return parse(cls, {"sites": load_json(path.read_text("utf-8"))}, key="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the roster {path} cannot be used: {error}") from error

    def has_signed(self, index: int, signature: bytes, message: bytes) -> bool:
        """Return True if a site has signed a message."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.sites[index].signature))
            key.verify(signature, message)
        except (IndexError, InvalidSignature):
            return False
        return True


@dataclass(frozen=True)
class Context:
    """The exchange to which a mask belongs; see the package ``secure_sum``.

    Attributes:
        roster: Fingerprint of the roster.
        run: Name of the run.
        attempt: Random text from the server, new for every exchange that it begins.
        stage: One of ``privacy.plan.STAGES``.
        round: Number of the round in the stage.
        phase: Number of the exchange in the round.
        participants: Indices of the sites that are asked, ascending.
        agreed: JSON values of everything else on which the sites must agree
            (``client.answer.agreed``).
    """

    roster: str
    run: str
    attempt: str
    stage: str
    round: int
    phase: int
    participants: tuple[int, ...]
    agreed: Mapping[str, Any]

    @property
    def digest(self) -> bytes:
        """32 bytes that differ if anything in the context differs."""
        return hashlib.sha256(_canonical(asdict(self))).digest()


def survivors_message(context: bytes, survivors: tuple[int, ...]) -> bytes:
    """Return the bytes that a site signs for the list of survivors of one context."""
    return _canonical(["survivors", context.hex(), list(survivors)])


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def make_signing_key(path: Path) -> Path:
    """Write a new key to ``path`` (PEM, for its owner only); return the path of its public key.

    Raises:
        FileExistsError: There is already a key, by which sites know the operator.
    """
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    write_secret(path, secret)
    public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    return write_atomically(path.with_suffix(".pub"), public)


def sign_model(key_path: Path, *, run: str, model: bytes, card: str) -> str:
    """Return the signature of a run's model and card, 128 hex digits.

    Raises:
        ConfigError: The file holds no private key of Ed25519.
    """
    key = _loaded(key_path, Ed25519PrivateKey, partial(pem.load_pem_private_key, password=None))
    return key.sign(_model_message(run, model, card)).hex()


def is_signed(public_path: Path, signature: str, *, run: str, model: bytes, card: str) -> bool:
    """Return True if the owner of a public key has signed this model and card of this run.

    Raises:
        ConfigError: The file holds no public key of Ed25519.
    """
    key = _loaded(public_path, Ed25519PublicKey, pem.load_pem_public_key)
    try:
        key.verify(bytes.fromhex(signature), _model_message(run, model, card))
    except (InvalidSignature, ValueError):
        return False
    return True


def _loaded(path: Path, kind: type, load: Callable[[bytes], Any]) -> Any:
    """Return the key of this kind in a PEM file; ConfigError if the file holds none."""
    try:
        key = load(path.read_bytes())
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"the key {path} cannot be used: {error}.") from error
    if not isinstance(key, kind):
        raise ConfigError(f"the key {path} is no {kind.__name__}.")
    return key


def _model_message(run: str, model: bytes, card: str) -> bytes:
    """Return the bytes to sign: hashes of the model's file and of the card, and the run's name."""
    digests = [hashlib.sha256(part).hexdigest() for part in (model, card.encode())]
    return json.dumps(["fednas model", run, *digests]).encode()
