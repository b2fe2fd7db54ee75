"""A trained model that takes the user's raw data: normalisation, classes and softmax are inside.

A run exports a :class:`Model`. Its ``predict`` takes arrays, DataFrames and files; ``forward``
takes tensors, for code that builds on it.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import load_json
from fednas_flwr.base.pretrained import Frozen
from fednas_flwr.data.features import make_transform
from fednas_flwr.data.oddities import of_brightness
from fednas_flwr.data.raw import Label, named_labels, read_raw
from fednas_flwr.data.records import Inputs, normalised
from fednas_flwr.search.objective import Objective, Regression
from fednas_flwr.settings.data_settings import Transform
from fednas_flwr.settings.parser import Between

MODEL_FILE = "model.safetensors"
TRANSFORM = "transform."  # prefix of the names of a backbone's tensors in that file
METADATA_KEY = "fednas_model"  # key in that file of the descriptions of network and inputs
BATCH_SIZE = 256


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for records.

    Attributes:
        inputs: Inputs of the model, with the ``threshold`` that was used.
        names: One per record: a file's path, or the row's number from 0.
        probabilities: float32 ``[N, classes]``; each row sums to 1, except with several labels. For
            a number to predict ``[N, 1]``, the predictions in its unit.
        labels_N: Labels in the data, as ``RawData.labels``; None if there are none.
        notes: Sentences about what is odd in the records.
        ids: The person of each record, by the same column as in training; None if it is missing.
        logits: float32 ``[N, classes]``, from which the probabilities follow.
    """

    inputs: Inputs
    names: tuple[str, ...]
    probabilities: np.ndarray
    labels_N: Tensor | None = None
    notes: tuple[str, ...] = ()
    ids: Sequence[str] | None = None
    logits: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per column of ``probabilities``."""
        return self.inputs.class_names

    @property
    def chosen(self) -> Tensor:
        """The class of each record, or its labels, in the form of ``labels_N``."""
        shares = torch.tensor(self.probabilities)
        return shares[:, 0] if self.inputs.target else self.objective.decided(shares)

    @property
    def labels(self) -> Sequence[Label]:
        """The class or labels of each record by name, or its number."""
        return named_labels(self.chosen, self.class_names)

    @property
    def truth(self) -> Sequence[Label] | None:
        """The same according to the data; None if the data has no labels."""
        return None if self.labels_N is None else named_labels(self.labels_N, self.class_names)

    @property
    def objective(self) -> Objective:
        """The objective by which scores are computed."""
        return _objective(self.inputs)

    @property
    def accuracy(self) -> float | None:
        """Share of records whose label is that in the data, in [0, 1]; None if it has no classes.

        With several labels, the mean share of labels that are right.
        """
        if self.labels_N is None or not len(self) or self.inputs.target:
            return None
        return float((self.chosen == self.labels_N).double().mean())

    def table(self) -> Any:
        """Return a DataFrame with ``record``, ``label`` and each class's ``probability of ...``.

        For a number to predict, ``prediction`` replaces the last two. There is a column ``truth``
        if the data has the class of each record, and the column of ids comes first if the data has
        it. Several labels are ``labels``, separated by semicolons. A column of ids that has one of
        these names gets a final ``_``.
        """
        import pandas as pd

        inputs = self.inputs
        word = "prediction" if inputs.target else "labels" if inputs.multi_label else "label"
        columns: dict[str, Any] = {word: self.labels}
        if self.truth is not None:
            columns["truth"] = self.truth
        if inputs.multi_label:
            columns = {n: [";".join(labels) for labels in of] for n, of in columns.items()}
        shares = zip(self.class_names, self.probabilities.T, strict=True)
        probabilities = {f"probability of {n}": share for n, share in shares if not inputs.target}
        table = pd.DataFrame({"record": self.names, **columns, **probabilities})
        if self.ids is not None:
            name = inputs.id_column
            while name in table:
                name += "_"
            table.insert(0, name, self.ids)
        return table


class Model(nn.Module):
    """A trained network and all that it needs to know about raw records.

    Args:
        network: Network from normalised records to logits; it is put into evaluation mode.
        inputs: Description of raw records.
        description: Description from which the network is built.
        backbone: Settings of the transform, with the file of a backbone's weights; None if they are
            loaded later.

    Attributes:
        network: As the argument.
        inputs: As the argument.
        description: As the argument.
        transform: Transform of images into the network's features; None if it takes the images.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Inputs,
        description: Mapping[str, Any] | None = None,
        backbone: Transform | None = None,
    ) -> None:
        """Put the network into evaluation mode."""
        super().__init__()
        self.network = network
        self.inputs = inputs
        self.description = dict(description or {})
        self.transform = make_transform(inputs.transform, inputs.shape, backbone)
        self.eval()

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class or label, in the order of the probabilities."""
        return self.inputs.class_names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record as the network takes it."""
        return self.inputs.shape if self.transform is None else self.transform.output_shape

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities ``[N, classes]``: softmax, or sigmoid of each of several labels.

        A model that predicts numbers returns predictions ``[N, 1]`` in the target's unit.

        Args:
            x: uint8 ``[N, C, H, W]`` from 0 to 255 or float from 0 to 1; for a table float32
                ``[N, F]``, NaN where missing, see :func:`~fednas_flwr.data.records.feature_names`.
        """
        return _objective(self.inputs).probabilities(self.logits(x))

    def logits(self, x: Tensor) -> Tensor:
        """Return logits ``[N, classes]`` for the inputs of :meth:`forward`."""
        if self.transform is not None:
            x = self.transform(x if x.is_floating_point() else x.float() / 255)
        return self.network(normalised(x, self.inputs.mean, self.inputs.std, self.inputs.limit))

    @torch.no_grad()
    def predict(
        self, data: Any, *, threshold: float | None = None, quiet: bool = True
    ) -> Predictions:
        """Return the labels and probabilities of raw data.

        Args:
            data: Images or a table, in memory or as a path: see
                :func:`~fednas_flwr.data.raw.read_raw`.
            threshold: Probability from which on a record is of the positive class, or has a label;
                None is the model's own threshold, or the most probable class if it has none.
            quiet: False shows a bar of what is done.

        Raises:
            ConfigError: The model does not take such data, or there is no class for a threshold.
        """
        threshold = self.inputs.threshold if threshold is None else threshold
        if threshold is not None:
            Between(0, 1).check("threshold", threshold)
        inputs, classes = replace(self.inputs, threshold=threshold), len(self.class_names)
        objective = _objective(inputs)
        is_called = objective.multi_label or objective.positive_class(classes) is not None
        if threshold is not None and not is_called:
            raise ConfigError(
                f"threshold={threshold:g} is for a model of two classes, of several labels, or "
                f"with evaluation.positive; this one has {classes} classes: leave it out."
            )
        raw = read_raw(data, self.inputs)
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        self.eval()
        outputs = [torch.zeros(0, classes)]
        shades: list[Tensor] = []  # black images only, as one shade is common in prediction
        for x in track(raw.batches(BATCH_SIZE), "records", len(raw) / BATCH_SIZE, disable=quiet):
            shades += [torch.stack([x.max(), x.new_tensor(0)])] if x.dtype == torch.uint8 else []
            outputs.append(self.logits(x.to(device)).float().cpu())
        logits = torch.cat(outputs)
        notes = (*raw.notes, *of_brightness(shades))
        for note in notes:
            warnings.warn(note, stacklevel=3)  # torch's no_grad is the direct caller
        shares = objective.probabilities(logits).numpy()
        return Predictions(inputs, tuple(raw.names), shares, raw.labels, notes, raw.ids, logits)


def _objective(inputs: Inputs) -> Objective:
    """Return the objective for which a model is trained."""
    if inputs.target:
        return Regression(target=inputs.target)
    return Objective(None, inputs.positive, inputs.multi_label, inputs.threshold)


def read_model(path: Path, make_network: Callable[[Mapping[str, Any]], nn.Module]) -> Model:
    """Return the model in a file, on the CPU; the file has tensors and JSON, and executes nothing.

    Args:
        path: File written by :func:`~fednas_flwr.models.export.export_safetensors`.
        make_network: Function that builds the network of a description.

    Raises:
        ConfigError: There is no such file, or its metadata do not describe its content.
    """
    description, inputs = read_metadata(path)
    network, tensors = make_network(description), load_file(path)
    model = Model(network, inputs, description)
    if isinstance(model.transform, Frozen):
        states = [name for name in tensors if name.startswith(TRANSFORM)]
        frozen = {name.removeprefix(TRANSFORM): tensors.pop(name) for name in states}
        model.transform.load_state_dict(frozen)
        if model.transform.digest != inputs.transform[-1]:
            raise ConfigError(f"{path} holds another backbone than its metadata say.")
    network.load_state_dict(tensors)
    return model


def read_metadata(path: Path) -> tuple[dict[str, Any], Inputs]:
    """Return the descriptions of the network in a file and of its inputs.

    Raises:
        ConfigError: As in :func:`read_model`.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: no run, or it has not reached its export.")
    try:
        with safe_open(path, framework="pt") as file:
            about = load_json((file.metadata() or {})[METADATA_KEY])
        return about["network"], Inputs.from_json(json.dumps(about["inputs"]))
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{path} does not describe its model ({error}): it is of another version, or "
            "not whole; copy it again, or export it anew, by fednas run resume=<run folder>."
        ) from error
