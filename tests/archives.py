"""Zip archives that are made in memory."""

import io
import zipfile


def zipped(files, compression=zipfile.ZIP_STORED):
    """Return a zip archive of names with their contents, in order; a name may come twice."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return packed.getvalue()
