"""``fednas watch``: the report of a run as a page that renews itself while the run goes on.

The page is the report, written anew into memory when the run's events have grown; a line of script
asks every few seconds whether it has. Nothing but the page is served, to this machine alone unless
a host is given. Main function: :func:`make_app`.
"""

from functools import lru_cache
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


def make_app(run_folder: Path, *, host: str = "127.0.0.1") -> Starlette:
    """Return the app that serves the page at ``/`` and its version at ``/version``.

    It answers to the names of this machine for itself and to ``host`` alone: a stranger's page that
    has its own name resolved to this machine reads nothing.
    """
    hosts = {"localhost", "127.0.0.1", "::1", host.lower()}

    def version() -> str:
        return str((run_folder / EVENTS_FILE).stat().st_size)  # changes with every event

    @lru_cache(maxsize=1)
    def page(version: str) -> str:
        head, _, tail = render_report(run_folder).rpartition("</body>")
        return head + read_part("watch.html") % (version, RENEW_S * 1000) + tail

    async def show(request: Request) -> HTMLResponse:
        return HTMLResponse(await run_in_threadpool(page, version()))

    async def tell(request: Request) -> PlainTextResponse:
        return PlainTextResponse(version())

    async def check(request: Request, serve: RequestResponseEndpoint) -> Response:
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError:  # such as half an IPv6 address
            name = None
        if name in hosts:
            return await serve(request)
        text = "This page has another name: open it as localhost, or give the name as --host."
        return PlainTextResponse(text, status_code=421)

    return Starlette(
        routes=[Route("/", show), Route("/version", tell)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=check)],
    )
