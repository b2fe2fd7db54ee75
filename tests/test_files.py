import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fednas_flwr.base.files import replacing, write_atomically

from .refusals import raising, refuses

PACKAGE = Path(__file__).parents[1] / "fednas_flwr"


@pytest.mark.parametrize("content", [b"\x00\xff\r\n", "naïve\r\nlines\n", ""])
def test_the_content_comes_back_byte_by_byte_and_alone(tmp_path, content):
    path = write_atomically(tmp_path / "state", content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(step, tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "state", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(step, raising(OSError("disk full")))
        refuses("disk full", write_atomically, path, b"new and longer", error=OSError)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    assert write_atomically(path, b"new").read_bytes() == b"new"


def test_a_block_that_raises_leaves_the_old_content(tmp_path):
    path = write_atomically(tmp_path / "state", "old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("new")
            raise ValueError("half")

    refuses("half", write_half, error=ValueError)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_content_and_name_are_on_the_disk_in_this_order(tmp_path, monkeypatch):
    synced = []

    def note(descriptor):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((target.is_dir(), (tmp_path / "state").exists()))

    monkeypatch.setattr("os.fsync", note)
    write_atomically(tmp_path / "state", "x")
    assert synced == [(False, False), (True, True)]


def test_a_process_killed_while_writing_leaves_the_old_content(tmp_path):
    path = write_atomically(tmp_path / "state", "old")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fednas_flwr.base.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('new')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_no_other_module_renames_files():
    own = {"base/files.py", "data/datasets.py"}  # the cache renames folders
    others = [p for p in PACKAGE.rglob("*.py") if str(p.relative_to(PACKAGE)) not in own]
    calls = ("os.rename(", "os.replace(", "temporary.replace(", ".rename(")
    assert [p for p in others if any(call in p.read_text() for call in calls)] == []


STATE_OF_A_SITE = """
import sys
from pathlib import Path
import numpy as np, torch
from fednas_flwr.client.audit_trail import AuditTrail
from fednas_flwr.client.rehearsal import shown_size
from fednas_flwr.data.datasets import load_or_build
from fednas_flwr.data.records import Records
from fednas_flwr.protocol.keys import SiteKeys
from fednas_flwr.base.files import write_atomically
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.privacy.books.anchor import connect

state = Path(sys.argv[1])
Ledger(state / "ledger" / "ledger.sqlite", state / "keys" / "ledger.key").close()
trail = AuditTrail(state / "trail" / "trail.jsonl", state / "keys" / "ledger.key")
trail.refused("x", None, ValueError("y"), shown=True, private=True)
SiteKeys.at(state / "sums" / "sum.key")
connect(state / "journal" / "sums.sqlite").execute("CREATE TABLE a (b)")
shown_size(["key"], state / "cache", lambda: 4)
ids = np.array([b"a" * 32, b"b" * 32])
records = Records(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), ids, ("a", "b"))
load_or_build(state / "prepared" / "data", lambda: {"train": records})
write_atomically(state / "policy.yaml", "text")
"""


@pytest.mark.run
def test_no_state_of_a_site_is_open_to_others_whatever_the_umask(tmp_path):
    """Processes of a site: the books, keys, prepared records and results of self-tests."""
    command = [sys.executable, "-c", STATE_OF_A_SITE, str(tmp_path / "new" / "state")]
    subprocess.run(command, umask=0, check=True)
    made = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*")}
    assert len(made) > 15
    for path, mode in made.items():
        if path.is_dir():
            assert mode == 0o700, path
        assert mode & 0o022 == 0 or path.parent.name == "data", path
    for name in ("ledger/ledger.sqlite", "keys/ledger.key", "keys/ledger.key.mark"):
        assert made[tmp_path / "new" / "state" / name] == 0o600
    for name in ("trail/trail.jsonl", "sums/sum.key", "journal/sums.sqlite"):
        assert made[tmp_path / "new" / "state" / name] == 0o600


@pytest.mark.run
def test_no_file_of_a_private_run_can_be_written_by_others(tmp_path):
    command = [sys.executable, "-m", "fednas_flwr", "run", "algorithm=dp_fnas", "clients=2"]
    command += ["dataset.limit_train=48", "rounds=1", "privacy.epsilon=8", "run_dir=run"]
    command += ["stages=[search]"]
    subprocess.run(command, cwd=tmp_path, umask=0, check=True, capture_output=True)
    made = [*(tmp_path / "run").rglob("*")]
    assert any(path.name == "ledger.sqlite" for path in made)
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    sites = [path for path in made if path.is_dir() and "sites" in path.parts]
    assert {path.stat().st_mode & 0o777 for path in sites} == {0o700}
