"""A Flower Grid whose clients run in this process, one after the other: ``runtime=inline``."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fednas_flwr.deploy import flower_patches

SERVER_NODE_ID = 1


class InProcessGrid(Grid):
    """Calls the ClientApp when a reply is pulled, one client per pull, in the order of pushing.

    So the server reduces each reply before the next one exists. A client cannot be interrupted: a
    deadline takes effect between clients.

    Args:
        client_app: Answers every message.
        num_clients: Number of nodes; node ``i + 2`` has ``partition-id = i``.
    """

    server_node_id = SERVER_NODE_ID

    def __init__(self, client_app: ClientApp, num_clients: int) -> None:
        """See the class."""
        flower_patches.begin_task(SERVER_NODE_ID)
        self._client_app = client_app
        self._run = Run.create_empty(run_id=1)
        self._messages: dict[str, Message] = {}
        self._num_messages = 0
        self._contexts = {
            SERVER_NODE_ID + 1 + index: Context(
                run_id=1,
                node_id=SERVER_NODE_ID + 1 + index,
                node_config={"partition-id": index, "num-partitions": num_clients},
                state=RecordDict(),
                run_config={},
            )
            for index in range(num_clients)
        }

    def set_run(self, run: Run) -> None:
        """Take Flower's description of the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """Flower's description of the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages and return their ids."""
        numbered = {self.number(message): message for message in messages}
        self._messages |= numbered
        return list(numbered)

    def number(self, message: Message) -> str:
        """Give a message its id, and return that."""
        self._num_messages += 1
        flower_patches.set_message_id(message, str(self._num_messages))
        return str(self._num_messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the first client that still has to answer do so, and return its reply."""
        for message_id in message_ids:
            message = self._messages.pop(message_id, None)
            if message is not None:
                return [self.answer(message)]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to all messages; ``timeout`` cannot interrupt a client."""
        ids = list(self.push_messages(messages))
        return [reply for message_id in ids for reply in self.pull_messages([message_id])]

    def answer(self, message: Message) -> Message:
        """Return the reply of the client that a message is for."""
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._client_app(message, context)
        except Exception as error:  # as Flower's other runtimes do
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(flower_patches.CLIENT_RAISED, reason), reply_to=message)
