"""A lost worker comes back to a loop that counts its batches itself: it is told, and others end."""

import json
from pathlib import Path

import pytest

from elaswave_plugin.observer.observer import audit_samples
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.idle import Clock
from tests.proofs import Kind, Promise, proves

# It came back before step 6, and so wants batches when the others have all of theirs.
SPEC = {
    "script": str(SCRIPTS / "own_count.py"),
    "nproc": 3,
    "global_batch": 3,
    "accumulation": 1,
    "steps": 9,
    "respawn": 5,
    "kills": ("1@2:backward",),
    "changes": ("+1@6",),
}
TOLD = "one that counts its steps itself has not seen those before it; count those that the job has"


@proves(Kind.RETURN, Promise.NAMED)
@pytest.mark.parametrize(
    ("stage", "saves"),
    [(1, False), (1, True), (3, False)],
    # A barrier of another group than that of the gradients; a save; a barrier of the same group.
    ids=["at its end", "in a save", "at its end, in the same group"],
)
def test_the_newcomer_of_a_loop_that_counts_is_told_and_the_others_end(
    run: Launch, tmp_path: Path, stage: int, saves: bool
) -> None:
    # The interrupted batch was one of those that the script counted.
    options = ("--count=10", *((f"--save={tmp_path / 'saved'}",) if saves else ()))
    clock = Clock()
    killed = run(EngineSpec(stage=stage, options=options, **SPEC))  # type: ignore[arg-type]
    assert killed.returncode == 0, killed.output[-3000:]
    assert not killed.orphans
    assert audit_samples(killed.files, batches=killed.spec.batches) == (0, 0)
    assert len(killed.trace()) == killed.spec.steps
    assert killed.output.count(TOLD) == 1, killed.output[-3000:]
    assert [one["ranks"] for one in killed.events("view_committed")] == [
        [0, 1, 2],
        [0, 2],
        [0, 1, 2],
        [0, 2],
    ]
    found = [json.loads(path.read_text()) for path in killed.directory.glob("own-count-*")]
    assert found == [[10, 9], [10, 9]]
    # Found by what they wait for, and not when nobody may wait any longer.
    clock.check(killed.seconds, 60)
    if saves:
        assert (tmp_path / "saved" / "latest").read_text() == "end"
        assert len([*(tmp_path / "saved" / "end").glob("*optim_states.pt")]) == 2
