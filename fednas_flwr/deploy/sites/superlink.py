"""Flower's SuperLink, with the difference that only its own machine can command it.

``python -m fednas_flwr.deploy.sites.superlink`` takes the arguments of ``flower-superlink``. Flower
1.41 serves three interfaces on one port. Fleet is for nodes, which authenticate with registered
keys. Runtime is for executors, which authenticate with ``--superexec-auth-secret-file``, if it is
given. Control does not authenticate callers: anyone who reaches the port could register a key or
start a run. Here Control answers only loopback, as does Runtime without a secret. Each refusal is
one line in the log. A node that has been away is let in again only after server apps had time to
notice, so that they do not wait for messages that it had fetched and lost.
"""

import ipaddress
from collections.abc import Callable
from logging import WARNING
from typing import Any

from flwr.common.logger import log
from flwr.server.superlink.linkstate import InMemoryLinkState, SqlLinkState
from flwr.superlink.cli import flower_superlink
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fednas_flwr.deploy import flower_patches

FLEET, RUNTIME, HEALTH = "/v1/fleet/", "/v1/runtime/", "/health"
BEGIN_S = 90.0  # to start a server app, which imports torch, on a busy machine
AWAY_S = 5.0  # server apps ask for replies many times within this time
REFUSAL = "only the server's own machine may ask this\n"


class Guard:
    """ASGI middleware that refuses requests that other machines must not make, and logs them.

    Args:
        app: The SuperLink.
        for_all: Prefixes of the paths that other machines may request.
    """

    def __init__(self, app: ASGIApp, for_all: tuple[str, ...]) -> None:
        self.app, self.for_all = app, for_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        path, peer = str(scope["path"]), str((scope.get("client") or ("unknown", 0))[0])

        async def send_and_log(message: Message) -> None:
            if message["type"] == "http.response.start" and path.startswith(FLEET):
                _log_refusal(path, peer, message["status"])
            await send(message)

        if path.startswith(self.for_all) or is_loopback(peer):
            await self.app(scope, receive, send_and_log)
        else:
            log(WARNING, "refused %s: %s is for the server's own machine.", peer, path)
            await PlainTextResponse(REFUSAL, 403)(scope, receive, send)


def paths_for_all(app: Starlette) -> tuple[str, ...]:
    """Return the prefixes of those paths of a SuperLink that authenticate callers."""
    has_secret = getattr(app.state, "superexec_auth_secret", None) is not None
    return (FLEET, HEALTH, RUNTIME) if has_secret else (FLEET, HEALTH)


def is_loopback(address: str) -> bool:
    """Return True if an address is loopback, such as ``127.0.0.1`` or ``::1``."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _log_refusal(path: str, peer: str, status: int) -> None:
    """Log an explanation of an error in an answer to a node."""
    if status == 401:
        reason = "its key was revoked, or its clock is more than 5 s ahead or 5 min behind"
    elif path.endswith("/activate-node") and status >= 400:
        reason = "its key is not registered, or another node uses it now"
    else:
        return
    log(WARNING, "refused the node at %s: %s.", peer, reason)


def main() -> None:
    """Run ``flower-superlink`` behind the guard; a returning node must first be missed."""

    def serve(run: Callable[..., None], *, app: Starlette, **settings: Any) -> None:
        run(Guard(app, paths_for_all(app)), **settings)

    flower_patches.guard_superlink(serve)
    for state in (SqlLinkState, InMemoryLinkState):
        flower_patches.let_be_missed(state, AWAY_S)
    flower_patches.let_begin_slowly(BEGIN_S)
    flower_superlink()


if __name__ == "__main__":
    main()
