"""A site's executor, which answers each message of its SuperNode in a separate process.

Flower's ``flower-superexec`` starts an interpreter for every message, which imports torch before it
answers. Here each process is forked from one that has imported everything that answers need and has
seen no message. A server may ask for tasks other than client apps; they are not run.

Flower's ``flwr-clientapp`` unpacks the bundle that came with a run, imports it and runs it, with
access to the site's data. The processes here refuse any bundle but that of the installed package,
and in any case answer with the installed package: nothing that came over the wire is unpacked to
disk or executed.

    python -m fednas_flwr.deploy.sites.executor <arguments of flower-superexec>
"""

from __future__ import annotations

import multiprocessing
import os
import time
from logging import INFO
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.common.logger import log
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime import run_clientapp

from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.bundle import check_bundle

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor.types import ExecutionSpec

IMPORTED = ["fednas_flwr.deploy.sites.executor", "fednas_flwr.deploy.client_app"]
NAME = "fednas-message"  # name of a message's process, shown by ``ps -o comm``


def answer(spec: ExecutionSpec) -> None:
    """Answer one message in a process that does nothing else.

    Args:
        spec: Address of the SuperNode, and the token for the message.

    Raises:
        AttributeError: This version of Flower lacks a function to replace: better no answer than
            one from the bundle's code.
    """
    Path("/proc/self/comm").write_text(NAME, encoding="ascii")
    flower_patches.answer_with(lambda *_: _answer, check_bundle)  # whatever Flower is told to load
    flower_patches.finish_only_with_a_reply()
    root, insecure = spec.root_certificates_path, spec.insecure
    run_clientapp.run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=insecure,
        certificates=validate_and_resolve_root_certificates(root, insecure),
        parent_pid=spec.parent_pid,
        runtime_dependency_install=False,
    )


def _answer(message: Message, context: Context) -> Message:
    """Return the reply of the ClientApp; log the seconds of start-up and answer."""
    from fednas_flwr.deploy.client_app import app  # the executor itself does not need it

    action, begun = message.metadata.message_type, time.monotonic()
    # since Linux has started this process
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    log(INFO, "%s: begun %.2f s after the start of its process", action, age_s)
    reply = app(message, context)
    seconds, cpu = time.monotonic() - begun, time.process_time()
    log(INFO, "%s: answered within %.2f s, after %.2f s of CPU in all", action, seconds, cpu)
    return reply


def main() -> None:
    """Run ``flower-superexec``; no forked process imports it.

    Raises:
        AttributeError: This version of Flower starts processes in another way.
    """
    from flwr.supercore.cli import flower_superexec

    context = multiprocessing.get_context("forkserver")

    def start(spec: ExecutionSpec) -> None:
        context.Process(target=answer, args=(spec,), daemon=True).start()

    flower_patches.start_clients_by(start)
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    flower_superexec()


if __name__ == "__main__":
    main()
