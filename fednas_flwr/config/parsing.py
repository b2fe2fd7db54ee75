"""Which dataclass a group of a composed tree is, and where the files of the groups stand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednas_flwr.errors import ConfigError, unknown_choice


def conf_folder() -> Path:
    """Return the folder of Hydra's groups: in the wheel, else beside the package."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def choose_kind(
    tree: Mapping[str, Any], group: str, kinds: Mapping[str, type], *, hint: str = ""
) -> type:
    """Return the dataclass that a group's name stands for; ``hint`` ends an error's sentence."""
    settings = tree.get(group)
    name = settings.get("name") if isinstance(settings, Mapping) else settings
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(f"{str(unknown_choice(group, name, kinds)).removesuffix('.')}{hint}.")
    return kinds[name]
