"""``fednas watch``: the report of a run as a page that renews itself while the run goes on.

The page is the report, written anew into memory when the run's events have grown; a line of script
asks every few seconds whether it has. Nothing but the page is served, to this machine alone unless
a host is given. Main function: :func:`serve`.
"""

from __future__ import annotations

import ipaddress
import threading
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from fednas_flwr.report.html_report import render_report
from fednas_flwr.report.templates import read_part
from fednas_flwr.runs.numbers import EVENTS_FILE

RENEW_S = 5


class Page:
    """The newest report of a run, made when it is asked for.

    Args:
        run_folder: With events.jsonl.
    """

    def __init__(self, run_folder: Path) -> None:
        """Make no page yet."""
        self._folder = run_folder
        self._lock = threading.Lock()
        self._version, self._html = "", ""

    @property
    def version(self) -> str:
        """Text that changes when the run has told something new."""
        return str((self._folder / EVENTS_FILE).stat().st_size)

    def html(self) -> str:
        """Return the page as the run is now."""
        with self._lock:
            version = self.version
            if version != self._version:
                script = read_part("watch.html") % (version, RENEW_S * 1000)
                report = render_report(self._folder)
                head, _, tail = report.rpartition("</body>")
                self._html, self._version = head + script + tail, version
            return self._html


def make_app(run_folder: Path, *, host: str = "127.0.0.1") -> Starlette:
    """Return the app that serves the page at ``/`` and its version at ``/version``.

    It answers to ``localhost``, to ``host`` and to IP addresses alone: a stranger's page that has
    its own name resolved to this machine reads nothing.
    """
    page = Page(run_folder)

    async def show(request: Request) -> HTMLResponse:
        return HTMLResponse(await run_in_threadpool(page.html))

    async def tell(request: Request) -> PlainTextResponse:
        return PlainTextResponse(page.version)

    async def check(request: Request, serve: RequestResponseEndpoint) -> Response:
        if _is_own(request.headers.get("host", ""), host):
            return await serve(request)
        text = "This page has another name: open it by an IP address, or give the name as --host."
        return PlainTextResponse(text, status_code=421)

    return Starlette(
        routes=[Route("/", show), Route("/version", tell)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=check)],
    )


def _is_own(header: str, host: str) -> bool:
    """Return whether a Host header has an IP address, ``localhost`` or the name ``host``."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
        return name in ("localhost", host.lower()) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def serve(run_folder: Path, *, host: str, port: int) -> None:
    """Serve the page until Ctrl-C.

    Args:
        run_folder: With events.jsonl.
        host: The interface: 127.0.0.1 shows the page to this machine alone.
        port: TCP port.
    """
    import uvicorn

    uvicorn.run(make_app(run_folder, host=host), host=host, port=port, log_level="warning")
