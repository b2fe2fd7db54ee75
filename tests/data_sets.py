"""Data sets by their names and the few settings that a test is about."""

from pathlib import Path

import numpy as np
import torch

from fednas_flwr.data.datasets import prepare
from fednas_flwr.data.readers import DATA_SETS, data_settings
from fednas_flwr.data.records import Records, record_ids


def read(name, path, **given):
    """What the reader of a data set makes of a file or folder."""
    return DATA_SETS[name].read(data_settings(name, {"cache": "none", **given}), path)


def prepared(name, *, sites=False, **given):
    """A data set as clients and server get it."""
    texts = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
    return prepare(data_settings(name, texts), sites=sites)


def records_of(features, labels=None, *, class_names=None, **more):
    """Records of arrays, each with an id of its own; all of one class unless labels are given."""
    labels = np.zeros(len(features)) if labels is None else labels
    names = class_names or tuple(map(str, range(int(max(labels)) + 1)))
    ids = record_ids(str(row).encode() for row in range(len(features)))
    arrays = torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64))
    return Records(*arrays, ids, names, **more)
