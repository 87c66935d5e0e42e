"""TensorBoard as a sink: each owner of the run adds its own event file to one folder."""

from collections.abc import Mapping
from pathlib import Path

FLUSH_INTERVAL_S = 2


class TensorBoardSink:
    """Scalars in TensorBoard's event files; needs the tensorboard package."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_INTERVAL_S)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one point a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def last_step(self) -> int | None:
        """Tell the last step of a point in the folder's files; -1 where there is none."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        last = -1
        for file in self._folder.glob("events.out.tfevents.*"):
            points = (event for event in EventFileLoader(str(file)).Load() if event.summary.value)
            last = max([last, *(event.step for event in points)])
        return last

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
