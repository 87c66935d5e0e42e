"""TensorBoard, for real: what two owners wrote is read back as one run."""

from pathlib import Path

import pytest

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.tracking.tracker import Tracker

pytest.importorskip("tensorboard")
pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_steps_of_both_owners_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = ElasticConfig(tensorboard=tmp_path / "tb", dir=tmp_path)
    for steps in (range(3), range(2, 5)):
        tracker = Tracker(config, "one-run", True)
        for step in steps:
            tracker.step(step, {"train/loss": step / 2})
        assert tracker.close()
        assert tracker.problem is None
    reader = EventAccumulator(str(tmp_path / "tb" / "one-run"))
    reader.Reload()
    points = [(event.step, event.value) for event in reader.Scalars("train/loss")]
    assert points == [(step, step / 2) for step in range(5)]
