"""Compositions that are remembered are Hydra's, to the last value and the last sentence."""

import pytest

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings import hydra_config

from .conftest import compose_by_hydra

COMPOSED = [
    "",
    "algorithm=feathers seed=3 rounds=2 algorithm.ranges.lr={low:.1,high:1,log:true}",
    "experiment=dp_fnas/fashion_mnist privacy.weights.noise_multiplier=2 trackers=[]",
    "privacy=dp secure_sum={least_sites:3} dataset.cache=${oc.env:HOME} nothing.like=it",
    "dataset.class_names={} hydra.run.dir=here",
    "seed=1,2",
    "algorithm=fedavgg",
    "++algorithm=fedavg",
    "~trackers",
]


@pytest.mark.parametrize("overrides", COMPOSED)
def test_what_is_remembered_is_what_hydra_composes(overrides, monkeypatch):
    def composed():
        try:
            return hydra_config.compose_tree(overrides.split())
        except ConfigError as error:
            return str(error)

    found = [composed() for _ in range(2)]
    found[0].clear() if isinstance(found[0], dict) else None
    again = composed()  # whatever is done to what was handed out
    monkeypatch.setattr(hydra_config, "compose", compose_by_hydra)
    assert found[1] == again == composed()
