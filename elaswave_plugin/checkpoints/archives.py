"""Finds out whether a file that torch.save wrote is whole, without reading its data."""

import zipfile
from pathlib import Path


def archive_flaw(file: Path) -> str | None:
    """Say what is wrong with a file, naming it; None where its end is as written.

    torch.save writes a zip archive, whose directory of contents comes last: a file that was cut
    has none.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        return f"{file} ({file.stat().st_size} bytes) was not written to its end: {error}"
    return None
