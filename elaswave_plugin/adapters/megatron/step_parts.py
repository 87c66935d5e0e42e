"""The parts of the state that a step of Megatron-Core changes or relies on beside the flat state.

Trained weights, moments and the capsule are sealed in shards (`framework.py`), and draws are keyed
(`rng.py`). Here is the rest: it is kept before a step begins, and put back for its redo.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from elaswave_plugin.adapters.megatron.bound_models import BoundModels
from elaswave_plugin.adapters.megatron.state import buffers
from elaswave_plugin.adapters.megatron.state.frozen import Frozen
from elaswave_plugin.adapters.megatron.state.model_buffers import ModelBuffers
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.step_state import Part, StepState, copied, digest_of, named_settings
from elaswave_plugin.values.detached import detached_copy
from elaswave_plugin.values.plain import encode


def step_state(
    worker: Worker,
    framework: BoundModels,
    *,
    buffers: ModelBuffers,
    beside: Sequence[Part] = (),
) -> StepState:
    """All parts of one worker; ``beside`` those of a framework, what its own loop has."""
    frozen = Frozen(
        [model.chunks for model in framework.models],
        at_launch=lambda: framework.models[0].frozen_names,
    )
    parts = (Weights(worker, framework), frozen, buffers, Settings(framework))
    return StepState(worker, (*parts, *beside))


class Settings(Part):
    """Scheduler, loss scaler, and all that is set in the optimizer's groups."""

    name = "the settings of the optimizer's groups"
    of_bodies = True

    def __init__(self, framework: BoundModels) -> None:
        self._framework = framework

    def keep(self) -> tuple[bytes, list[dict[str, Any]]]:
        """The capsule as it is now, and each group without its parameters."""
        settings = [dict(group) for group in self._framework.settings]
        return self._framework.read_capsule(), detached_copy(settings)

    def put_back(self, kept: Any) -> None:
        """Install both."""
        capsule, settings = kept
        self._framework.write_capsule(capsule)
        # Who has no place yet is given those of any stage, which may have fewer groups.
        for group, one in zip(self._framework.groups, settings, strict=False):
            for name, value in detached_copy(one).items():
                # What is equal stays the object that it is, which several groups may have.
                if not _is_equal(group.get(name), value):
                    group[name] = value

    def proof(self) -> int:
        """Of the groups."""
        return xxhash.xxh3_64_intdigest(encode(self.keep()[1])) >> 1

    def told(self) -> dict[str, str]:
        """Each setting by its name and group."""
        return named_settings(self.keep()[1])


def _is_equal(here: Any, value: Any) -> bool:
    """Return whether two settings are the same plain value."""
    is_plain = type(value) in (bool, int, float, str, tuple) and type(here) is type(value)
    return is_plain and bool(here == value)


class Weights(Part):
    """Trained weights that the body of the loop has changed since they were sealed."""

    name = "the trained weights"
    of_bodies = True

    def __init__(self, worker: Worker, framework: BoundModels) -> None:
        self._worker = worker
        self._framework = framework
        self._sealed: tuple[list[int], int | None] | None = None
        # None while moments are on their way, behind the weights.
        self._moments: list[tuple[weakref.ref[torch.Tensor], int]] | None = None

    def _weights(self) -> list[torch.Tensor]:
        """Those of each of DDP's buffers: a digest of little costs more than its bytes."""
        return [one.param_data for chunk in self._framework.chunks for one in chunk.buffers]

    def _masters(self) -> int | None:
        """Of masters apart from the weights, which 16-bit models have; None while elsewhere."""
        if self._framework.are_masters_elsewhere:
            return None
        return hash(tuple(map(digest_of, self._framework.masters_apart())))

    def sealed(self) -> None:
        """Remember what was sealed, by digest."""
        self._sealed = [digest_of(one) for one in self._weights()], self._masters()
        self._moments = self._present_moments()

    def _present_moments(self) -> list[tuple[weakref.ref[torch.Tensor], int]] | None:
        """Their version counters: scripts reset moments in place, and a digest costs as they do."""
        is_whole = self._worker.state.is_whole
        moments = self._framework.moments() if is_whole else ()
        return [(weakref.ref(one), one._version) for one in moments] if is_whole else None

    def keep(self) -> dict[int, torch.Tensor]:
        """Copies of the buffers that were changed, by number; raises ConfigurationError.

        Masters lie in shards, and no other worker has those of a lost one.
        """
        if self._sealed is None or buffers.are_offloaded(self._framework.chunks):
            return {}
        digests, masters = self._sealed
        if masters not in (None, present := self._masters()) and present is not None:
            raise ConfigurationError(
                "the loop's body changes the optimizer's float32 masters between two steps, which "
                "a loss would undo: change them in train_step, behind optimizer.step()"
            )
        if self._moments is not None and self._are_changed(self._moments):
            raise ConfigurationError(
                "the loop's body changes the optimizer's moments between two steps, which a loss "
                "would undo: change them in train_step, before optimizer.step()"
            )
        return self._changed(digests)

    def _are_changed(self, moments: list[tuple[weakref.ref[torch.Tensor], int]]) -> bool:
        """Return whether moments were written since; those in other tensors now were moved."""
        pairs = zip(moments, self._present_moments() or (), strict=False)
        return any(then[0]() is now[0]() and then[1] != now[1] for then, now in pairs)

    def find(self) -> dict[int, torch.Tensor]:
        """Copies of the buffers that were changed; train_step may change masters and moments."""
        return {} if self._sealed is None else self._changed(self._sealed[0])

    def whole(self) -> dict[int, torch.Tensor]:
        """Copies of all buffers."""
        return {number: copied(one) for number, one in enumerate(self._weights())}

    def _changed(self, digests: Sequence[int]) -> dict[int, torch.Tensor]:
        changed = {
            number: copied(one)
            for number, one in enumerate(self._weights())
            if digest_of(one) != digests[number]
        }
        if changed:
            self._worker.state.leave_seal()
        return changed

    @torch.no_grad()
    def put_back(self, kept: Any) -> None:
        """Install them on top of what was sealed; raises ConfigurationError where layers moved."""
        present = self._weights()
        for number, value in kept.items():
            if number >= len(present) or present[number].numel() != value.numel():
                raise ConfigurationError(
                    "the loop's body changes weights between two steps, and a loss has moved layers"
                    " to another stage, where no worker has these changes: change weights in "
                    'train_step, behind optimizer.step(), or set move_layers = "never"'
                )
            present[number].copy_(value)

    def proof(self) -> int:
        """Of all of them."""
        return self._framework.weights_digest()
