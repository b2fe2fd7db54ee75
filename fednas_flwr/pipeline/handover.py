"""The model returns to the sites: file, card and signature in one message to each that keeps it.

Simulated clients are not asked: their model lies in the run folder. Main function:
:func:`hand_over`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from fednas_flwr.algorithms.private_rounds import site_of
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.models.prediction import MODEL_FILE
from fednas_flwr.pipeline.run_stages import Run
from fednas_flwr.protocol.requests import LARGEST_MODEL, LONGEST_CARD, KeepModel
from fednas_flwr.protocol.signed_model import SIGNING_KEY, sign_model
from fednas_flwr.report.model_card import card_of
from fednas_flwr.runs.numbers import BASELINES_FOLDER
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings.incompatible import has_real_sites


def hand_over(run: Run) -> None:
    """Send the exported model to the real sites that keep models, and tell which have it.

    Whatever goes wrong is a warning: the run has its model.
    """
    keeping = [c for c in run.cohort.clients if run.cohort.properties[c].get("keeps_model")]
    beside = run.folder.parent.name == BASELINES_FOLDER  # whose network nobody has looked for
    if not has_real_sites(run.config) or not keeping or beside:
        return
    with run.stage("hand over"):
        model = (run.folder / MODEL_FILE).read_bytes()
        try:
            request = _request(run, model)
        except ConfigError as error:
            run.log.emit("warning", message=f"the model does not return to the sites: {error}")
            return
        values = torch.from_numpy(np.frombuffer(model, dtype=np.uint8).copy())
        kept = []
        try:
            for client, _ in run.cohort.ask(
                Exchange(
                    "query.keep_model",
                    stage="hand over",
                    settings=request,
                    states={"model": {"uint8": values}},
                    among=keeping,
                )
            ):
                kept.append(client)
        except QuorumError as error:
            run.log.emit("warning", message=f"few sites have the model: {error}")
        run.log.emit("handed_over", clients=kept, asked=keeping)


def _request(run: Run, model: bytes) -> KeepModel:
    """Build the request that goes to every site beside the file's bytes.

    Raises:
        ConfigError: There is no key to sign with, or the model or its card is too large.
    """
    key = os.environ.get(SIGNING_KEY)
    if not key:
        raise ConfigError(
            f"{SIGNING_KEY} is not set where the server's app runs: start it by start.sh of "
            "`fednas provision`, or name a key that sites know."
        )
    card = card_of(run.folder)
    if len(model) > LARGEST_MODEL or len(card.encode()) > LONGEST_CARD:
        raise ConfigError(
            f"its file has {len(model):,} bytes and its card {len(card.encode()):,}, where sites "
            f"take {LARGEST_MODEL:,} and {LONGEST_CARD:,}."
        )
    signature = sign_model(Path(key), run=run.cohort.run, model=model, card=card)
    return KeepModel(card=card, signature=signature, site=site_of(run.config))
