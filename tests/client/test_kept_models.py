"""Models that return to a site: what it keeps, what it tests, and what it refuses."""

import hashlib
import json
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fednas_flwr import load
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.answer import answer
from fednas_flwr.client.client import KeptModels
from fednas_flwr.client.kept_models import MOST_MODELS
from fednas_flwr.models.export import export_safetensors
from fednas_flwr.models.metrics import evaluate
from fednas_flwr.models.prediction import MODEL_FILE, Model
from fednas_flwr.protocol import requests
from fednas_flwr.protocol.keys import is_signed, make_signing_key, sign_model
from fednas_flwr.protocol.messages import Header
from fednas_flwr.search.objective import Objective

from ..refusals import refuses
from .conftest import received

CARD = "# A model\n\nOf digits."


@pytest.fixture(scope="session")
def model(prepared, networks):
    return Model(networks.derived, prepared.inputs, networks.description)


@pytest.fixture(scope="session")
def file(model, tmp_path_factory):
    """The bytes of the run's model.safetensors."""
    return export_safetensors(model, tmp_path_factory.mktemp("run")).read_bytes()


@pytest.fixture
def keys(tmp_path):
    """The operator's key, and a stranger's."""
    made = {name: tmp_path / f"{name}.key" for name in ("signing", "stranger")}
    return {name: (path, make_signing_key(path)) for name, path in made.items()}


@pytest.fixture
def site(make_site, keys, tmp_path):
    """A private site; ``site.keep(file)`` sends it a model, by default as the operator does."""
    site = make_site()
    kept = KeptModels(tmp_path / "models", keys["signing"][1])
    client = replace(site.client, kept_models=kept)

    def keep(
        file, *, run="run", card=CARD, key="signing", shown=None, states=None, data_set="ward"
    ):
        signature = sign_model(keys[key][0], run="run", model=file, card=CARD)
        values = {"card": card, "signature": signature, "data_set": data_set}
        vector = torch.from_numpy(np.frombuffer(shown or file, dtype=np.uint8).copy())
        states = {"model": {"uint8": vector}} if states is None else states
        header = Header(run, "hand over", 0, 1, 0, "nonce")
        return answer(keep.client, received("query.keep_model", header, values, states))

    keep.client = client
    return SimpleNamespace(keep=keep, folder=kept.folder, rows=site.rows, client=client)


def outcome_at(site):
    """Return the only folder that a site keeps, and what it has found there of its test data."""
    (folder,) = site.folder.iterdir()
    return folder, json.loads((folder / "test.json").read_text())


def edited(model, tmp_path, **changes):
    """Return the bytes of a model whose inputs differ."""
    other = Model(model.network, replace(model.inputs, **changes), model.description)
    return export_safetensors(other, tmp_path).read_bytes()


def test_a_kept_model_is_open_to_its_site_alone_whatever_the_umask(site, file):
    before = os.umask(0)
    try:
        site.keep(file)
    finally:
        os.umask(before)
    made = [site.folder, *site.folder.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def test_a_site_keeps_the_model_and_tests_it_and_tells_nothing(site, file, model):
    reply, again = site.keep(file), site.keep(file)
    assert again == reply  # and it has one folder
    assert dict(reply.properties) == {}
    assert (reply.num_examples, reply.states, reply.metrics) == (1, {}, {})
    assert site.rows() == []  # nothing was released
    folder, found = outcome_at(site)
    assert folder.name == hashlib.sha256(file).hexdigest()[:16]
    assert (folder / MODEL_FILE).read_bytes() == file
    assert (folder / "MODEL_CARD.md").read_text() == CARD
    signed = json.loads((folder / "signature.json").read_text())
    pub = site.client.kept_models.signer
    assert is_signed(pub, signed["signature"], run=signed["run"], model=file, card=CARD)
    own = evaluate(model.network, site.client.data.test, torch.device("cpu"))
    assert (found["num_examples"], found["accuracy"]) == (own.num_examples, own.accuracy)
    assert found["num_examples"] == len(site.client.data.test) > 0
    x = torch.zeros(2, *model.inputs.shape, dtype=torch.uint8)
    torch.testing.assert_close(load(folder)(x), model(x))


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_site_tests_the_model_at_its_threshold(site, model, tmp_path, threshold):
    site.keep(edited(model, tmp_path, positive=0, threshold=threshold))
    objective = Objective(positive=0, threshold=threshold)
    ours = evaluate(model.network, site.client.data.test, torch.device("cpu"), objective=objective)
    assert outcome_at(site)[1]["accuracy"] == ours.accuracy


def test_the_reply_does_not_depend_on_records(site, file):
    """Neither on how many there are nor on what they hold, were it that nothing can be computed."""
    usual = site.keep(file)
    data, test = site.client.data, site.client.data.test
    for split in (replace(test, rows=test.rows[:0]), replace(test, labels=test.labels + 1000)):
        site.keep.client = replace(site.client, data=replace(data, test=split))
        assert site.keep(file) == usual
    assert "failed" in outcome_at(site)[1]


def test_what_is_not_signed_by_the_operator_leaves_no_file(site, file, no_record):
    other = bytearray(file)
    other[-1] ^= 1
    other_files = {"shown": bytes(other)}
    for changes in ({"key": "stranger"}, other_files, {"card": CARD + "!"}, {"run": "another"}):
        refuses(r"refused: the model is not signed by the owner of", site.keep, file, **changes)
    assert not site.folder.exists()


class Boom:
    """Ends this process when it is unpickled."""

    def __reduce__(self):
        return os._exit, (13,)


NO_MODELS = [pickle.dumps(Boom()), b"\xff" * 64, b"PK\x03\x04" + b"\0" * 64]
NO_MODELS += [size.to_bytes(8, "little") + of for size, of in ((2**60, b"{}"), (9999, b"[" * 9999))]


@pytest.mark.parametrize("content", NO_MODELS)
def test_a_file_that_is_no_model_is_refused_and_removed(content, site, no_record):
    told = refuses("refused: the model cannot be read", site.keep, content)
    assert str(site.folder) not in told
    assert list(site.folder.iterdir()) == []


def test_a_model_of_other_data_is_refused(site, model, tmp_path, no_record):
    names = tuple("abcdefghij"[: len(model.class_names)])
    for name, value in (("class_names", names), ("shape", (1, 9, 9))):
        with pytest.raises(ConfigError, match=f"the model's {name} is not that of this site's"):
            site.keep(edited(model, tmp_path, **{name: value}))
    assert list(site.folder.iterdir()) == []


def test_states_of_another_form_are_refused(site, file, monkeypatch, no_record):
    vector = torch.zeros(9, dtype=torch.uint8)
    for states in (
        {},
        {"weights": {"uint8": vector}},
        {"model": {"float32": vector.float()}},
        {"model": {"uint8": vector}, "weights": {"float32": vector.float()}},
    ):
        refuses("a model travels as one vector of uint8, and alone", site.keep, file, states=states)
    refuses("a model of 0 bytes", site.keep, file, states={"model": {"uint8": vector[:0]}})
    monkeypatch.setattr("fednas_flwr.client.kept_models.LARGEST_MODEL", len(file) - 1)
    assert requests.LARGEST_MODEL == 2**27
    refuses(f"a model of {len(file):,} bytes", site.keep, file)


def test_a_server_cannot_fill_the_disk(site, file):
    site.folder.mkdir()
    for number in range(MOST_MODELS):
        (site.folder / f"{number:016x}").mkdir()
    refuses(f"this site has {MOST_MODELS} models, and keeps no more", site.keep, file)


def test_a_site_that_keeps_none_or_whose_policy_refuses_gets_none(site, make_site, file):
    site.keep.client = replace(site.client, kept_models=None)
    refuses("refused: this site keeps no models", site.keep, file)
    site.keep.client = site.client
    refuses("rule data_sets", site.keep, file, data_set="other")
    others = make_site(policy={"actions": ["query.describe", "query.commit"]}, committed=[])
    site.keep.client = replace(others.client, kept_models=site.client.kept_models)
    refuses(r"rule actions: action=query\.keep_model", site.keep, file)
    assert not site.folder.exists()


def test_keys_that_are_none_are_one_sentence(tmp_path, keys):
    none = tmp_path / "none.pem"
    none.write_text("no key")
    refuses("the key .* cannot be used", sign_model, none, run="run", model=b"m", card="c")
    with pytest.raises(ConfigError, match="the key .* cannot be used"):
        is_signed(none, "ab" * 64, run="run", model=b"m", card="c")
    assert not is_signed(keys["signing"][1], "zz" * 64, run="run", model=b"m", card="c")
    refuses("", make_signing_key, keys["signing"][0], error=FileExistsError)
