"""TensorBoard as a sink: each owner of the run adds its own event file to one folder."""

from collections.abc import Mapping
from pathlib import Path

FLUSH_INTERVAL_S = 2


class TensorBoardSink:
    """Scalars in TensorBoard's event files; needs the tensorboard package."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_INTERVAL_S)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one point a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
