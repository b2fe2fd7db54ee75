"""Which run ``resume=auto`` continues, and that no two processes run in one folder."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fednas_flwr import api
from fednas_flwr.algorithms.fed_darts.strategy import FedDARTS
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.runs.run_folder import create_run_folder, find_unfinished, occupied

from ..refusals import refuses

STAMP = {"time": "2026-11-20T18:45:16.000+00:00", "elapsed": 1.0}


def begun(config, name, *statuses, age_s):
    """Make the folder of a run with one attempt per status, the newest ``age_s`` ago."""
    run = create_run_folder(replace(config, run_dir=str(Path("runs") / name)))
    folder = Path(str(run.run_dir))
    end = STAMP | {"event": "run_finished", "reason": None, "seconds": 1.0}
    lines = [json.dumps(end | {"status": status}) + "\n" for status in statuses]
    (folder / "events.jsonl").write_text("".join(lines))
    time = (folder / "config.yaml").stat().st_mtime - age_s
    os.utime(folder / "config.yaml", (time, time))
    return run


def test_the_newest_unfinished_run_of_its_kind_goes_on(compose_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, other = compose_config(), compose_config("seed=2")
    assert find_unfinished(config) is None
    begun(config, "old", "failed", age_s=50)
    failed = begun(config, "failed", "failed", age_s=40)
    begun(config, "failed and continued", "failed", "completed", age_s=30)
    begun(config, "completed", "completed", age_s=20)
    begun(other, "other", age_s=0)
    Path("runs/foreign").mkdir()
    Path("runs/foreign/config.yaml").write_bytes(FOREIGN["no YAML"])  # is passed
    assert find_unfinished(config) == failed
    assert begun(config, "killed", age_s=10) == find_unfinished(config)
    there = replace(config, run_dir="runs/old")
    assert find_unfinished(there) == replace(config, run_dir=str(tmp_path / "runs/old"))
    assert find_unfinished(replace(config, run_dir="runs/completed")) is None
    assert find_unfinished(replace(other, run_dir="runs/old")) is None


HOLDER = """
import sys
from pathlib import Path
from fednas_flwr.runs.run_folder import occupied
with occupied(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_process_at_a_time_and_is_free_after_a_kill(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="is going on in another process"):
            with occupied(tmp_path):
                pass
        holder.kill()
    with occupied(tmp_path):
        pass


FOREIGN = {
    "no YAML": b"a: [1\n b: }",
    "bytes": b"\xff\xfe\x00\x81",
    "a list": b"- 1\n- 2\n",
    "a text": b"hello",
    "nothing": b"",
    "another mapping": b"model: resnet\nlr: 0.1\n",
    "a name of another type": b"algorithm: {name: [1]}\ndataset: 3\n",
}


@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize("own_strategy", [False, True])
def test_a_foreign_configuration_is_not_continued(tmp_path, content, own_strategy):
    (tmp_path / "config.yaml").write_bytes(FOREIGN[content])
    told = refuses("", api.run, tmp_path, strategy=FedDARTS if own_strategy else None)
    assert "\n" not in told
    assert len(told) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
