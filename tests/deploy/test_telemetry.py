import pytest

from ..processes import told

FLOWER = ("flwr.supercore.telemetry", "FLWR_TELEMETRY_ENABLED")
HUB = ("huggingface_hub.constants", "HF_HUB_DISABLE_TELEMETRY")
KNOWN = [(*FLOWER, None, "0"), (*FLOWER, "1", "1"), (*HUB, None, "True"), (*HUB, "0", "False")]


@pytest.mark.run
@pytest.mark.parametrize(("module", "name", "given", "expected"), KNOWN)
def test_telemetry_is_off_unless_the_user_turns_it_on(module, name, given, expected, monkeypatch):
    """Also for those who import a strategy and never go through ``federation``."""
    code = f"import fednas_flwr, {module} as t; print(t.{name})"
    monkeypatch.delenv(name, raising=False)
    own = {} if given is None else {name: given}
    assert told("-c", code, env=own).strip() == expected


@pytest.mark.run
def test_onnxruntime_has_nothing_to_send(tmp_path, monkeypatch):
    for name in ("CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    told("-c", "import fednas_flwr, onnxruntime", env={"HOME": str(tmp_path)})
    assert not [*tmp_path.rglob("*.db")]
