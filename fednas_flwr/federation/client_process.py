"""What a site runs in place of Flower's ``flwr-clientapp``: its own package, never a bundle's code.

Flower's process unpacks the bundle that came with a run, imports it and runs it, with the site's
data at hand. This one refuses a bundle that is not the installed package's, and answers with the
installed package in any case: nothing that came over the wire is unpacked to disk or executed.
``bin/flwr-clientapp`` of a site's folder starts it, see ``provision``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from fednas_flwr.federation.bundle import check_bundle

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp


def main() -> None:
    """Answer one message; the arguments are those of ``flwr-clientapp``.

    Raises:
        AttributeError: This Flower has no such function to be replaced: better no answer than an
            answer by the bundle's code.
    """
    for name, own in {
        "install_from_fab": _refuse_other_code,
        "get_load_client_app_fn": _own_app,
    }.items():
        getattr(run_clientapp, name)
        setattr(run_clientapp, name, own)
    flwr_clientapp()


def _refuse_other_code(fab: bytes, *, skip_prompt: bool) -> None:
    check_bundle(fab)


def _own_app(**_: object) -> Callable[[str, str, str], ClientApp]:
    """Return what gives Flower the installed app, whatever it was told to load."""

    def load(fab_id: str, fab_version: str, fab_hash: str) -> ClientApp:
        from fednas_flwr.federation.client_app import app

        return app

    return load


if __name__ == "__main__":
    main()
