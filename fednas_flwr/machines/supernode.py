"""Flower's SuperNode, except that it does not wait for ever for the rest of a reply.

``python -m fednas_flwr.machines.supernode`` takes the arguments of ``flower-supernode``. A client
process hands its reply over in pieces. Flower 1.41 waits for the next piece without end, and takes
no other message meanwhile: if the process is killed in the middle, its site would be lost to all
runs. Here such a reply is given up; the server's app is told of it after three minutes, by Flower.
"""

from __future__ import annotations

import time
from typing import Any

from flwr.supercore.object_store import ObjectStore
from flwr.supernode.cli import flower_supernode

from fednas_flwr.federation import flower

PATIENCE_S = 60.0  # for one piece, from a process on the same machine


class ImpatientStore:
    """An object store whose reader gives up.

    Args:
        store: Flower's.
    """

    def __init__(self, store: ObjectStore) -> None:
        """See the class."""
        self._store = store
        self._waiting: dict[str, float] = {}  # object -> since when

    def __getattr__(self, name: str) -> Any:
        """Return what the store itself has."""
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


def main() -> None:
    """Run ``flower-supernode``.

    Raises:
        AttributeError: This Flower sends replies in another way.
    """
    flower.give_up_replies(ImpatientStore)
    flower_supernode()


if __name__ == "__main__":
    main()
