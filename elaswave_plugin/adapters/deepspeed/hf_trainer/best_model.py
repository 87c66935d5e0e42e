"""The load of the best checkpoint's weights behind the last step, by any number of workers.

It is a step of the job without batches: the weights are sealed behind it like those of any step, so
an evaluation or a save that follows survives a loss. DeepSpeed's own load wants as many workers as
have written the checkpoint, and there may be fewer by then.
"""

from pathlib import Path

from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob


class BestModel:
    """The step that loads."""

    def __init__(self, job: TrainerJob, folder: Path) -> None:
        """``folder``: a checkpoint of the Trainer, with one of DeepSpeed in it."""
        self._job = job
        self._folder = folder

    def read(self) -> None:
        """Read no batch."""

    def train(self) -> None:
        """Load the weights."""
        self._job.load_weights(self._folder)
