"""Whatever averages what clients trained goes on bit by bit: its states, values and moments."""

import shutil

import pytest
import torch

from fednas_flwr.protocol.states import MOMENTS

UNEQUAL = ("clients=2", "partition=quantity", "partition.fractions=[0.65,0.35]")
GIVEN = ("algorithm=fedavg", "algorithm.network=plain_cnn", "retrain.batch_size=32")
SEARCH = ("algorithm=fed_darts", "search_space.norm=group", "algorithm.batch_size=16")
TRAININGS = {
    "search, averaged": (*SEARCH, "training.momentum=averaged"),
    "averaged": (*GIVEN, "training.momentum=averaged"),
    "gradients": (*GIVEN, "retrain.exchange=gradients"),
    "adam": (*GIVEN, "server_optimizer=adam"),
    "fedex": ("algorithm=fedex", "algorithm.network=plain_cnn", "algorithm.num_configurations=5"),
}
ROUNDS = 3


@pytest.mark.parametrize("training", TRAININGS)
def test_resume_after_round_1_gives_equal_tensors(training, compose_config, federate, tmp_path):
    config = compose_config(*TRAININGS[training], *UNEQUAL)
    stage = "search" if training.startswith("search") else "retrain"
    whole = federate(config, checkpoints=tmp_path / "whole")
    whole.strategy.start(whole.grid, num_rounds=ROUNDS)
    later = shutil.ignore_patterns(f"{stage}-000002.*", f"{stage}-000003.*")
    half = shutil.copytree(tmp_path / "whole", tmp_path / "half", ignore=later)
    resumed = federate(config, checkpoints=half)
    resumed.strategy.start(resumed.grid, num_rounds=ROUNDS)
    assert [e["round"] for e in resumed.named("round")] == [2, 3]
    assert resumed.strategy.values == whole.strategy.values
    states = [f.strategy.states for f in (whole, resumed)]
    assert (MOMENTS in states[0]) == training.endswith("averaged")
    for state, packed in states[0].items():
        assert all(torch.equal(v, states[1][state][d]) for d, v in packed.items()), state
