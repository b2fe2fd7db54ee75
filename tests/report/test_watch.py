"""The page of ``fednas watch``: the report of a run as it is now."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from fednas_flwr.cli import main
from fednas_flwr.report.watch import make_app
from fednas_flwr.runs.events import EventLog


def get(app, path, *, name="localhost", method="GET"):
    """Return status and text of an app's answer to a request for a path, under a host's name."""
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": [(b"host", name.encode())], "http_version": "1.1"}
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]).decode()


@pytest.fixture
def folder(make_run):
    return make_run("run")


def test_the_page_is_the_report_and_changes_with_the_run(folder):
    page = make_app(folder)
    (_, before), (_, first) = get(page, "/version"), get(page, "/")
    assert f'const shown = "{before}"' in first
    assert first.count("</body>") == 1
    assert "a later warning" not in first
    assert get(page, "/") == (200, first)
    with EventLog(folder / "events.jsonl") as log:
        log.emit("warning", message="a later warning </body>")
    (_, version), (_, second) = get(page, "/version"), get(page, "/")
    assert version != before
    assert "a later warning &lt;/body&gt;" in second
    assert f'const shown = "{version}"' in second


def test_a_torn_line_of_a_run_that_is_writing_is_no_error(folder):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "message": "half"})[:20])
    assert get(make_app(folder), "/")[0] == 200


def test_nothing_but_the_page_is_served(folder):
    page = make_app(folder)
    for path in ("/events.jsonl", "/config.yaml", "/../events.jsonl", "/%2e%2e/events.jsonl"):
        assert get(page, path)[0] == 404
    assert get(page, "/", method="POST")[0] == 405


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "192.168.0.7", "Box.example"])
def test_a_strangers_name_for_this_machine_is_refused_wherever_it_listens(folder, host):
    """As a page of a stranger would use that has its name resolved to this machine's address."""
    page = make_app(folder, host=host)
    listening = f"[{host}]" if ":" in host else host
    for name in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]", listening):
        assert get(page, "/version", name=f"{name}:8642")[0] == 200, name
    strangers = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "box", "", "[")
    for name in (*strangers, "127.0.0.1@evil.example", "2130706433", "10.0.0.9"):
        for path in ("/", "/version"):
            status, text = get(page, path, name=name and f"{name}:8642")
            assert status == 421
            assert text.startswith("This page has another name: open it as localhost")


def test_what_cannot_be_served_is_one_sentence(folder, tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no events.jsonl" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(folder), "--port", str(port)]) == 2
    assert f"--port={port} cannot be served" in capsys.readouterr().err
    assert main(["watch", str(folder), "--port", "99999"]) == 2
    assert "--port=99999 is out of range: expected 1 to 65535" in capsys.readouterr().err
