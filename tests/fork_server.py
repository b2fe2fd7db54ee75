"""The command ``fednas`` in real processes that are forked from one that has imported everything.

A new interpreter spends five seconds on imports. The server is such an interpreter. For every
command it forks a process, with a session and a process group of its own, that goes on as
``python -m fednas_flwr`` does after its imports: to its exit code or the signal that ends it,
and to the interpreter's own end.
"""

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

IMPORTED = (  # what a run imports in its course; nothing that starts a thread
    *("fednas_flwr.cli.run", "fednas_flwr.api", "fednas_flwr.deploy.server_app"),
    "torch._dynamo",  # by the first step of an optimiser
)


class Command:
    """A command in its process, with the methods and attributes of ``subprocess.Popen``."""

    def __init__(self, place, request):
        """Have the server fork a process for the request."""
        out, err = os.pipe(), os.pipe()
        self._answers = socket.socket(socket.AF_UNIX)
        self._answers.connect(str(place))
        text = json.dumps(request).encode()
        socket.send_fds(self._answers, [len(text).to_bytes(4, "big")], [out[1], err[1]])
        self._answers.sendall(text)
        os.close(out[1])
        os.close(err[1])
        self._told: list[str] = ["", ""]
        self._readers = [
            threading.Thread(target=self._read, args=(i, os.fdopen(pipe[0])), daemon=True)
            for i, pipe in enumerate((out, err))
        ]
        for reader in self._readers:
            reader.start()
        self._lines = self._answers.makefile()
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None
        self._end = threading.Thread(target=self._await_end, daemon=True)
        self._end.start()

    def _read(self, place, pipe):
        with pipe:
            self._told[place] = pipe.read()

    def _await_end(self):
        self.returncode = int(self._lines.readline())

    def __enter__(self):
        """As of ``Popen``."""
        return self

    def __exit__(self, *_):
        """Wait for the process."""
        self.wait()

    def poll(self):
        """Return the exit code, or minus the number of a signal, of a process that has ended."""
        return self.returncode

    def send_signal(self, number):
        """Send a signal to the process, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        """End the process."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=None):
        """Wait for the process and return how it has ended."""
        self._end.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for the process and return its output and its errors."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join()
        self._lines.close()
        self._answers.close()
        return self._told[0], self._told[1]


class ForkServer:
    """Starts commands; :func:`serving` makes one."""

    def __init__(self, place):
        """Remember the socket."""
        self._place = place

    def __call__(self, *arguments, largest_file=-1):
        """Start ``fednas <arguments>`` here; no file that it writes may be larger than given."""
        here = str(Path.cwd())
        request = {"arguments": arguments, "largest_file": largest_file, "cwd": here}
        return Command(self._place, request)


@contextmanager
def serving(folder):
    """Yield a server whose socket lies in a folder."""
    place = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        listening.listen()
        process = Popen(
            [sys.executable, __file__, str(listening.fileno())],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=PIPE,  # whose end tells the server that the tests have been killed
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    try:
        yield ForkServer(place)
    finally:
        process.communicate()


# --- in the server


def serve(listening):
    """Fork a process for every request, till the tests end; return its arguments in each."""
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            break
        connection.close()
        with suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
    with connection.makefile("rb") as file:
        request = json.loads(file.read(int.from_bytes(size, "big")))
    told, go = os.pipe()
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(f"{child}\n".encode())
        os.write(go, b"!")
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    connection.close()
    os.read(told, 1)
    for descriptor in (told, go):
        os.close(descriptor)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for own, given in zip(range(3), (os.open(os.devnull, os.O_RDONLY), *descriptors), strict=True):
        os.dup2(given, own)
        os.close(given)
    os.chdir(request["cwd"])
    limits = (request["largest_file"], request["largest_file"])
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return list(request["arguments"])


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1  # whose locks would be held in forks for ever
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as given_socket:
        sys.argv = ["fednas", *serve(given_socket)]
    sys.exit(import_module("fednas_flwr.cli").main())
