"""Writing a text file so that readers see the old text or the new one, never a part."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 text through a synced temporary file beside the path, and return the path."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
