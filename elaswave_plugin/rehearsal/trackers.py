"""Switches W&B and TensorBoard off for a script that has them of its own."""

import os
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OFF = (("wandb", "off"), ("tensorboard", None))
"""The job's own settings in a rehearsal."""

_WANDB = (("WANDB_MODE", "disabled"), ("WANDB_SILENT", "true"))
_WRITER = "tensorboard.summary.writer.event_file_writer"


def switch_off_trackers(folder: Path) -> None:
    """W&B logs nowhere; what writes event files of TensorBoard does so below ``folder``."""
    os.environ.update(_WANDB)
    if find_spec("tensorboard") is None:
        return
    writer: Any = import_module(_WRITER).EventFileWriter
    native = writer.__init__

    @wraps(native)
    def init(self: Any, logdir: Any, *args: Any, **kwargs: Any) -> None:
        elsewhere = folder / "tensorboard" / str(os.path.abspath(logdir)).lstrip("/")
        native(self, str(elsewhere), *args, **kwargs)

    writer.__init__ = init
