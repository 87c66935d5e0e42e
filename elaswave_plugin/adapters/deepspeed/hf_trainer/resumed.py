"""The place in a stream at which a Trainer has written a checkpoint, in any pass over it."""

import json
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from elaswave_plugin.errors import ConfigurationError


def place_of(folder: Path, *, samples: int, per_update: int) -> tuple[int, int]:
    """Return the pass that comes next, and the samples of it that were trained on.

    ``samples``: of all steps of the checkpoint; ``per_update``: of a step from now on.
    Raises ConfigurationError where a step would begin at no multiple of its samples.
    Source: transformers/trainer.py, ``_run_epoch``: the epoch of the state is the pass, and as a
    fraction of ``max_steps`` the updates in it.
    """
    state = json.loads((folder / TRAINER_STATE_NAME).read_text())
    made, most = state["global_step"], state["max_steps"]
    number, part = divmod(state["epoch"], 1)
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    if control.get("should_epoch_stop"):
        return int(number) + 1, 0
    read = round(part * most) * samples // made
    if read % per_update:
        raise ConfigurationError(
            f"{folder} was written behind {read} samples of pass {int(number)} over the training"
            f" stream, and a step has {per_update} samples now, wanted a divisor of that: resume"
            f" with steps of {samples // made} samples, or set ignore_data_skip=True in the"
            " TrainingArguments, which begins at the front of the stream"
        )
    return int(number), read
