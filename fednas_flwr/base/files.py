"""Files that a reader finds whole or not at all, whatever happens while they are written.

Content goes to a temporary file in the same folder, which is synced and renamed. Then the folder is
synced, so that the new name also survives a power cut. Main function: :func:`write_atomically`;
:func:`replacing` is for writers that need a path. Others cannot write files made by these
functions, whatever the umask is.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fednas_flwr.base.errors import ConfigError

OTHERS_WRITE = 0o022  # bits of a mode


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all, and return its path.

    Args:
        path: Path in an existing folder; an older file is replaced.
        content: Content of the file; text is written in UTF-8.

    Raises:
        OSError: The content could not be written; an older file is unchanged.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path ``.<name>.<process>.tmp``; the file written there becomes ``path``.

    If the block raises, ``path`` is unchanged and the temporary file is removed. Only a killed
    process leaves it behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.chmod(temporary.stat().st_mode & ~OTHERS_WRITE)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_secret(path: Path, content: bytes) -> None:
    """Create a file that only its owner can read, whole or not at all.

    Raises:
        FileExistsError: The file exists; if two processes create it, the first one wins.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        sync(temporary)
        os.link(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink()


def make_key(path: Path, num_bytes: int) -> None:
    """Write random bytes, in hex, into a file that only its owner reads, unless it exists."""
    make_folder(path.parent)
    with suppress(FileExistsError):
        write_secret(path, secrets.token_hex(num_bytes).encode())


def read_key(path: Path, num_bytes: int) -> bytes:
    """Return the key that :func:`make_key` has written.

    Raises:
        ConfigError: Others can read the file, or it holds no key.
    """
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"the key {path} has mode {mode:o}: others may know it; `chmod 600` it if nobody does, "
            "else make a new one."
        )
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != num_bytes:
        raise ConfigError(f"{path} is no key: expected {2 * num_bytes} hexadecimal digits.")
    return key


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, on disk; only the owner can enter new ones."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield as ``os.walk`` does, following links except those to a folder around them."""
    for folder, folders, names in os.walk(root, followlinks=True):
        place = os.path.realpath(folder)
        links = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
        folders[:] = [n for n in folders if os.path.commonpath([place, links[n]]) != links[n]]
        yield folder, folders, names


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Within the block, create files and folders of this process without the modes in ``mask``."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
