"""Models that return to a site, where they are checked, kept in the site's folder and tested.

A kept model is a folder, named by the model's hash. It holds ``model.safetensors`` as it was
signed, ``MODEL_CARD.md``, ``signature.json``, and ``test.json``, the results on the site's own test
records, which never leave. A file from a server is tensors and JSON; nothing in it is executed.
Main function: :func:`keep`.
"""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import make_folder, write_atomically
from fednas_flwr.client.client import Client
from fednas_flwr.models.metrics import detailed, predicted
from fednas_flwr.models.prediction import MODEL_FILE, Model, read_model
from fednas_flwr.protocol import keys, messages
from fednas_flwr.protocol.requests import LARGEST_MODEL, KeepModel

STATE, DTYPE = "model", "uint8"  # state and dtype in which the file's bytes travel
MOST_MODELS = 100  # per site: a server must not fill its disk
CARD_FILE, TEST_FILE, SIGNATURE_FILE = "MODEL_CARD.md", "test.json", "signature.json"


def check(client: Client, request: messages.Request, asked: KeepModel) -> Path:
    """Return the folder of a new model's files, under a temporary name, after all checks.

    No record is read, so that the reason of a refusal may be sent.

    Raises:
        ConfigError: The site keeps no models, or no further ones; or the model is too large, not
            signed, not readable, or not for the site's data.
    """
    if client.kept_models is None:
        raise ConfigError("refused: this site keeps no models.")
    site, model = client.kept_models, _bytes(request)
    if not keys.is_signed(
        site.signer, asked.signature, run=request.header.run, model=model, card=asked.card
    ):
        raise ConfigError(f"refused: the model is not signed by the owner of {site.signer.name}.")
    make_folder(site.folder)
    names = {path.name for path in site.folder.iterdir() if not path.name.startswith(".")}
    digest = hashlib.sha256(model).hexdigest()
    folder = digest[:16]
    if len(names | {folder}) > MOST_MODELS:
        raise ConfigError(f"refused: this site has {len(names)} models, and keeps no more.")
    new = site.folder / f".{folder}.{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    make_folder(new)
    try:
        write_atomically(new / MODEL_FILE, model)
        write_atomically(new / CARD_FILE, asked.card)
        signed = {"run": request.header.run, "signature": asked.signature, "sha256": digest}
        write_atomically(new / SIGNATURE_FILE, json.dumps(signed, indent=2) + "\n")
        inputs = _read(client, new / MODEL_FILE).inputs
        for name in ("class_names", "schema", "shape", "transform", "multi_label"):
            if getattr(inputs, name) != getattr(client.inputs, name):
                raise ConfigError(f"refused: the model's {name} is not that of this site's data.")
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return new


def keep(client: Client, new: Path) -> Path:
    """Test the model in a checked folder and give the folder its name; return its path."""
    write_atomically(new / TEST_FILE, json.dumps(_test(client, new), indent=2) + "\n")
    folder = new.with_name(new.name.split(".")[1])
    shutil.rmtree(folder, ignore_errors=True)  # the same model, from a run that was resumed
    return new.replace(folder)


def _bytes(request: messages.Request) -> bytes:
    """Return the model's file in a request."""
    if set(request.states) != {STATE} or set(request.states[STATE]) != {DTYPE}:
        raise ConfigError(f"refused: a model travels as one vector of {DTYPE}, and alone.")
    vector = request.states[STATE][DTYPE]
    if not 0 < vector.numel() <= LARGEST_MODEL:
        raise ConfigError(
            f"refused: a model of {vector.numel():,} bytes; 1 to {LARGEST_MODEL:,} are taken."
        )
    return vector.numpy().tobytes()


def _read(client: Client, path: Path) -> Model:
    try:
        return read_model(path, client.make_network)
    except Exception as error:  # anything that a server can put into a file
        reason = f"{type(error).__name__}: {str(error).replace(str(path), 'it')[:200]}"
        raise ConfigError(f"refused: the model cannot be read ({reason}).") from error


def _test(client: Client, folder: Path) -> dict[str, Any]:
    """Return the model's results on the site's test records, as JSON values.

    No failure on records may reach the server, neither as an error nor as a number.
    """
    try:
        model = _read(client, folder / MODEL_FILE)
        network = model.network.to(client.device)
        test = replace(client.data.test, mean=model.inputs.mean, std=model.inputs.std)
        objective = client.objective.standardised(model.inputs.target)
        positive, threshold = model.inputs.positive, model.inputs.threshold
        objective = replace(objective, positive=positive, threshold=threshold)
        if not len(test):
            return {"num_examples": 0}
        logits, labels = predicted(network, test, client.device)
        return detailed(logits, labels, objective=objective, seed=client.seed)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
