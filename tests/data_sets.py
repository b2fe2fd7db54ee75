"""Data sets by their names and the few settings that a test is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fednas_flwr.data.datasets import Prepared, prepare
from fednas_flwr.data.readers import DATA_SETS, data_settings
from fednas_flwr.data.records import RecordsPair


def read(name: str, path: Path, **given: Any) -> RecordsPair:
    """What the reader of a data set makes of a file or folder."""
    return DATA_SETS[name].read(data_settings(name, {"cache": "none", **given}), path)


def prepared(name: str, *, sites: bool = False, **given: Any) -> Prepared:
    """A data set as clients and server get it."""
    texts = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
    return prepare(data_settings(name, texts), sites=sites)
