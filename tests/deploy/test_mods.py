"""Flower's mods around the client app."""

from flwr.clientapp.mod import message_size_mod

from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.deploy.server_app import serve
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.settings import dump_config


def test_mods_are_around_every_answer_and_change_no_bit(compose_config, run_inline, tmp_path):
    brief = ["clients=2", "rounds=1", "retrain.rounds=1"]
    asked: list[str] = []

    def noting(message, context, answer):
        asked.append(message.metadata.message_type)
        return answer(message, context)

    config = create_run_folder(compose_config(*brief, f"run_dir={tmp_path / 'run'}"))
    app = make_client_app(dump_config(config), mods=[message_size_mod, noting])
    serve(config, InProcessGrid(app, config.clients), listeners=[], resumed=False)
    assert {"query.describe", "train.search", "train.weights", "evaluate.model"} <= set(asked)
    plain = run_inline(*brief).folder
    for name in ("genotype.json", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (plain / name).read_bytes()
