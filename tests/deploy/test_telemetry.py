import pytest

from ..processes import told


@pytest.mark.run
@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("1", "1")])
def test_flowers_telemetry_is_off_unless_the_user_turns_it_on(given, expected, monkeypatch):
    """Also for those who import a strategy and never go through ``federation``."""
    code = "import fednas_flwr, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    monkeypatch.delenv("FLWR_TELEMETRY_ENABLED", raising=False)
    own = {} if given is None else {"FLWR_TELEMETRY_ENABLED": given}
    assert told("-c", code, env=own).strip() == expected


@pytest.mark.run
def test_onnxruntime_has_nothing_to_send(tmp_path, monkeypatch):
    for name in ("CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    told("-c", "import fednas_flwr, onnxruntime", env={"HOME": str(tmp_path)})
    assert not [*tmp_path.rglob("*.db")]
