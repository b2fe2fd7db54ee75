"""The Flower app bundle of a run: the launcher sends it, and sites check it.

The bundle is the output of ``flwr build`` for the project's root. It only names the two apps of the
installed package, so none of our code travels. A site that runs ``sites.executor`` executes nothing
in a bundle and refuses any other. Main functions: :func:`write_bundle`, :func:`check_bundle`.
"""

import hashlib
import io
import json
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import fednas_flwr
from fednas_flwr.base.errors import ConfigError

CONFIG_KEY = "config-json"  # key of Flower's run configuration, like the next two
RESUMED_KEY = "resumed"
OVERRIDES_KEY = "overrides"
PROJECT_FILE = "pyproject.toml"
BUNDLE_FILES = (PROJECT_FILE, "LICENSE", "hatch_build.py")
# The last is for an unknown compression, or a password
_NOT_READABLE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)
_MOST_FILES, _LARGEST_FILE = 20, 100_000  # our files are few and small; an archive can claim more


def checkout() -> Path | None:
    """Return the project's root if the package is in it; None if a wheel was installed."""
    folder = Path(fednas_flwr.__file__).parents[1]
    return folder if _is_project(folder) else None


def typed_in() -> Path:
    """Return the project's root in which ``flwr run .`` was typed, else the working directory.

    A SuperLink that Flower has started works in the folder where it was started: in a clone,
    whichever version is installed.
    """
    here = Path.cwd()
    return here if _is_project(here) else checkout() or here


def _is_project(folder: Path) -> bool:
    return (folder / PROJECT_FILE).is_file() and (folder / fednas_flwr.__name__).is_dir()


def write_bundle(folder: Path) -> Path:
    """Write the Flower app that names the installed package's apps, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in bundle_files().items():
        (folder / name).write_bytes(content)
    return folder


def check_bundle(fab: bytes) -> None:
    """Refuse a bundle that is not the one of the installed package.

    Compressors differ between machines, so the files are compared, not the archives. Of the project
    file, which Flower rewrites, the values are compared.

    Args:
        fab: Flower's bundle as received, which may be anything.

    Raises:
        ConfigError: A name or byte of a file differs, e.g. because the versions do, or two files
            have one name.
    """
    ours = _digest(bundle_files())
    if (found := _digest(_read_bundle(fab))) != ours:
        raise ConfigError(
            f"the run's app code {found[:12]} is refused: this site runs the fednas_flwr "
            f"{fednas_flwr.__version__} that is installed here, whose bundle is {ours[:12]}, and "
            "no code of a run; start it by `fednas run` or `flwr run` of that version."
        )


def bundle_files() -> dict[str, bytes]:
    """Return the bundle's files by their names."""
    folder = checkout() or Path(fednas_flwr.__file__).parent / "app"
    return {name: (folder / name).read_bytes() for name in BUNDLE_FILES}


def _read_bundle(fab: bytes) -> dict[str, bytes]:
    """Return the files of a bundle without Flower's list of them; other bytes unchanged."""
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
    contents = {n: _values(of) if n == PROJECT_FILE else of for n, of in sorted(files.items())}
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _values(toml: bytes) -> bytes:
    """Return a TOML file in a canonical form; other text unchanged."""
    try:
        return json.dumps(tomllib.loads(toml.decode()), sort_keys=True).encode()
    except (ValueError, TypeError, RecursionError):  # a date is not JSON, and not ours
        return toml
