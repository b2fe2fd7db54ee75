"""What differs between the package that a checkout builds and Flower's app bundle of it.

Flower makes an environment of the bundle's dependencies for every run, which would be several
gigabytes, although the bundle only names the apps of the package that is installed. So the bundle
is a project without dependencies, and without files.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """Dependencies, extras and readme of the package; of the bundle, none."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set them."""
        is_package = _is_package(self.root)
        for name in ("dependencies", "optional-dependencies"):
            metadata[name] = self.config[name] if is_package else type(self.config[name])()
        if is_package:
            metadata["readme"] = "README.md"


class Files(BuildHookInterface):
    """Files from outside the package's folder that a wheel has in it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them, unless the wheel only points to the checkout, which has them."""
        if _is_package(self.root) and version == "standard":
            build_data["force_include"].update(self.config["files"])


def _is_package(root: str) -> bool:
    return (Path(root) / "fednas_flwr").is_dir()
