"""The state of a Trainer's step outside of the engine: counters, metrics, schedule."""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_callback import ExportableState

from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import Kinds, LossKind
from elaswave_plugin.kept import is_plain
from elaswave_plugin.step_state.step_state import Part
from elaswave_plugin.values.detached import detached_copy

# What each worker says of itself.
_OWN = ("is_world_process_zero", "is_local_process_zero")
_HISTORY = "log_history"


class TrainerState(Part):
    """The part of a step's state that the Trainer holds; nothing until there is a Trainer."""

    name = "the Trainer's state"
    # Its loop counts the micro-batches of an update, and callbacks may set what a loss depends on.
    of_bodies = True

    def __init__(self) -> None:
        self.trainer: Any = None
        # The epoch that the Trainer is in, and the iteration of it that comes next.
        self.place = (0, 0)
        # The kinds of the Trainer's losses that are known, by the pattern of their batches.
        self.loss_kinds: dict[str, Kinds] = {}

    def keep(self) -> dict[str, Any]:
        """Copies of counters and metrics, by what holds them."""
        trainer = self.trainer
        if trainer is None:
            return {}
        schedule = trainer.lr_scheduler
        return {
            "place": self.place,
            "loss_kinds": {
                pattern: {term: tuple(one) for term, one in kinds.items()}
                for pattern, kinds in self.loss_kinds.items()
            },
            "trainer": {
                name: value
                for name, value in ((name, _plain(one)) for name, one in vars(trainer).items())
                if value is not None and is_plain(value)
            },
            "tr_loss": trainer._tr_loss.item(),
            "state": detached_copy(
                {
                    name: value
                    for name, value in vars(trainer.state).items()
                    if name not in (*_OWN, _HISTORY)
                }
            ),
            # Lines are added and never changed.
            _HISTORY: [*trainer.state.log_history],
            "control": dict(vars(trainer.control)),
            "callbacks": [detached_copy(one.state()["attributes"]) for one in self._callbacks()],
            "schedule": detached_copy(schedule.state_dict())
            if isinstance(schedule, LRScheduler)
            else None,
        }

    @torch.no_grad()
    def put_back(self, kept: dict[str, Any]) -> None:
        """Install it; any number of times."""
        if not kept:
            return
        trainer = self.trainer
        self.place = kept["place"]
        self.loss_kinds = {
            pattern: {term: LossKind(*one) for term, one in kinds.items()}
            for pattern, kinds in kept["loss_kinds"].items()
        }
        kept = detached_copy(kept)
        for name, value in kept["trainer"].items():
            setattr(trainer, name, _like(vars(trainer).get(name), value))
        trainer._tr_loss.fill_(kept["tr_loss"])
        vars(trainer.state).update(kept["state"])
        trainer.state.log_history[:] = kept[_HISTORY]
        vars(trainer.control).update(kept["control"])
        for callback, attributes in zip(self._callbacks(), kept["callbacks"], strict=True):
            vars(callback).update(attributes)
        if kept["schedule"] is not None:
            trainer.lr_scheduler.load_state_dict(kept["schedule"])

    def _callbacks(self) -> Iterator[Any]:
        """Yield the callbacks that can tell their state."""
        for one in self.trainer.callback_handler.callbacks:
            if isinstance(one, ExportableState):
                yield one


def _plain(value: Any) -> Any:
    """Return a copy in dicts, lists and tuples, which another worker can be given."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | deque):
        return [*map(_plain, value)]
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _like(own: Any, value: Any) -> Any:
    """Return a plain value in the kinds of containers that are there: TRL's make their keys."""
    if isinstance(own, tuple) and hasattr(own, "_make"):
        return own._make(value)
    if isinstance(own, deque) and isinstance(value, list):
        return deque(value, own.maxlen)
    if not (isinstance(own, dict) and isinstance(value, dict)):
        return value
    made, fresh = copy.copy(own), getattr(own, "default_factory", None) or (lambda: None)
    made.clear()
    made.update(
        (key, _like(own[key] if key in own else fresh(), one)) for key, one in value.items()
    )
    return made
