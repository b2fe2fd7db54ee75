"""Flower's mods around the client app."""

from flwr.clientapp.mod import message_size_mod

from ..finished_runs import assert_same_files, in_process


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
