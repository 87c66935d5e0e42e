"""The checkpoint that a Trainer writes at SIGTERM (``enable_jit_checkpoint``), by all workers.

Its own callback saves wherever each process has heard the signal, 3 s later. The agents hear it
too, and agree on a step after which every worker leaves: that is where this one saves.
"""

from typing import Any

from transformers import TrainerCallback

from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob


class LastCheckpoint(TrainerCallback):
    """Saves and ends the training behind the step after which all workers leave."""

    def __init__(self, job: TrainerJob, trainer: Any) -> None:
        self._job, self._trainer = job, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save before an evaluation that is due, which may take longer than there is time."""
        if self._job.last_call:
            control.should_save, control.should_training_stop = False, True
            self._trainer._save_checkpoint(self._trainer.model, trial=None)


def take_jit_checkpoint(job: TrainerJob, trainer: Any) -> None:
    """Have the job's callback in the place of the Trainer's, if it has one, and its signal."""
    if not getattr(trainer.args, "enable_jit_checkpoint", False):
        return
    # Not before a release that has it.
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    trainer.pop_callback(JITCheckpointCallback)
    trainer.add_callback(LastCheckpoint(job, trainer))
    job.saves_last()
