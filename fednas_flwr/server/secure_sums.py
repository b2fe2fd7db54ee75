"""The server's side of secure sums: masked replies, and the openings that unmask the total."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fednas_flwr.base.errors import ReplyError
from fednas_flwr.protocol import messages, sum_encoding
from fednas_flwr.protocol.secure_sum import masks, sum_site
from fednas_flwr.protocol.sum_requests import OpenMasks, SignSurvivors, Summed, by_index
from fednas_flwr.server.exchange import Exchange


class MaskedSum:
    """The running sum of masked vectors.

    Args:
        participants: Indices of the sites that are asked.

    Attributes:
        survivors: The sites whose vectors are in the sum.
        vectors: The sum, modulo two to the power of each vector's width. Vectors are added in
            place, so that the sum takes the memory of one reply.
    """

    def __init__(self, participants: Sequence[int]) -> None:
        """Start an empty sum."""
        self.participants = list(participants)
        self.survivors: list[int] = []
        self.vectors: list[np.ndarray] = []

    def add(self, site: int, vectors: Sequence[np.ndarray]) -> None:
        """Add a site's vectors; all sites send the same shapes and types."""
        if not self.survivors:
            self.vectors = [np.zeros_like(vector) for vector in vectors]
        for total, vector in zip(self.vectors, vectors, strict=True):
            total += vector  # integers wrap around
        self.survivors.append(site)

    def unmask(self, openings: Mapping[int, sum_site.Opening]) -> list[np.ndarray]:
        """The sum of the vectors that the survivors have masked.

        Args:
            openings: Parts that survivors have opened.

        Raises:
            ValueError: The openings do not suffice.
        """
        for i in self.survivors:
            parts = {j + 1: o.parts[i] for j, o in openings.items() if i in o.parts}
            masks.add_mask(masks.rebuild(parts), self.vectors, sign=-1)
        for d in set(self.participants) - set(self.survivors):
            for i in self.survivors:
                if i not in openings or d not in openings[i].pairs:
                    raise ValueError(
                        f"site {i} has dropped out after site {d}, or keeps back the mask that "
                        "they share, which only it could open."
                    )
                masks.add_mask(openings[i].pairs[d], self.vectors, sign=-1 if i < d else 1)
        return self.vectors


@dataclass
class PendingSum:
    """A secure sum that is under way.

    Attributes:
        summands: Encoding of the replies to sum.
        total: Sum of the masked vectors.
        context: Context of the sum, as its first client states it.
        boxes: For each client, the sealed parts that it has made for the others.
    """

    summands: sum_encoding.Summands
    total: MaskedSum
    context: str = ""
    boxes: dict[int, Mapping[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(
        exchange: Exchange, clients: Sequence[int], properties: Mapping[int, Mapping[str, Any]]
    ) -> "PendingSum":
        """Begin a sum over clients; sums with shared noise have a known range and take 32 bits.

        Args:
            exchange: The exchange.
            clients: All clients that can be asked, ascending.
            properties: Properties of each client.
        """
        ranges = {
            kind: max((release.sum_range(properties[i]["splits"]) for i in clients), default=0)
            for kind, release in exchange.planned.items()
            if release.shared
        }
        summed = Summed(secrets.token_hex(8), tuple(clients), ranges)
        sizes = {name: layout.sizes for name, layout in exchange.layouts.items()}
        summands = sum_encoding.Summands(exchange.action, sizes, summed, exchange.states)
        return PendingSum(summands, MaskedSum(tuple(clients)))

    def add(self, client: int, reply: messages.Reply) -> None:
        """Add a masked reply.

        Raises:
            ReplyError: The client's answer has another context than earlier ones; it is not known
                which is wrong.
        """
        self.context = self.context or reply.properties["context"]
        if reply.properties["context"] != self.context:
            raise ReplyError(
                "it has answered another request than the clients before it, or has another policy "
                f"or other data settings: compare them with those of client {min(self.boxes)}."
            )
        self.boxes[client] = reply.properties["boxes"]
        vectors = reply.states[sum_encoding.MASKED]
        self.total.add(client, [vectors[d].numpy() for d in self.summands.lengths])

    def sign_request(self) -> SignSurvivors:
        """The request to the survivors to sign their list."""
        return SignSurvivors(context=self.context, survivors=tuple(self.total.survivors))

    def open_requests(self, signatures: Mapping[int, str]) -> dict[int, OpenMasks]:
        """The request to each survivor to open masks, with all signatures."""
        survivors = tuple(self.total.survivors)
        signed = {str(client): signature for client, signature in signatures.items()}
        one = OpenMasks(context=self.context, survivors=survivors, signatures=signed, boxes={})
        requests = {}
        for client in survivors:
            boxes = {str(i): b[str(client)] for i, b in self.boxes.items() if str(client) in b}
            requests[client] = replace(one, boxes=boxes)
        return requests

    def unmask(self, opened: Mapping[int, Mapping[str, Any]]) -> messages.Reply:
        """The reply that holds the total.

        Args:
            opened: For each survivor, the properties of its opening.

        Raises:
            LookupError: Too few survivors have opened their masks.
            ValueError: The total cannot come from honest replies.
        """
        openings = {
            client: sum_site.Opening(by_index(properties["parts"]), by_index(properties["pairs"]))
            for client, properties in opened.items()
        }
        named = dict(zip(self.summands.lengths, self.total.unmask(openings), strict=True))
        return self.summands.decode(named, sites=len(self.total.survivors))
