"""Data sets by their names and the few settings that a test is about."""

from pathlib import Path

from fednas_flwr.data.datasets import prepare
from fednas_flwr.data.readers import DATA_SETS, data_settings


def read(name, path, **given):
    """What the reader of a data set makes of a file or folder."""
    return DATA_SETS[name].read(data_settings(name, {"cache": "none", **given}), path)


def prepared(name, *, sites=False, **given):
    """A data set as clients and server get it."""
    texts = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
    return prepare(data_settings(name, texts), sites=sites)
