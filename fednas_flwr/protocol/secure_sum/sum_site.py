"""A site's part of a secure sum: it answers, signs and opens each context once and records it.

Before anything is sent, it is recorded in an sqlite file whose every commit is on disk. Main class:
:class:`SumSite`.
"""

import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.privacy.books.anchor import connect
from fednas_flwr.privacy.policy import SumTerms, refused
from fednas_flwr.protocol.keys import Context, Roster, SiteKeys, survivors_message
from fednas_flwr.protocol.secure_sum import masks

_refused = partial(refused, "secure_sum")
BySite = Mapping[int, bytes]
NODE_KEYS = ("roster", "sum-key", "sums")  # keys of a node's configuration
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS answers (
        context TEXT PRIMARY KEY, run TEXT, participants TEXT, part BLOB, survivors TEXT,
        opened INTEGER)
"""


@dataclass(frozen=True)
class Opening:
    """Shares with which the server removes masks from a sum.

    Attributes:
        parts: For each survivor, this site's part of the seed of the survivor's own mask.
        pairs: For each site that has dropped out, the seed of the mask that it shares with this
            one.
    """

    parts: BySite
    pairs: BySite


class SumSite:
    """One site, in any number of processes.

    Args:
        index: The site's place in the roster.
        keys: The site's own keys.
        roster: The roster that it holds.
        terms: Terms of its policy.
        journal: The file of what was answered, signed and opened, created if missing.

    Raises:
        ConfigError: The roster is not that of the policy, or has other keys for this site.
    """

    def __init__(
        self, index: int, keys: SiteKeys, roster: Roster, terms: SumTerms, journal: Path
    ) -> None:
        if roster.fingerprint != terms.roster:
            raise ConfigError(
                f"refused by the policy, rule secure_sum.roster: the roster has the fingerprint "
                f"{roster.fingerprint}, not {terms.roster}; compare it with the other sites' over "
                "another channel than the server's, then correct the policy."
            )
        if index >= len(roster.sites) or keys.public(roster.sites[index].site) not in roster.sites:
            raise ConfigError(
                f"the roster does not hold this site's keys at place {index}: collect the public "
                "keys of all sites anew."
            )
        if terms.least_sites > len(roster.sites):
            raise ConfigError(
                f"secure_sum.least_sites={terms.least_sites} with {len(roster.sites)} sites in the "
                "roster: no sum could ever be opened; lower it."
            )
        self.index, self.roster, self.terms = index, roster, terms
        self._keys, self._journal = keys, journal

    @classmethod
    def of_node(cls, index: int, node: Mapping[str, str], terms: SumTerms) -> "SumSite":
        """Return the site of a node that names its files.

        Args:
            index: The node's place in the roster.
            node: Configuration with the paths ``roster``, ``sum-key`` and, for the journal,
                ``sums``.
            terms: Terms of the node's policy.

        Raises:
            ConfigError: A path is missing, or a file is invalid.
        """
        missing = [key for key in NODE_KEYS if key not in node]
        if missing:
            raise ConfigError(
                f"the policy has secure_sum but the node lacks {', '.join(missing)}: give them."
            )
        if not Path(node["roster"]).exists():
            raise ConfigError(f"there is no roster {node['roster']}: see `fednas provision`.")
        roster, keys, sums = (Path(node[key]) for key in NODE_KEYS)
        return cls(index, SiteKeys.at(keys), Roster.read(roster), terms, sums)

    def begin(self, *, participants: Sequence[int], **place: Any) -> "Answer":
        """Record that a context is answered, before the action reads a record.

        Args:
            participants: See :class:`Context`.
            **place: The other attributes of :class:`Context`, except the roster, which is this
                site's.

        Raises:
            ConfigError: The participants are too few, not in order, not of the roster or without
                this site; or the context was answered before.
        """
        asked = tuple(participants)
        self._check_members("participants", asked, range(len(self.roster.sites)))
        exchange = Context(roster=self.terms.roster, participants=asked, **place)
        context = exchange.digest
        seed = secrets.token_bytes(masks.SECRET_BYTES)
        parts = masks.split(seed, [i + 1 for i in asked], threshold=self.terms.colluding + 1)
        values = (context.hex(), exchange.run, json.dumps(asked), parts[self.index + 1])
        with self._books() as books:
            query = "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, NULL, 0)"
            if not books.execute(query, values).rowcount:
                raise ConfigError(
                    "refused: this request was answered before; a secure sum has one answer."
                )
        return Answer(self, context, asked, seed, parts)

    def sign(self, context: bytes, survivors: Sequence[int]) -> bytes:
        """Return the signature of the only list of survivors that is signed for a context.

        Raises:
            ConfigError: The context was not answered, a list was already signed for it, or the
                policy does not allow this list.
        """
        listed = tuple(survivors)
        with self._books() as books:
            row = self._row(books, context)
            self._check_members("survivors", listed, json.loads(row["participants"]))
            if row["survivors"] is not None:
                raise ConfigError(
                    "refused: a list of survivors was signed for this request; a site signs one."
                )
            values = (json.dumps(listed), context.hex())
            books.execute("UPDATE answers SET survivors = ? WHERE context = ?", values)
        return self._keys.sign(survivors_message(context, listed))

    def open(
        self, context: bytes, survivors: Sequence[int], signatures: BySite, boxes: BySite
    ) -> Opening:
        """Return the masks' parts with which the server unmasks the sum over the survivors.

        Args:
            context: Digest of the exchange.
            survivors: The list that this site has signed.
            signatures: Signatures of all survivors.
            boxes: For each survivor, the sealed part that it has made for this site.

        Raises:
            ConfigError: Another list was signed, a signature is missing or forged, a part is not as
                its site has sealed it, or the context was opened before.
        """
        listed = tuple(survivors)
        with self._books() as books:
            row = self._row(books, context)
            if row["survivors"] is None or tuple(json.loads(row["survivors"])) != listed:
                raise _refused("survivors", list(listed), "the list that this site has signed")
            message = survivors_message(context, listed)
            for i in listed:
                if not self.roster.has_signed(i, signatures.get(i, b""), message):
                    raise ConfigError(
                        f"refused: site {i} has not signed these survivors; all of them must."
                    )
            if row["opened"]:
                raise ConfigError("refused: this sum was opened before.")
            parts = {self.index: bytes(row["part"])}
            parts |= {i: self._unsealed(context, i, boxes) for i in listed if i != self.index}
            books.execute("UPDATE answers SET opened = 1 WHERE context = ?", (context.hex(),))
        dropped = [i for i in json.loads(row["participants"]) if i not in listed]
        return Opening(parts, {i: self.pair_seed(context, i) for i in dropped})

    def pair_seed(self, context: bytes, other: int) -> bytes:
        """Return the seed of the mask that this site shares with another one."""
        return masks.derive(self._secret(other), context, "mask of a pair")

    def part_key(self, context: bytes, sender: int, receiver: int) -> bytes:
        """Return the key of a part's box; this site is its sender or its receiver."""
        other = receiver if sender == self.index else sender
        return masks.derive(self._secret(other), context, f"part of {sender} for {receiver}")

    def _unsealed(self, context: bytes, sender: int, boxes: BySite) -> bytes:
        """Return the part that another site has made for this one."""
        try:
            return masks.unseal(self.part_key(context, sender, self.index), boxes.get(sender, b""))
        except ValueError as error:
            raise ConfigError(
                f"refused, the part of site {sender} is not usable: {error}."
            ) from error

    def _secret(self, other: int) -> bytes:
        return self._keys.shared_secret(self.roster.sites[other])

    def _check_members(self, what: str, members: Sequence[int], sites: Sequence[int]) -> None:
        """Refuse a list unless it has ``least_sites`` or more of the sites, including this one."""
        least = self.terms.least_sites
        if list(members) != sorted(set(members) & set(sites)):
            raise _refused(what, list(members), f"some of the {len(sites)} sites, ascending")
        if self.index not in members or len(members) < least:
            limit = f"{least} or more, with this site, {self.index}, among them"
            raise _refused(what, list(members), limit)

    def _row(self, books: sqlite3.Connection, context: bytes) -> sqlite3.Row:
        row = books.execute("SELECT * FROM answers WHERE context = ?", (context.hex(),)).fetchone()
        if row is None:
            raise ConfigError("refused: this site has answered no such request.")
        return row

    @contextmanager
    def _books(self) -> Iterator[sqlite3.Connection]:
        """Hold the journal's only lock; at the end everything written is on disk, or nothing is."""
        try:
            with closing(connect(self._journal)) as books:
                books.row_factory = sqlite3.Row
                books.execute("BEGIN IMMEDIATE")
                books.execute(_SCHEMA)
                yield books
                books.execute("COMMIT")
        except sqlite3.Error as error:
            raise OSError(
                f"the journal {self._journal} of secure sums is unusable, nothing is sent: {error}."
            ) from error


@dataclass(frozen=True)
class Answer:
    """The only answer to a context, while it is made.

    Attributes:
        site: The site that answers.
        context: Digest of the exchange.
        participants: The sites that were asked.
    """

    site: SumSite
    context: bytes
    participants: tuple[int, ...]
    _seed: bytes
    _parts: BySite

    def mask(self, vectors: Sequence[np.ndarray]) -> dict[int, bytes]:
        """Mask the site's integers, in place, and return the sealed part of every other site."""
        index, boxes = self.site.index, {}
        masks.add_mask(self._seed, vectors, sign=1)
        for i in self.participants:
            if i != index:
                seed = self.site.pair_seed(self.context, i)
                masks.add_mask(seed, vectors, sign=1 if index < i else -1)
                key = self.site.part_key(self.context, index, i)
                boxes[i] = masks.seal(key, self._parts[i + 1])
        return boxes
