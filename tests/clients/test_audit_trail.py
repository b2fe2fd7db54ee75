"""The chain of a site's audit trail."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.cli import main
from fednas_flwr.clients.audit_trail import AuditTrail, verify_trail
from fednas_flwr.errors import DamagedError
from fednas_flwr.exchange.messages import Header, Reply, Request
from fednas_flwr.exchange.requests import RewardCandidates, Site, encode

ASKED = RewardCandidates([[123, 4711]], Site("ward"))
REQUEST = Request("evaluate.candidates", Header("run", "search", 1, 1, 0, "n"), ASKED)


def written(path: Path, exchanges: int = 2) -> list[bytes]:
    trail = AuditTrail(path, "fl.example.org:8000")
    for _ in range(exchanges):
        trail.asked(REQUEST, flower_run=7)
        trail.released(REQUEST, Reply(123.0, metrics={"loss": 4711.0}), gate=None)
    trail.refused("evaluate.candidates", REQUEST, "ConfigError")
    return path.read_bytes().splitlines(keepends=True)


def test_lines_say_what_was_asked_and_no_values(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in written(tmp_path / "site" / "audit.jsonl")]
    assert [line["event"] for line in lines] == ["asked", "released"] * 2 + ["refused"]
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line.get("superlink") for line in lines] == ["fl.example.org:8000", None] * 2 + [None]
    assert lines[1]["metrics"] == ["loss"]
    assert {line["verb"] for line in lines} == {"evaluate.candidates"}
    settings = json.dumps(encode(ASKED), sort_keys=True).encode()
    assert lines[0]["settings_sha256"] == hashlib.sha256(settings).hexdigest()
    for line in lines:
        told = {k: v for k, v in line.items() if k not in ("previous", "settings_sha256", "time")}
        assert "4711" not in str(told)
        assert "123" not in str(told)
    assert (tmp_path / "site" / "audit.jsonl").stat().st_mode & 0o077 == 0
    number, last = verify_trail(tmp_path / "site" / "audit.jsonl")
    assert number == 5
    assert main(["ledger", "trail", str(tmp_path / "site" / "audit.jsonl")]) == 0
    assert len(last) == 64


def test_noise_of_what_left_is_what_the_run_has_committed_to(make_site, tmp_path: Path) -> None:
    """Only of the kinds of release that the reply carries."""
    site, path = make_site(), tmp_path / "audit.jsonl"
    trail = AuditTrail(path)
    expected = {
        "train.search": {"alphas": 1.5, "weights": 1.5},
        "train.probe": {"rewards": 4.0},
        "evaluate.model": {"metrics": 4.0},
        "query.describe": {},
    }
    for verb in expected:
        trail.released(site.request(verb), site.ask(verb), gate=site.gate)
    told = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert {line["verb"]: line["noise_multipliers"] for line in told} == expected
    assert told[-1]["epsilon_spent"] == site.gate.spent() > told[0]["epsilon_spent"] > 0


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return written(tmp_path_factory.mktemp("trail") / "audit.jsonl")


@given(data=st.data())
def test_any_edit_before_the_last_line_breaks_the_chain(
    data: st.DataObject, lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    line = data.draw(st.integers(0, len(lines) - 2))
    place = data.draw(st.integers(0, len(lines[line]) - 1))
    old = lines[line][place]
    new = data.draw(st.integers(0, 255).filter(lambda byte: byte != old))
    edited = lines[line][:place] + bytes([new]) + lines[line][place + 1 :]
    removed, doubled = (
        [*lines[:line], *lines[line + 1 :]],
        [*lines[:line], lines[line], *lines[line:]],
    )
    path = tmp_path_factory.getbasetemp() / "edited.jsonl"
    for changed in ([*lines[:line], edited, *lines[line + 1 :]], removed, doubled):
        path.write_bytes(b"".join(changed))
        with pytest.raises(DamagedError, match="is not the one that was written"):
            verify_trail(path)


def test_a_line_that_a_crash_has_torn_is_replaced_and_the_chain_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    whole = written(path)
    path.write_bytes(b"".join(whole) + b'{"number": 6, "ti')
    with pytest.raises(DamagedError, match="line 6"):
        verify_trail(path)
    AuditTrail(path).refused("train.search", None, "x")
    assert path.read_bytes().startswith(b"".join(whole))
    assert verify_trail(path)[0] == 6


def test_nothing_leaves_when_the_last_line_was_edited_or_the_file_cannot_be_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit.jsonl"
    written(path)
    path.write_bytes(path.read_bytes() + b"[]\n")
    with pytest.raises(DamagedError, match="was edited: nothing leaves"):
        AuditTrail(path).asked(REQUEST, flower_run=1)
    with pytest.raises(OSError, match="directory"):
        AuditTrail(tmp_path).asked(REQUEST, flower_run=1)


WRITER = """
import sys
from pathlib import Path
from fednas_flwr.clients.audit_trail import AuditTrail
for _ in range(200):
    AuditTrail(Path(sys.argv[1])).refused("train.search", None, "x" * 100)
"""


def test_processes_that_write_at_once_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert verify_trail(path)[0] == 400
