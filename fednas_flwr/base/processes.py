"""Further processes on this machine, forked from one that has imported all that they need.

That interpreter is started once, by :func:`warm_up` or the first :class:`Forks`. It computes
nothing, and ends with this process, as do all processes forked from it.

Main functions: :class:`Forks` and :func:`beside`.
"""

import atexit
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import connection, reduction
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

ALONE = "FEDNAS_ALONE"  # in the environment of processes that must not start others
STARTS = 3  # most starts of the interpreter, which may die
ENTRY = "fednas_flwr.deploy.local_actors"  # a module that imports what is needed, then forks
LATER = ("sklearn.metrics", "torch.onnx")  # needed at the end of runs: more than a second
_lock = threading.Lock()
_started: list[tuple[subprocess.Popen[bytes], connection.Connection]] = []  # until now


class LostError(Exception):
    """A worker has died, or is no longer waited for."""


def cores() -> int:
    """Return the number of cores that this process may use; 1 if it may start no others."""
    if ALONE in os.environ or not hasattr(os, "sched_getaffinity"):  # e.g. on macOS
        return 1
    return len(os.sched_getaffinity(0))


def at_once(tasks: int, *, threads: int = 1) -> int:
    """Return the number of processes for some tasks of ``threads`` threads each.

    It is the number of cores, or up to half as many more if no task then remains for the end. Two
    cores would compute three tasks as two and then one; sharing all three takes three quarters of
    the time.
    """
    number = cores() // threads
    rest = tasks % max(1, number)
    return min(tasks, number + (rest if rest <= number // 2 else 0))


def is_warm() -> bool:
    """Return true if the interpreter from which processes are forked has been started."""
    return any(process.poll() is None for process, _ in _started)


def warm_up(later: Sequence[str] = ()) -> None:
    """Start the interpreter from which processes are forked, if there are cores for them.

    Args:
        later: Modules that it imports after the first fork, so that later ones have them.
    """
    if cores() > 1:
        with _lock:
            _control(later)


def _control(later: Sequence[str] = ()) -> connection.Connection:
    """Return the connection to the interpreter, which is started if necessary.

    Raises:
        LostError: It has died after its last possible start.
    """
    if not is_warm():
        if len(_started) == STARTS:
            raise LostError
        control, its = multiprocessing.Pipe()
        path = os.pathsep.join(filter(None, sys.path))  # it can import what this one can
        with its:
            process = subprocess.Popen(
                # no file in the working folder is taken for a module
                [sys.executable, "-P", "-m", ENTRY, *later],
                stdin=its.fileno(),
                env={**os.environ, ALONE: "1", "PYTHONPATH": path},
                start_new_session=True,
            )
        atexit.register(process.kill)  # while it imports, it does not notice our end
        _started.append((process, control))
    return _started[-1][1]


class Forks(AbstractContextManager["Forks"]):
    """Processes that call a function, and end with the context.

    Args:
        sent: The function, pickled.
    """

    def __init__(self, sent: bytes) -> None:
        """Start none yet."""
        self._sent, self._pipes, self._has_ended = sent, list[connection.Connection](), False

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        with _lock:
            self._has_ended = True
            for pipe in self._pipes:
                with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)

    def start(self) -> Callable[..., Any]:
        """Fork a process and, once it is ready, return the function that is called there.

        Raises:
            LostError: The process has died. The function also raises this, and its own errors.
        """
        pipe, its = multiprocessing.Pipe()
        with _lock, its, _lost_if_broken():
            if self._has_ended:
                raise LostError
            reduction.send_handle(_control(), its.fileno(), 0)
            self._pipes.append(pipe)
        _call(pipe, os.getcwd(), sys.path, dict(os.environ))
        with _lost_if_broken():
            pipe.send_bytes(self._sent)
        return partial(_call, pipe)


@contextmanager
def _lost_if_broken() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise LostError from error


def _call(pipe: Any, *asked: Any) -> Any:
    with _lost_if_broken():
        pipe.send(asked)
        answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def beside(
    sent: bytes, calls: Collection[tuple[Any, ...]]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Call a function in several processes; the calls begin in their order.

    Yields the arguments of each call with its result, as results arrive.

    Args:
        sent: The function, pickled.
        calls: The arguments of each call.

    Raises:
        LostError: A process has died.
        Exception: Raised by the function in its process.
    """
    local = threading.local()

    def call(one: tuple[Any, ...]) -> Any:
        if not hasattr(local, "function"):
            local.function = forks.start()
        return local.function(*one)

    with ThreadPoolExecutor(at_once(len(calls))) as threads, Forks(sent) as forks:
        asked = {threads.submit(call, one): one for one in calls}
        for done in as_completed(asked):
            yield asked[done], done.result()


def serve_forks(later: list[str]) -> None:
    """Fork a process for each pipe that arrives through standard input; end when that is closed.

    Args:
        later: Modules to import after the first forks.
    """
    control = connection.Connection(sys.stdin.fileno())
    fork = multiprocessing.get_context("fork").Process
    with suppress(EOFError, OSError):
        while True:
            handle = reduction.recv_handle(control)
            fork(target=_serve, args=(handle,)).start()
            os.close(handle)
            while later and not control.poll(0.2):  # seconds without a request
                import_module(later.pop(0))
    os.killpg(0, signal.SIGKILL)


def _serve(handle: int) -> None:
    """Answer calls until the other end is gone, even during a computation."""
    threading.Thread(target=_end_with, args=(handle,), daemon=True).start()
    pipe = connection.Connection(handle)
    with suppress(EOFError):
        folder, sys.path[:], environment = pipe.recv()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update({**environment, ALONE: "1"})
        pipe.send(True)  # ready
        function = pickle.loads(pipe.recv_bytes())
        while True:
            asked = pipe.recv()
            try:
                answer = function(*asked)
            except Exception as error:  # it is raised at the caller
                answer = ExceptionWithTraceback(error, error.__traceback__)
            pipe.send(answer)


def _end_with(handle: int) -> None:
    """End this process when the other end of a pipe is closed."""
    end = select.poll()
    end.register(handle, 0)  # reports the closed end only
    end.poll()
    os._exit(0)
