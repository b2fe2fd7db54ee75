"""Flower's SuperNode, except that it asks sooner, and gives up replies that stay incomplete.

``python -m fednas_flwr.deploy.sites.supernode`` takes the arguments of ``flower-supernode``. A
client process hands its reply over in pieces. Flower 1.41 waits for the next piece without end, and
takes
no other message meanwhile: if the process is killed in the middle, its site would be lost to all
runs. Here such a reply is given up; the server's app is told of it after three minutes, by Flower.
Flower asks for messages every three seconds; here a node asks often after a message, as in a round.
"""

import time
from typing import Any

from flwr.supercore.object_store import ObjectStore
from flwr.supernode.cli import flower_supernode

from fednas_flwr.deploy import flower_patches

PATIENCE_S = 60.0  # for one piece, from a process on the same machine
SHORTEST_S, LONGEST_S = 0.2, 3.0  # between two questions for a message; the latter is Flower's
SHARE = 0.1  # of the time since the last message
REPLY_S = 0.1  # until a reply is looked for again, which is in memory


class ImpatientStore:
    """An object store whose reader gives up.

    Args:
        store: Flower's.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._waiting: dict[str, float] = {}  # object -> since when

    def __getattr__(self, name: str) -> Any:
        """Return the messages of the store itself."""
        return getattr(self._store, name)

    def get(self, object_id: str) -> bytes | None:
        """Return an object, empty while it is not there yet.

        Raises:
            TimeoutError: It was not there for ``PATIENCE_S``.
        """
        content = self._store.get(object_id)
        if content == b"":
            now = time.monotonic()
            if now - self._waiting.setdefault(object_id, now) > PATIENCE_S:
                raise TimeoutError("the client process has ended while it handed over its reply")
        return content


class Pace:
    """Time that a SuperNode waits before it asks again: seldom after long without a message."""

    def __init__(self) -> None:
        """Begin as after a message."""
        self._waited_s = 0.0

    def __call__(self, seconds: float) -> float:
        """Return the seconds to wait where Flower would wait for ``seconds``."""
        if seconds < LONGEST_S:  # for a reply: a message has come
            self._waited_s = 0.0
            return REPLY_S
        wait_s = min(max(SHORTEST_S, SHARE * self._waited_s), LONGEST_S)
        self._waited_s += wait_s
        return wait_s


def main() -> None:
    """Run ``flower-supernode``.

    Raises:
        AttributeError: This Flower sends replies in another way.
    """
    flower_patches.ask_sooner(Pace())
    flower_patches.give_up_replies(ImpatientStore)
    flower_supernode()


if __name__ == "__main__":
    main()
