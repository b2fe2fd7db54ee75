"""Which dataclass a group of a composed tree is, and where the files of the groups stand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednas_flwr.base.errors import ConfigError, show, unknown_choice


def conf_folder() -> Path:
    """Return the folder of Hydra's groups: in the wheel, else beside the package."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def expanded(setting: str, path: str) -> Path:
    """Return the path that the user gave for a setting, with ``~`` as a home folder.

    Raises:
        ConfigError: It names the home of a user there is not.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{setting}={show(path)}: {Path(path).parts[0]} is no user's home folder; write the "
            "whole path."
        ) from error


def choose_kind(
    tree: Mapping[str, Any], group: str, kinds: Mapping[str, type], *, hint: str = ""
) -> type:
    """Return the dataclass that a group's name stands for; ``hint`` ends an error's sentence."""
    settings = tree.get(group)
    name = settings.get("name") if isinstance(settings, Mapping) else settings
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(f"{str(unknown_choice(group, name, kinds)).removesuffix('.')}{hint}.")
    return kinds[name]
