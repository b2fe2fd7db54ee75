import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fednas_flwr.files import replacing, write_atomically

PACKAGE = Path(__file__).parents[1] / "fednas_flwr"


@pytest.mark.parametrize("content", [b"\x00\xff\r\n", "naïve\r\nlines\n", ""])
def test_the_content_comes_back_byte_by_byte_and_alone(tmp_path, content):
    path = write_atomically(tmp_path / "state", content)
    data = content.encode() if isinstance(content, str) else content
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(step, tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "state", b"old")

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    assert write_atomically(path, b"new").read_bytes() == b"new"


def test_a_block_that_raises_leaves_the_old_content(tmp_path):
    path = write_atomically(tmp_path / "state", "old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("new")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        write_half()
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
        "from fednas_flwr.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('new')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_no_other_module_renames_files():
    own = {"files.py", "data/cache.py"}  # the cache renames folders
    others = [p for p in PACKAGE.rglob("*.py") if str(p.relative_to(PACKAGE)) not in own]
    calls = ("os.rename(", "os.replace(", "temporary.replace(", ".rename(")
    assert [p for p in others if any(call in p.read_text() for call in calls)] == []
