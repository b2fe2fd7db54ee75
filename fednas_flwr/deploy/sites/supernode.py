"""Flower's SuperNode, which here asks sooner and gives up replies that stay incomplete.

``python -m fednas_flwr.deploy.sites.supernode`` takes the arguments of ``flower-supernode``. A
client process hands its reply over in pieces. Flower 1.41 waits for the next piece without end and
takes no other message meanwhile: if the process were killed in the middle, its site would be lost
to all runs. Here such a reply is given up; Flower informs the server app after three minutes.
Flower asks for messages every three seconds; here a node asks more often after a message, as in a
round.
"""

import time
from typing import Any

from flwr.supercore.object_store import ObjectStore
from flwr.supernode.cli import flower_supernode

from fednas_flwr.deploy import flower_patches

PATIENCE_S = 60.0  # for one piece, from a process on the same machine
SHORTEST_S, LONGEST_S = 0.2, 3.0  # between two requests for a message; the latter is Flower's value
SHARE = 0.1  # a pause, as a share of the time since the last message
REPLY_S = 0.1  # until the next look for a reply, which is in memory


class ImpatientStore:
    """An object store whose reader gives up.

    Args:
        store: Flower's object store.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._waiting: dict[str, float] = {}  # object -> time since when it is awaited

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the store itself."""
        return getattr(self._store, name)

    def get(self, object_id: str) -> bytes | None:
        """Return an object; empty while it has not arrived.

        Raises:
            TimeoutError: It has not arrived within ``PATIENCE_S``.
        """
        content = self._store.get(object_id)
        if content == b"":
            now = time.monotonic()
            if now - self._waiting.setdefault(object_id, now) > PATIENCE_S:
                raise TimeoutError("the client process has ended while it handed over its reply")
        return content


class Pace:
    """The time that a SuperNode waits before it asks again; it grows while no message comes."""

    def __init__(self) -> None:
        """Begin as if after a message."""
        self._waited_s = 0.0

    def __call__(self, seconds: float) -> float:
        """Return the seconds to wait when Flower would wait for ``seconds``."""
        if seconds < LONGEST_S:  # a wait for a reply: a message has arrived
            self._waited_s = 0.0
            return REPLY_S
        wait_s = min(max(SHORTEST_S, SHARE * self._waited_s), LONGEST_S)
        self._waited_s += wait_s
        return wait_s


def main() -> None:
    """Run ``flower-supernode``.

    Raises:
        AttributeError: This version of Flower sends replies in another way.
    """
    flower_patches.ask_sooner(Pace())
    flower_patches.give_up_replies(ImpatientStore)
    flower_supernode()


if __name__ == "__main__":
    main()
