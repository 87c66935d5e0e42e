"""Each verb of `framework.py`, and the plan, broken in one way; what the comparison says of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.errors import ConfigurationError
from tests.adapters.one_process import OneProcess

# What a broken verb may make another one raise.
RAISED = (AssertionError, RuntimeError, KeyError, ConfigurationError)
# Breaks it, and returns the words by which it has to be seen.
Sabotage = Callable[[pytest.MonkeyPatch, OneProcess], str]


def _each(
    patch: pytest.MonkeyPatch, one: OneProcess, verb: str, broken: Callable[[Any], Any]
) -> None:
    for seat in one.seats:
        patch.setattr(seat.framework, verb, broken(getattr(seat.framework, verb)), raising=True)


def reads_the_moments_in_another_order(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    def broken(native: Any) -> Any:
        def read_shard() -> list[torch.Tensor]:
            flat = torch.cat([part.reshape(-1).float() for part in native()]).view(3, -1)
            return [flat[0], flat[2], flat[1]]

        return read_shard

    _each(patch, one, "read_shard", broken)
    return "exp_avg.* of "


def reads_the_half_of_it(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    _each(patch, one, "read_shard", lambda native: lambda: [0.5 * part for part in native()])
    return "weights .* of worker|master of "


def writes_no_capsule(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    _each(patch, one, "write_capsule", lambda native: lambda capsule: None)
    return " before"


def plans_without_a_piece(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    native = RecoveryPlan.pieces
    patch.setattr(RecoveryPlan, "pieces", lambda plan, slot: native(plan, slot)[:-1])
    return "bytes read, wanted|of worker"


def plans_a_piece_twice(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    native = RecoveryPlan.pieces

    def pieces(plan: RecoveryPlan, slot: int) -> Any:
        found = native(plan, slot)
        return (*found, *found[-1:])

    patch.setattr(RecoveryPlan, "pieces", pieces)
    return "read twice"


def plans_the_neighbouring_element(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    native = RecoveryPlan.pieces

    def shifted(piece: Any) -> Any:
        if piece.stop - piece.start < 2:
            return piece
        return replace(piece, source_offset=piece.source_offset + 1, stop=piece.stop - 1)

    patch.setattr(
        RecoveryPlan,
        "pieces",
        lambda plan, slot: tuple(
            (source, tuple(map(shifted, pieces))) for source, pieces in native(plan, slot)
        ),
    )
    return "weights .* of worker|bytes read, wanted"


def rebinds_nothing(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    _each(patch, one, "rebind", lambda native: lambda plan: None)
    return "size|bytes in|elements|split"


def writes_no_weights(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    _each(patch, one, "write_weights", lambda native: lambda masters: None)
    return "weights .* of worker|digests|exp_avg"


def writes_the_weights_of_another(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    _each(patch, one, "write_weights", lambda native: lambda masters: native(masters.roll(1)))
    return "weights .* of worker|digests"


def writes_no_moments(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    _each(patch, one, "write_moments", lambda native: lambda moments: None)
    return "exp_avg of "


def writes_one_moment_off_by_its_last_bits(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    def broken(native: Any) -> Any:
        def write_moments(moments: torch.Tensor) -> None:
            # The last one of a shard may be padding.
            moments[1, :1].mul_(1.0000002)
            native(moments)

        return write_moments

    _each(patch, one, "write_moments", broken)
    return "exp_avg_sq of "


def gathers_no_weights(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    _each(patch, one, "sync_weights", lambda native: lambda: 1)
    return "weights .* of worker"


def one_worker_has_another_digest(patch: pytest.MonkeyPatch, one: OneProcess) -> str:
    framework = one.seats[2].framework
    native = framework.sync_weights
    patch.setattr(framework, "sync_weights", lambda: native() ^ 1)
    return "has digests"


WRITES: tuple[Sabotage, ...] = (
    writes_no_capsule,
    writes_no_weights,
    writes_the_weights_of_another,
    writes_no_moments,
    writes_one_moment_off_by_its_last_bits,
    one_worker_has_another_digest,
)
ALL: tuple[Sabotage, ...] = (
    *WRITES,
    reads_the_moments_in_another_order,
    reads_the_half_of_it,
    plans_without_a_piece,
    plans_a_piece_twice,
    plans_the_neighbouring_element,
    rebinds_nothing,
    gathers_no_weights,
)
