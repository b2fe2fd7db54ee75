"""Sites fork a process for every message: what it imports itself is imported anew in each."""

import json

import pytest
from flwr.clientapp.mod import message_size_mod
from flwr.common.serde import recorddict_to_proto

from fednas_flwr.deploy.server_app import serve
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.settings import dump_config

from ..finished_runs import assert_same_files, in_process
from ..processes import told

# What takes long to import and has no part in a step on prepared data.
HEAVY = {
    *("datasets", "dp_accounting", "flwr_datasets", "hydra", "onnx", "onnxruntime", "opacus"),
    *("pandas", "plotly", "ray", "scipy", "sklearn", "sqlalchemy", "tensorboard", "torchvision"),
}
PROCESS = """
import json, sys
from pathlib import Path
import fednas_flwr.deploy.sites.executor
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid

config, content, action = sys.argv[1:]
grid = InProcessGrid(make_client_app(config), 3)
content = recorddict_from_proto(RecordDict.FromString(Path(content).read_bytes()))
(reply,) = grid.send_and_receive([grid.create_message(content, action, 2, "")])
assert reply.has_content(), reply.error.reason
assert "torch._dynamo" not in sys.modules  # takes a second
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


class Recorded(Exception):
    """The first request to train is on disk."""


@pytest.mark.run
@pytest.mark.parametrize(
    "overrides",
    [(), ("algorithm=dp_fnas", "privacy=dp", "privacy.epsilon=1000", "search_space.norm=group")],
    ids=["exact", "private"],
)
def test_a_process_that_only_searches_imports_little(compose_config, tmp_path, overrides):
    own = ("stages=[search]", f"run_dir={tmp_path / 'run'}")
    config = create_run_folder(compose_config(*overrides, *own))
    grid = in_process(config)
    push, file, actions = grid.push_messages, tmp_path / "request", []

    def record(messages):
        first, *others = messages  # to client 0
        if first.metadata.message_type.startswith("train."):
            actions.append(first.metadata.message_type)
            file.write_bytes(recorddict_to_proto(first.content).SerializeToString())
            raise Recorded
        return push([first, *others])

    grid.push_messages = record  # type: ignore[method-assign]
    with pytest.raises(Recorded):
        serve(config, grid, listeners=[], resumed=False)  # prepares the data, as ever before
    printed = told("-c", PROCESS, dump_config(config), file, actions[0])
    assert not HEAVY & set(json.loads(printed.splitlines()[-1]))


# --- Nothing is sent to the makers of libraries


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


# --- Flower's mods around the client app


def test_mods_are_around_every_answer_and_change_no_bit(compose_config, run_inline):
    brief = ["clients=2", "rounds=1", "retrain.rounds=1"]
    asked: list[str] = []

    def noting(message, context, answer):
        asked.append(message.metadata.message_type)
        return answer(message, context)

    grid = in_process(compose_config(*brief), mods=[message_size_mod, noting])
    run = run_inline(*brief, grid=lambda *_: grid)
    assert {"query.describe", "train.search", "train.weights", "evaluate.model"} <= set(asked)
    assert_same_files(run.folder, run_inline(*brief).folder)
