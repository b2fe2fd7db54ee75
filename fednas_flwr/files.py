"""Files that a reader finds whole or not at all, whatever happens while they are written.

Content goes to a temporary file in the same folder, which is synced and renamed; then the folder is
synced, so that the new name survives a power cut as well. Main function: :func:`write_atomically`;
:func:`replacing` is for writers that want a path.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all, and return its path.

    Args:
        path: In a folder that exists; an older file is replaced.
        content: Text is written in UTF-8.

    Raises:
        OSError: The content could not be written; an older file is as it was.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a temporary path ``.<name>.<process>.tmp``; what it leaves there becomes path.

    If the block raises, ``path`` stays as it was and the temporary file is removed. Only a process
    that is killed leaves it behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
