"""The node that saves is cut off silently, in a save of 15 s: the majority's checkpoint stays."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elaswave_plugin.checkpoints.torch_dist import flaw_of
from tests.checkpoints.stale import published
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.network import Network, network_of
from tests.faults.networked import LIMIT_S, Seen, end, launched
from tests.proofs import Kind, Promise, proves

SAVE_S = 15.0
TRACKER = "latest_checkpointed_iteration.txt"
# Its agent waits for the others for longer than its save takes, and lets it go on.
SPEC = JobSpec(nproc=3, nodes=3, global_batch=12, steps=6, dump="last")
LAUNCHER = ("--quorum-wait-s=20",)
# The save of iteration 2 takes so long on the worker of node 0: while it writes, or when all have
# written and it has checked what they wrote, right before it publishes that.
SLOW = """
import os, time
from elaswave_plugin.tracking.events import EventLog
{imports}
act, done = {module}.{act}, []
def slowly(*args):
    if os.environ["ELASWAVE_SLOT"] != "0" or done:
        return act(*args)
    done.append(True)
    result = act(*args)
    with EventLog("{directory}/events.jsonl") as events:
        events.emit("saves", slot=0)
        time.sleep({seconds})
        events.emit("saved", slot=0)
    return result
{module}.{act} = slowly
"""
WRITING = {
    "imports": "from megatron.core.dist_checkpointing import serialization",
    "module": "serialization",
    "act": "save_config",
}
CHECKED = {
    "imports": "from elaswave_plugin.adapters.megatron.compat import whole_saves",
    "module": "whole_saves",
    "act": "flaw_of",
}


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(SPEC.nodes) as made:
        yield made


@proves(Kind.LINK, Promise.WHOLE, victim="0")
@pytest.mark.parametrize("moment", [pytest.param("writing", marks=pytest.mark.slow), "checked"])
@pytest.mark.timeout(400)
def test_the_node_that_saves_is_cut_off(
    network: Network, data: Path, tmp_path: Path, reference: Reference, moment: str
) -> None:
    directory, saves = tmp_path / "run", tmp_path / "saves"
    directory.mkdir()
    slow = WRITING if moment == "writing" else CHECKED
    sabotage = SLOW.format(**slow, directory=directory, seconds=SAVE_S)
    arguments = [*SPEC.arguments(data, directory), f"--save={saves}", "--save-interval=2"]
    seen = Seen(directory)
    with ExitStack() as stack:
        launchers = []
        for node in range(SPEC.nodes):
            launchers.append(
                launched(network, node, SPEC, arguments, directory, *LAUNCHER, sabotage=sabotage)
            )
            stack.callback(end, launchers[-1])
        seen.wait_for("saves")
        network.cut_off(0)
        cut_s = time.time()
        view = seen.wait_for("view_committed", epoch=2)
        assert 0 not in view["ranks"]
        codes = [launcher.wait(LIMIT_S) for launcher in launchers[1:]]
        output = (directory / "output").read_text()
        assert codes == [0, 0], output[-3000:]
        before = published(saves)
        # It was still in its save, which it ends now.
        assert seen.wait_for("saved")["time_s"] > cut_s + SAVE_S - 5
        assert launchers[0].wait(LIMIT_S) != 0
    output = (directory / "output").read_text()
    assert "no majority" in output, output[-3000:]
    assert published(saves) == before
    for step in (2, 4, 6):
        folder = saves / f"iter_{step:07d}"
        assert flaw_of(folder) is None
        # The majority's: all of it was written after the cut.
        assert all(file.stat().st_mtime > cut_s for file in folder.iterdir())
    assert (saves / TRACKER).read_text() == "6"
    run = Outcome(spec=SPEC, directory=directory, returncode=0, output=output, seconds=0)
    check_equal(run, reference(SPEC))
