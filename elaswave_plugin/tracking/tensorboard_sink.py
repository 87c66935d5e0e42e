"""TensorBoard as a sink: each owner of the run adds its own event file to one folder."""

from collections.abc import Iterator, Mapping
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
        return max((step for _, step in points_of(self._folder)), default=-1)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def points_of(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and step of each point in the event files of a folder, by any worker."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            yield from ((value.tag, event.step) for value in event.summary.value)
