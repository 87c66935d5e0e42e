"""The check of a file that a command is to write, made before anything takes time."""

import os
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError


def check_output(option: str, file: Path | None) -> None:
    """Raise ConfigurationError for a file that could not be written; None is none."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"{option} is {str(file)!r}, whose folder does not exist: create it"
        )
    if file.is_dir():
        raise ConfigurationError(f"{option} is {str(file)!r}, which is a folder, wanted a file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigurationError(
            f"{option} is {str(file)!r}, which cannot be written: name another file"
        )


def check_picture(option: str, file: Path | None) -> None:
    """Check the file of a picture, also that its ending names a format."""
    if file is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    check_output(option, file)
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix.lower().removeprefix(".") not in kinds:
        raise ConfigurationError(
            f"{option} is {str(file)!r}, wanted a name that ends in one of: {', '.join(kinds)}"
        )
