"""Whatever the settings: a run is refused in a sentence, or completes with all that it owes."""

import shutil
from collections import Counter

import fuzz_settings
import pytest

from fednas_flwr.settings import Config
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree

RUNS = 5  # scripts/fuzz_settings.sh makes more
NORMS = ["search_space.norm=group", "retrain.norm=group"]


@pytest.mark.run
def test_generated_runs_are_refused_in_a_sentence_or_complete(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fuzz_settings, "LARGEST", 2)
    data = fuzz_settings.make_data(tmp_path)
    outcomes = []
    for drawn in fuzz_settings.draws(RUNS, 1, data):
        outcomes.append(fuzz_settings.run(drawn, tmp_path / "run"))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert [o for o in outcomes if o.kind not in ("completed", "refused")] == []
    counts = Counter(outcome.kind for outcome in outcomes)
    assert counts["completed"] >= RUNS / 5
    assert counts["refused"] >= RUNS / 10


def test_every_setting_of_a_configuration_is_drawn():
    """But for the few that a small run on this machine needs."""
    config = parse_config(compose_tree(["algorithm=feathers", "privacy=dp", *NORMS]))
    keys = dict(fuzz_settings.leaves(config))
    groups = ("algorithm", "dataset", "partition", "search_space", "privacy", "runtime", "retrain")
    assert {key.partition(".")[0] for key in keys} >= {*groups, "seed", "stages", "sampling"}
    groups += ("aggregate", "server_optimizer", "training", "evaluation")
    known = {name for name in Config.__dataclass_fields__ if name not in groups}
    assert {"training.precision", "evaluation.positive", "runtime.wire"} <= set(keys)
    assert known - set(keys) == {"run_dir", "trackers"}
    assert "runtime.device" not in keys
    assert {"algorithm.bandit.beta", "privacy.retrain.local_steps"} <= set(keys)
