"""The step to which those go back who are left, or have just come, where others left notes."""

import math
from collections.abc import Mapping

import pytest

from elaswave_plugin.core.layout.worker_facts import SealedShard, WorkerFacts
from elaswave_plugin.ipc.snapshot_record import NOTES
from elaswave_plugin.recovery.handshake import Notes

Left = tuple[int, int, int]


def notes_of(owner: int, step: int, epoch: int) -> SealedShard:
    return SealedShard(
        owner=owner,
        buffer=NOTES[step % 2],
        step=step,
        epoch=epoch,
        shard_group=(0, 0),
        units=(),
        ranks=(owner,),
        shard=0,
        length=1,
        payload_bytes=0,
        capsule_bytes=1,
        table_digest=1,
    )


@pytest.mark.parametrize(
    ("left", "facts", "last"),
    [
        # (owner, step, view) of notes; (step, view) of workers; a newcomer has come to step 0.
        ((), {1: (0, 2)}, math.inf),
        ((), {0: (6, 2), 1: (0, 2)}, 6),
        # The one that left them has sealed step 6, and was lost before it began that.
        (((0, 4, 2), (0, 5, 2)), {1: (0, 2)}, 5),
        # It lives, and another one comes.
        (((0, 4, 2), (0, 5, 3)), {0: (6, 2), 1: (0, 2)}, 6),
        # So does one of another stage, which goes back with the newcomer.
        (((2, 4, 3), (2, 5, 3)), {0: (6, 3), 3: (0, 2)}, 5),
        # Before the view that lets it in was committed, and behind that.
        (((2, 5, 3), (2, 6, 4)), {0: (6, 3), 3: (0, 2)}, 6),
        (((2, 6, 4),), {0: (6, 4), 3: (6, 4)}, 6),
        # Left by who was alone before others came.
        (((2, 4, 3),), {0: (9, 4), 3: (9, 4)}, 9),
        # Who went on alone was lost as well: what the first one left is behind that.
        (((0, 5, 2), (1, 8, 3), (1, 9, 3)), {0: (0, 2)}, 9),
    ],
)
def test_the_step_beyond_which_nobody_knows_the_loop(
    left: tuple[Left, ...], facts: Mapping[int, tuple[int, int]], last: float
) -> None:
    notes = Notes(None)  # type: ignore[arg-type]
    notes.find([notes_of(*one) for one in left])
    told = {n: WorkerFacts(address="", step=s, placed_epoch=e) for n, (s, e) in facts.items()}
    assert notes.last_step(told) == last
