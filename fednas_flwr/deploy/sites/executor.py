"""A site's executor: takes the messages of its SuperNode, a process of its own for each.

Flower's ``flower-superexec`` starts an interpreter for every message, which imports torch before it
answers. Here each process is forked from one that has imported all that answers need, and has seen
no message. Other tasks than client apps, which a server may ask for, are not run.

Flower's ``flwr-clientapp`` unpacks the bundle that came with a run, imports it and runs it, with
the site's data at hand. The processes here refuse a bundle that is not the installed package's, and
answer with the installed package in any case: nothing that came over the wire is unpacked to disk
or executed.

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
NAME = "fednas-message"  # of a message's process, that ``ps -o comm`` shows


def answer(spec: ExecutionSpec) -> None:
    """Answer one message, in a process that does nothing else.

    Args:
        spec: Where the SuperNode is, and by which token it hands out the message.

    Raises:
        AttributeError: This Flower has no such function to be replaced: better no answer than an
            answer by the bundle's code.
    """
    Path("/proc/self/comm").write_text(NAME, encoding="ascii")
    flower_patches.answer_with(lambda *_: _answer, check_bundle)  # whatever Flower is to load
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
    """Return the reply of the ClientApp; log the seconds of start-up and of the answer."""
    from fednas_flwr.deploy.client_app import app  # which the executor itself does without

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
    """Run ``flower-superexec``, which no forked process imports.

    Raises:
        AttributeError: This Flower starts processes in another way.
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
