"""Whatever the settings: a run is refused in a sentence, or completes with all that it owes."""

import importlib.util
import shutil
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednas_flwr.settings import Config
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.settings.parser import Between, OneOf

RUNS = 8  # scripts/fuzz_settings.sh makes more
ALL = ["algorithm=feathers", "privacy=dp"]
NORMS = ["search_space.norm=group", "retrain.norm=group"]


@pytest.fixture(scope="module")
def fuzz_settings():
    """The script that draws and runs settings."""
    path = Path(__file__).parent.parent / "scripts" / "fuzz_settings.py"
    spec = importlib.util.spec_from_file_location("fuzz_settings", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_settings"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.run
def test_generated_runs_are_refused_in_a_sentence_or_complete(fuzz_settings, tmp_path, capsys):
    data = fuzz_settings.make_data(tmp_path)
    outcomes = []
    for drawn in fuzz_settings.draws(RUNS, 1, data):
        outcomes.append(fuzz_settings.run(drawn, tmp_path / "run"))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert [o for o in outcomes if o.kind not in ("completed", "refused")] == []
    counts = Counter(outcome.kind for outcome in outcomes)
    assert counts["completed"] >= RUNS / 5
    assert counts["refused"] >= RUNS / 10


def test_every_setting_of_a_configuration_is_drawn(fuzz_settings):
    """But for the few that a small run on this machine needs."""
    keys = dict(fuzz_settings.leaves(composed()))
    groups = ("algorithm", "dataset", "partition", "search_space", "privacy", "runtime", "retrain")
    assert {key.partition(".")[0] for key in keys} >= {*groups, "seed", "stages", "sampling"}
    groups += ("aggregate", "server_optimizer", "training", "evaluation")
    known = {name for name in Config.__dataclass_fields__ if name not in groups}
    assert {"training.precision", "evaluation.positive", "runtime.wire"} <= set(keys)
    assert known - set(keys) == {"run_dir", "trackers"}
    assert "runtime.device" not in keys
    assert {"algorithm.bandit.beta", "privacy.retrain.local_steps"} <= set(keys)


@cache
def composed():
    return parse_config(compose_tree([*ALL, *NORMS]))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_drawn_is_within_the_constraints_and_can_be_written(fuzz_settings, data):
    known = dict(fuzz_settings.leaves(composed()))
    key = data.draw(st.sampled_from(sorted(known)))
    hint, value = known[key]
    drawn = data.draw(fuzz_settings.values(hint, key, value))
    for constraint in fuzz_settings.constraints(hint) if drawn is not None else ():
        if isinstance(constraint, Between):
            assert drawn in constraint
        elif isinstance(constraint, OneOf):
            assert drawn in constraint.names
    override = OverridesParser.create().parse_override(f"{key}={fuzz_settings.written(drawn)}")
    # quotes apart, which keys of mappings lose
    assert override.value() == drawn or plain(override.value()) == plain(drawn)


def plain(value):
    return str(value).replace("'", "")
