"""`fednas audit` on made data: the real client keeps its claim, one without noise is caught."""

from __future__ import annotations

import pytest

from fednas_flwr.clients import release
from fednas_flwr.errors import ConfigError
from fednas_flwr.stages.audit import audit_search

SETTINGS = (
    *("algorithm=dp_fnas", "privacy=dp", "search_space.norm=group", "retrain.norm=group"),
    *("clients=1", "rounds=6", "algorithm.batch_size=null"),
    *("dataset.fractions={train: 0.8, validation: 0.1, test: 0.1}",),
)


def audited(compose_config, sigma: float, *, canaries: int = 48, confidence: float = 0.9999):
    config = compose_config(*SETTINGS, f"privacy.weights.noise_multiplier={sigma}")
    return audit_search(config, num_canaries=canaries, confidence=confidence)


@pytest.mark.parametrize("sigma", [1.0, 10.0])
def test_the_real_client_tells_no_more_than_it_claims(compose_config, sigma):
    audit = audited(compose_config, sigma)
    assert audit.result.epsilon <= audit.claim
    assert audit.result.num_guesses == 24
    assert 0.5 < audit.claim * sigma < 20


def test_a_client_without_noise_is_caught(compose_config, monkeypatch):
    monkeypatch.setattr(release, "add_noise", lambda total, *_, **__: total)
    audit = audited(compose_config, 500.0, confidence=0.99)  # at least 20 of 24 guesses are right
    assert audit.result.epsilon > audit.claim


def test_what_cannot_be_audited_is_said(compose_config):
    with pytest.raises(ConfigError, match="set algorithm=dp_fnas"):
        audit_search(compose_config(), num_canaries=10)
    null = [f"privacy.{state}.noise_multiplier=null" for state in ("weights", "alphas")]
    with pytest.raises(ConfigError, match="an audit needs the number"):
        audit_search(compose_config(*SETTINGS, *null), num_canaries=10)
    with pytest.raises(ConfigError, match="canaries=1000: expected 4 to"):
        audited(compose_config, 1.0, canaries=1000)
