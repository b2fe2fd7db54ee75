"""The Flower app bundle of a run: what the launcher sends, and the check that a site makes of it.

The bundle only names the two apps of the installed package, so no code of ours travels; a site
that runs ``client_process`` executes nothing of a bundle and refuses any other. Main functions:
:func:`write_bundle`, :func:`check_bundle`.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import fednas_flwr
from fednas_flwr.errors import ConfigError

CONFIG_KEY = "config-json"  # of Flower's run configuration, as the next
RESUMED_KEY = "resumed"
LAUNCHED = "fednas_launched"  # name of the bundle's Python package
_NOT_READABLE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, ValueError),
    *(NotImplementedError, RuntimeError),  # an unknown compression, a password
)
_MOST_FILES, _LARGEST_FILE = 20, 100_000  # ours are few and small; an archive may claim terabytes


def write_bundle(folder: Path) -> Path:
    """Write the Flower app that names the installed package's apps, and return its folder."""
    for name, text in bundle_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def check_bundle(fab: bytes) -> None:
    """Refuse a bundle that is not the one of the installed package.

    Compressors differ between machines, so the files are compared, not the archives.

    Args:
        fab: Flower's bundle as it came, which may be anything.

    Raises:
        ConfigError: A name or byte of a file differs, e.g. because the versions do, or two files
            have one name.
    """
    own = _digest({name: text.encode() for name, text in bundle_files().items()})
    if (found := _digest(_read_bundle(fab))) != own:
        raise ConfigError(
            f"the run's app code {found[:12]} is refused: this site runs the fednas_flwr "
            f"{fednas_flwr.__version__} that is installed here, whose bundle is {own[:12]}, and no "
            "code of a run; start it by `fednas run` of that version."
        )


def _read_bundle(fab: bytes) -> dict[str, bytes]:
    """Return a bundle's files but for Flower's list of them; of what is no such archive, itself."""
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as archive:
            items = archive.infolist()
            names = {item.filename for item in items}
            if (
                len(items) > _MOST_FILES
                or len(names) < len(items)  # which of two files counts depends on who unpacks
                or any(item.file_size > _LARGEST_FILE for item in items)
            ):
                return {"": fab}
            files = {item.filename: archive.read(item) for item in items}
    except _NOT_READABLE:
        return {"": fab}
    files.pop(".info/CONTENT", None)
    return files


def _digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of files, names included, in hex."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()


def bundle_files() -> dict[str, str]:
    """Return the texts of the bundle's files by their paths."""
    files = {
        "LICENSE": "Apache License 2.0; the code that runs is the installed package fednas_flwr.\n",
        "pyproject.toml": _PYPROJECT,
        f"{LAUNCHED}/__init__.py": '"""Names the apps of the installed fednas_flwr."""\n',
    }
    for side in ("server", "client"):
        files[f"{LAUNCHED}/{side}_app.py"] = (
            f'"""The {side} app of the installed package."""\n\n'
            f"from fednas_flwr.federation.{side}_app import app\n\n"
            '__all__ = ["app"]\n'
        )
    return files


# In the form in which Flower writes it into a bundle.
_PYPROJECT = f"""[build-system]
requires = [
    "hatchling",
]
build-backend = "hatchling.build"

[project]
name = "{LAUNCHED.replace("_", "-")}"
version = "{fednas_flwr.__version__}"
description = "A run of fednas_flwr"
dependencies = [
    "flwr>=1.41,<1.42",
]

[project.license]
file = "LICENSE"

[tool.hatch.build.targets.wheel]
packages = [
    ".",
]

[tool.flwr.app]
publisher = "fednas"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{LAUNCHED}.server_app:app"
clientapp = "{LAUNCHED}.client_app:app"

[tool.flwr.app.config]
{CONFIG_KEY} = ""
{RESUMED_KEY} = false
"""
