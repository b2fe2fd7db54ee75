"""A site's audit trail: what it tells, and that no change of it goes unnoticed."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError, DamagedError, DayFullError
from fednas_flwr.cli import main
from fednas_flwr.client.answer import admit
from fednas_flwr.client.audit_trail import AuditTrail, verify_trail
from fednas_flwr.privacy.books.anchor import MOST_BYTES, counter_of
from fednas_flwr.protocol.messages import Header, Reply, Request
from fednas_flwr.protocol.requests import RewardCandidates

from ..refusals import refuses

ASKED = RewardCandidates(candidates=[[123, 4711]], data_set="ward")
REQUEST = Request("evaluate.candidates", Header("run", "search", 1, 1, 0, "n"), ASKED)


def key_of(path):
    return path.parent.with_name(f"{path.parent.name}.key")


def trail_at(path, **options):
    """Return a site's trail, as its client app makes it."""
    return AuditTrail(path, key_of(path), ledger=path.with_name("ledger.sqlite"), **options)


def verified(path):
    return verify_trail(path, key_of(path))


TOLD = {"shown": True, "private": True}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site" / "audit.jsonl"


def add_line(path):
    trail_at(path).refused("train.search", None, ConfigError("x"), **TOLD)


def mark_of(path):
    return key_of(path).with_name(f"{path.parent.name}.key.audit.jsonl.mark")


def written(path, exchanges=2):
    trail = trail_at(path, superlink="fl.example.org:8000")
    for _ in range(exchanges):
        trail.asked(REQUEST, flower_run=7)
        trail.released(REQUEST, Reply(123.0, metrics={"loss": 4711.0}), guard=None)
    trail.refused("evaluate.candidates", REQUEST, ConfigError("ConfigError"), **TOLD)
    return path.read_bytes().splitlines(keepends=True)


def test_lines_say_what_was_asked_and_no_values(path, prints):
    lines = [json.loads(line) for line in written(path)]
    assert [line["event"] for line in lines] == ["asked", "released"] * 2 + ["refused"]
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line.get("superlink") for line in lines] == ["fl.example.org:8000", None] * 2 + [None]
    assert lines[1]["metrics"] == ["loss"]
    assert {line["action"] for line in lines} == {"evaluate.candidates"}
    settings = json.dumps(asdict(ASKED), sort_keys=True).encode()
    assert lines[0]["settings_sha256"] == hashlib.sha256(settings).hexdigest()
    for line in lines:
        told = {k: v for k, v in line.items() if k not in ("mac", "settings_sha256", "time")}
        assert "4711" not in str(told)
        assert "123" not in str(told)
    assert path.stat().st_mode & 0o077 == 0
    assert verified(path) == 5
    assert prints("ledger", "trail", path, "--key", key_of(path)) == "5 lines, all intact.\n"


def test_noise_of_what_left_is_what_the_run_has_committed_to(make_site, tmp_path):
    """Only of the kinds of release that the reply carries."""
    site, path = make_site(), tmp_path / "trail" / "audit.jsonl"
    trail = trail_at(path)
    expected = {"train.search": {"alphas": 1.5, "weights": 1.5}, "train.probe": {"rewards": 4.0}}
    expected |= {"evaluate.model": {"metrics": 4.0}, "query.describe": {}}
    for action in expected:
        trail.released(admit(site.guard, site.request(action)), site.ask(action), guard=site.guard)
    told = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert {line["action"]: line["noise_multipliers"] for line in told} == expected
    assert told[-1]["epsilon_spent"] == site.guard.spent() > told[0]["epsilon_spent"] > 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("trail") / "site" / "audit.jsonl"
    written(path)
    return path


@given(data=st.data())
def test_any_change_of_any_line_is_found_and_nothing_leaves_any_more(data, whole):
    """Edited, removed, doubled, moved, cut off at the end; whoever does so has not the key."""
    lines = whole.read_bytes().splitlines(keepends=True)
    line = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.integers(0, len(lines[line]) - 1))
    old = lines[line][place]
    new = data.draw(st.integers(0, 255).filter(lambda byte: byte != old))
    edited = lines[line][:place] + bytes([new]) + lines[line][place + 1 :]
    moved = data.draw(st.permutations(lines).filter(lambda other: other != lines))
    forged = hashlib.sha256(b"".join(lines)).hexdigest().encode()
    added = re.sub(rb'"mac": ".*"', b'"mac": "' + forged + b'"', lines[-1])
    added = added.replace(b'"number": 5', b'"number": 6')
    try:
        for changed in (
            [*lines[:line], edited, *lines[line + 1 :]],
            [*lines[:line], *lines[line + 1 :]],
            [*lines[:line], lines[line], *lines[line:]],
            moved,
            lines[:line],
            [*lines, added],
        ):
            whole.write_bytes(b"".join(changed))
            refuses("not the one|were cut off", verified, whole, error=DamagedError)
            assert main(["ledger", "trail", str(whole), "--key", str(key_of(whole))]) == 1
            if changed[-1:] != lines[-1:]:  # the end is looked at whenever a line is written
                with pytest.raises(DamagedError, match="were cut off"):
                    trail_at(whole).asked(REQUEST, flower_run=1)
    finally:
        whole.write_bytes(b"".join(lines))
    assert verified(whole) == 5


def test_a_whole_trail_of_another_key_and_one_without_its_mark_are_found(tmp_path):
    for name in "ab":
        written(tmp_path / name / "audit.jsonl")
    a, b = (tmp_path / name / "audit.jsonl" for name in "ab")
    mark = mark_of(a)
    with pytest.raises(DamagedError, match="line 1 of .* or the key is another trail's"):
        verify_trail(a, key_of(b))
    told = mark.read_bytes()
    mark.write_bytes(mark_of(b).read_bytes())
    refuses("mark .* was edited", verified, a, error=DamagedError)
    mark.unlink()
    for look in (verified, add_line):
        refuses("mark was removed or rolled back", look, a, error=DamagedError)
    mark.write_bytes(told)
    a.unlink()
    refuses("ends at line 0 and its mark names line 5", add_line, a, error=DamagedError)


NO_MARKS = [b"", b"{", b"3", b"null", b"[]", b"[1, 2]", b'["\\ud800"]', b"\xff", b"[0, NaN, ''"]


@pytest.mark.parametrize("text", NO_MARKS)
def test_a_mark_that_is_none_was_edited(path, text):
    written(path)
    mark_of(path).write_bytes(text)
    with pytest.raises(DamagedError, match="mark .* was edited, or the key beside it is another"):
        verified(path)


def test_a_crash_before_the_mark_is_moved_loses_nothing(path):
    written(path)
    mark = mark_of(path)
    before = mark.read_bytes()
    add_line(path)
    mark.write_bytes(before)
    assert verified(path) == 6
    add_line(path)
    assert verified(path) == 7
    mark.write_bytes(before)  # two lines behind is no crash's work
    refuses("rolled back", verified, path, error=DamagedError)


def test_a_line_that_a_crash_has_torn_is_replaced_and_the_chain_goes_on(path):
    whole = written(path)
    path.write_bytes(b"".join(whole) + b'{"number": 6, "ti')
    refuses("line 6", verified, path, error=DamagedError)
    add_line(path)
    assert path.read_bytes().startswith(b"".join(whole))
    assert verified(path) == 6


def test_nothing_leaves_when_the_file_cannot_be_written(path):
    path.mkdir(parents=True)
    refuses("directory", trail_at(path).asked, REQUEST, flower_run=1, error=OSError)


def test_a_node_without_a_ledger_has_a_key_of_its_own(tmp_path):
    path, key = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.key"
    AuditTrail(path, key).refused("train.search", None, ConfigError("x"), **TOLD)
    assert verify_trail(path, key) == 1
    assert key.stat().st_mode & 0o077 == 0


WRITER = """
import sys
from pathlib import Path
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.audit_trail import AuditTrail
path, key = map(Path, sys.argv[1:])
for _ in range(40):
    trail = AuditTrail(path, key, ledger=path.with_name("ledger.sqlite"))
    error = ConfigError("x" * 100)
    trail.refused("train.search", None, error, shown=True, private=True)
"""


@pytest.mark.run
def test_processes_that_write_at_once_make_one_chain(path):
    command = [sys.executable, "-c", WRITER, str(path), str(key_of(path))]
    writers = [subprocess.Popen(command) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert verified(path) == 80


# --- the daily allowance


def counter(path):
    return counter_of(key_of(path))


def test_lines_are_never_longer_than_what_requests_take(path):
    """Whatever a server sends: names of 300 bytes, which JSON writes up to six times as long."""
    trail = trail_at(path, superlink="fl.example.org:8000")
    reply = Reply(1.0, {"loss": 1.0, "accuracy": 1.0}, properties={"latency": "x" * 10_000})
    size = taken = 0
    for name in ("n", "\u00e9" * 150, "\x00" * 300, '"' * 300, "\U0001f600" * 75):
        asked = replace(REQUEST, header=Header(name, name, 1, 1, 0, "n"))
        for reason, about, action in ((name * 20, asked, "train.search"), ("r", None, name * 20)):
            trail.asked(asked, flower_run=7)
            trail.released(asked, reply, guard=None)
            trail.refused(action, about, ConfigError(reason), **TOLD)
            grown = path.stat().st_size - size
            counted = int(counter(path).read_text().split()[1]) - taken
            assert 0 < grown <= counted
            size, taken = size + grown, taken + counted


def test_when_the_day_is_full_requests_are_refused_and_only_the_last_lines_say_so(path, capsys):
    trail = trail_at(path)
    trail.asked(REQUEST, flower_run=7)
    day = counter(path).read_text().split()[0]
    counter(path).write_text(f"{day:>12} {MOST_BYTES:>20} {0:>20}\n")
    sizes = []
    for _ in range(100):
        with pytest.raises(DayFullError) as spent:
            trail.asked(REQUEST, flower_run=7)
        trail.refused("evaluate.candidates", REQUEST, spent.value, shown=False, private=True)
        sizes.append(path.stat().st_size)
    said = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert 2 <= len(said) <= 9
    assert said[-1]["reason"] == "DayFullError"
    assert len(set(sizes[10:])) == 1
    assert capsys.readouterr().err.count("DayFullError: refused") == len(said) - 1
    assert int(counter(path).read_text().split()[2]) >= 190
    trail.released(REQUEST, Reply(1.0), guard=None)  # of what was asked before
    assert verified(path) == len(said) + 1
    counter(path).write_text(f"{int(day) - 1:>12} {MOST_BYTES:>20} {0:>20}\n")
    trail.asked(REQUEST, flower_run=7)
    assert verified(path) == len(said) + 2
