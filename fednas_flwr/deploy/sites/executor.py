"""A site's executor: takes the messages of its SuperNode, a process of its own for each.

Flower's ``flower-superexec`` starts an interpreter for every message, which imports torch before it
answers. Here each process is forked from one that has imported all that answers need, and has seen
no message. Other tasks than client apps, which a server may ask for, are not run.

    python -m fednas_flwr.deploy.sites.executor <arguments of flower-superexec>
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from typing import TYPE_CHECKING

from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.sites.client_process import answer

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor.types import ExecutionSpec

IMPORTED = [
    "fednas_flwr.deploy.sites.client_process",
    "fednas_flwr.deploy.client_app",
    "torch._dynamo",  # which torch's optimisers import in their first step
]


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
