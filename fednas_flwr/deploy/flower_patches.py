"""All changes to Flower, and all uses of its internals: one function per line of the table.

Each function takes effect in the process that calls it. It raises AttributeError if Flower no
longer has what it replaces: better no process than one without its protection. flwr is pinned to
the minor versions ``VERSIONS``, with which all this is tested (``scripts/test_flower.sh``).

=========================  =============================================  =========================
function                   replaces or sets, of Flower 1.41               because else
=========================  =============================================  =========================
guard_superlink            ``uvicorn.run``, as ``flower-superlink``       whoever reaches the port
                           calls it                                       may start runs
let_be_missed              ``LinkState.activate_node``                    what a restarted node lost
                                                                          is waited for till the
                                                                          deadline
let_begin_slowly           ``HEARTBEAT_DEFAULT_INTERVAL`` of core states  a machine that takes over
                                                                          30 s to start a process
                                                                          starts it for ever
give_up_replies            ``start_client_internal._push_messages``       a client process that ends
                                                                          in mid-reply blocks its
                                                                          SuperNode for ever
ask_sooner                 ``start_client_internal.time``                 a message waits for 3 s, a
                                                                          reply for .5 s
start_clients_by           ``SubprocessExecutor.launch``                  every message imports
                                                                          torch; a server may start
                                                                          other tasks than client
                                                                          apps
answer_with                ``run_clientapp.install_from_fab`` and         a site executes the code
                           ``.get_load_client_app_fn``                    that comes with a run
finish_only_with_a_reply   ``run_clientapp.push_message`` and             a client process that is
                           ``.push_task_output``                          stopped blocks its
                                                                          SuperNode for ever
send_along                 ``Grid.push_messages`` of one grid             clients of ``flwr run``
                                                                          get no configuration
take_along                 reads what ``send_along`` has added            the same
begin_task                 ``TaskIdentity``, which Flower's processes     messages cannot be made in
                           set                                            a process of our own
set_message_id             ``Metadata._message_id``, which a grid sets    replies name no request
=========================  =============================================  =========================

``sites.executor`` calls ``run_clientapp``, and ``deploy.deployment`` calls the command ``flwr``;
they change nothing. Modules are imported here only when needed, so that commands start fast.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flwr.common.constant import ErrorCode

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.server.superlink.linkstate import LinkState
    from flwr.serverapp import Grid
    from flwr.supercore.superexec.executor.types import ExecutionSpec

Call = Callable[..., None]
VERSIONS = ("1.41", "1.42")
CLIENT_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION  # error code of a reply
_ALONG = "fednas.along"


def guard_superlink(serve: Call) -> None:
    """Have ``serve(run, app=..., ...)`` called instead of ``uvicorn.run(app=..., ...)``."""
    import uvicorn

    _wrap(uvicorn, "run", lambda run: lambda **settings: serve(run, **settings))


def let_be_missed(state: type[LinkState], away_s: float) -> None:
    """Make nodes that come back wait until they have been away for ``away_s``.

    A SuperNode keeps the messages that it has fetched in memory; when it ends, they stay
    unanswered. Flower gives a server app an error in their place if it asks while the node is away.
    If a node were restarted at once, as by ``systemctl restart``, the server app would wait for it
    until the deadline.
    """

    def waiting(activate: Callable[..., bool]) -> Callable[..., bool]:
        def activate_node(self: LinkState, node_id: int, heartbeat_interval: float) -> bool:
            for node in self.get_node_info(node_ids=[node_id]):
                been_away_s = time.time() - node.online_until  # below 0: not away; 0: never on-line
                if node.online_until and 0 <= been_away_s < away_s:
                    time.sleep(away_s - been_away_s)
            return activate(self, node_id, heartbeat_interval)

        return activate_node

    _wrap(state, "activate_node", waiting)


def let_begin_slowly(within_s: float) -> None:
    """Have a SuperLink wait for ``within_s`` for a process that it has had started.

    After that time Flower takes the process' token away and has another one started, which is no
    faster. A process that has begun and gives no sign of life is missed after twice that time.
    """
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate

    for states in (in_memory_corestate, sql_corestate):
        _wrap(states, "HEARTBEAT_DEFAULT_INTERVAL", lambda _: within_s)


def give_up_replies(make_store: Callable[[Any], Any]) -> None:
    """Have a SuperNode read replies through ``make_store(<its object store>)``."""
    from flwr.supernode import start_client_internal

    def through(push: Call) -> Call:
        return lambda *, object_store, **arguments: push(
            object_store=make_store(object_store), **arguments
        )

    _wrap(start_client_internal, "_push_messages", through)


def ask_sooner(pace: Callable[[float], float]) -> None:
    """Have a SuperNode wait for ``pace(seconds)`` seconds wherever Flower waits for ``seconds``.

    Flower waits for 3 s before it asks for a message again, and .5 s before it looks for a reply
    again.
    """
    from flwr.supernode import start_client_internal

    def paced(clock: Any) -> SimpleNamespace:
        return SimpleNamespace(sleep=lambda seconds: clock.sleep(pace(seconds)))

    _wrap(start_client_internal, "time", paced)


def start_clients_by(start: Callable[[ExecutionSpec], None]) -> None:
    """Have an executor start processes for client apps with ``start``, and no other processes."""
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
    from flwr.supercore.superexec.executor.types import LaunchResult

    def launch(self: SubprocessExecutor, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed("sites run client apps alone")
        start(spec)
        return LaunchResult.accepted()

    _wrap(SubprocessExecutor, "launch", lambda _: launch)


def answer_with(
    load_app: Callable[[str, str, str], Callable[..., Message]], check: Callable[[bytes], None]
) -> None:
    """Have a client process answer with ``load_app``, whatever it is told to install and load.

    Args:
        load_app: Given id, version and hash of a run's bundle, returns the app.
        check: Raises for a bundle that is refused.
    """
    from flwr.supernode.runtime import run_clientapp

    _wrap(run_clientapp, "install_from_fab", lambda _: lambda fab, *, skip_prompt: check(fab))
    _wrap(run_clientapp, "get_load_client_app_fn", lambda _: lambda **__: load_app)


def finish_only_with_a_reply() -> None:
    """Make a client process that is stopped look like one that was killed.

    After a minute Flower's SuperNode answers in place of a killed process. A stopped process
    reports that it has finished, and the SuperNode would wait for its reply for ever and take no
    other message.
    """
    from flwr.supernode.runtime import run_clientapp

    replied = threading.Event()

    def noting(push: Call) -> Call:
        def push_and_note(*reply: Any, **named: Any) -> None:
            push(*reply, **named)
            replied.set()

        return push_and_note

    def finishing(finish: Call) -> Call:
        return lambda *of, **named: finish(*of, **named) if replied.is_set() else None

    _wrap(run_clientapp, "push_message", noting)
    _wrap(run_clientapp, "push_task_output", finishing)


def send_along(grid: Grid, values: dict[str, str]) -> None:
    """Have every message of ``grid`` carry ``values``, which :func:`take_along` returns."""
    from flwr.app import ConfigRecord

    def carrying(push: Callable[..., Iterable[str]]) -> Callable[..., Iterable[str]]:
        def push_with_values(messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for message in messages:
                message.content[_ALONG] = ConfigRecord(dict(values))
            return push(messages)

        return push_with_values

    _wrap(grid, "push_messages", carrying)


def take_along(message: Message) -> dict[str, str]:
    """Remove from a message, and return, the values that :func:`send_along` has added."""
    record = message.content.pop(_ALONG, None)
    return {} if record is None else {key: str(value) for key, value in record.items()}


def begin_task(node_id: int) -> None:
    """Declare this process task 1 of run 1 at a node, from which messages take their sender."""
    from flwr.supercore.task_identity import TaskIdentity

    _wrap(TaskIdentity, "_task_id", lambda _: 1)
    _wrap(TaskIdentity, "_run_id", lambda _: 1)
    _wrap(TaskIdentity, "_node_id", lambda _: node_id)


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that its reply will name."""
    _wrap(message.metadata, "_message_id", lambda _: message_id)


def _wrap(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Set an attribute of ``owner`` to the result of ``make`` for its present value.

    Raises:
        AttributeError: There is no such attribute: this is another version of Flower.
    """
    setattr(owner, name, make(getattr(owner, name)))
