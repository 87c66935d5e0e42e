"""`elaswave migrate`: layers change stage between two steps, and the run is what it would be."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.cli.status import addresses_in, ask_job, migrate_layers
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.address_file import read_addresses
from elaswave_plugin.observer.run import read_run
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, Zygote, check_equal, started
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_notice import TOLD, UNTIL_TOLD
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.proofs import Kind, Promise, proves

# Worker VICTIM dies in the backward pass of the first step of view 2. No moment has arrived then:
# they are let through once an update waits for them.
DIES = """
import os, signal, threading
from elaswave_plugin.snapshot import restore
from elaswave_plugin.recovery.phases import Phases
Behind, read_parts, enter = restore.DeferredMoments, restore.read_parts, Phases.enter
init, complete = Behind.__init__, Behind.complete
under_way, awaited = threading.Event(), threading.Event()
def read_late(plan, parts, access):
    while plan.epoch == 2 and parts is restore.MOMENTS and not awaited.wait(0.005):
        access.check()
    return read_parts(plan, parts, access)
def beginning(self, plan, *args, **more):
    if plan.epoch == 2:
        under_way.set()
    init(self, plan, *args, **more)
def completing(self):
    awaited.set()
    under_way.clear()
    return complete(self)
def dying(self, phase):
    if (self._slot, phase) == (VICTIM, "backward") and under_way.is_set():
        self._events.emit("killed_behind", slot=self._slot, step=self.step)
        os.kill(os.getpid(), signal.SIGKILL)
    enter(self, phase)
restore.read_parts, Phases.enter = read_late, dying
Behind.__init__, Behind.complete = beginning, completing
"""
# The first chunks of PARTS that worker 0 fetches for view 2 have a bit of each byte wrong, once.
DAMAGED = "damaged"
DAMAGES = f"""
import os, threading
from pathlib import Path
from elaswave_plugin.snapshot import fetch, restore
from elaswave_plugin.snapshot.snapshot_pool import CHUNK_BYTES
read_parts, fetch_now = restore.read_parts, fetch.Fetcher.fetch
reading, mark = threading.local(), Path(os.environ["ELASWAVE_DIR"]) / "{DAMAGED}"
def read(plan, parts, access):
    reading.source = plan.epoch == 2 and access.slot == 0 and tuple(parts) == PARTS
    try:
        return read_parts(plan, parts, access)
    finally:
        reading.source = False
def fetch_damaged(self, *, into, owner, step, **more):
    fetch_now(self, into=into, owner=owner, step=step, **more)
    # Less than that is the table of checksums.
    if getattr(reading, "source", False) and len(into) > 4096 and not mark.exists():
        mark.write_text(f"{{owner}} {{step}}")
        into[:] = bytes(byte ^ 1 for byte in into)
restore.read_parts = read
fetch.Fetcher.fetch = fetch_damaged
"""
SPEC = replace(PP2_DP2, steps=14, options=(*PP2_DP2.options, "--num-layers=4"))


# What is asked for, and what the sentence says.
BAD = {
    "no such stage": ("2", "99", "there is no stage 99, wanted one of 0 to 1"),
    "no range": ("1,2", "1", "--layers is '1,2', wanted a number or a range"),
    "an open range": ("1-", "1", "--layers is '1-', wanted a number or a range"),
    "a range from nowhere": ("-1", "1", "--layers is '-1', wanted a number or a range"),
    "two ranges": ("1-2-3", "1", "--layers is '1-2-3', wanted a number or a range"),
    "no number": ("one", "1", "--layers is 'one', wanted a number or a range"),
    "backwards": ("3-2", "0", "layers are 3-2, wanted some of 0-3"),
    "no such layer": ("4-6", "0", "layers are 4-6, wanted some of 0-3"),
    "a gap": ("3", "0", "with layers that are not contiguous (stage 0: 0-1, stage 1: 2-3)"),
    "nothing left": ("0-1", "1", "would leave a stage without layers"),
    "there already": ("2-3", "1", "layers 2-3 are at stage 1 already"),
}


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_range_that_is_none_is_refused_before_anyone_is_asked() -> None:
    with pytest.raises(ConfigurationError, match="--layers is '4-'"):
        migrate_layers([], layers="4-", stage=0, reason="", timeout_s=1)


@proves(Kind.MIGRATE, Promise.EQUAL, victim="3", moment="11:backward")
def test_layers_move_between_two_steps_and_come_back(
    zygote: Zygote,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = replace(SPEC, kills=("3@11:backward",))
    # Asked is the agent of one node, and the other one's has the worker that it is about.
    held = replace(spec, sabotage=UNTIL_TOLD, nodes=2)
    with started(held, zygote=zygote, data=data, directory=tmp_path) as launchers:
        wait_for_step(tmp_path, 2)
        address = read_addresses(tmp_path)[1].address
        command = ["migrate", "--connect", address]
        for name, (layers, stage, words) in BAD.items():
            assert run_command([*command, f"--layers={layers}", f"--to={stage}"]) == 2, name
            said = capsys.readouterr()
            assert said.out == "" and said.err.count("\n") == 1 and words in said.err, said
        status = ask_job(addresses_in(tmp_path), 5)
        assert (status["view"]["epoch"], status["layout"]["cuts"]) == (1, [0, 2, 4])
        assert run_command([*command, "--layers", "2", "--to", "0", "--reason", "a trial"]) == 0
        (tmp_path / TOLD).touch()
        code = max((one.wait(LIMIT_S * 3) for one in launchers), key=abs)
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=spec, directory=tmp_path, returncode=code, output=output, seconds=0)
    check_equal(run, reference(SPEC))
    moved, lost = (event["reason"] for event in run.events("view_committed")[1:])
    assert moved == "layers 2 move to stage 0: a trial" and "worker 3" in lost
    first = [event for event in run.events("recovered") if event["epoch"] == 2]
    assert len(first) == 4
    for event in first:
        assert (event["layout_before"]["cuts"], event["layout_after"]["cuts"]) == (
            [0, 2, 4],
            [0, 3, 4],
        )
    # Nothing but the layer that moves is read or gathered, and where it leaves, nothing is.
    come = {"weights": 4, "state": 4, "parts": 5}
    left = {"weights": 3, "state": 3, "parts": 3}
    assert sorted(e["in_place"]["parts"] for e in first) == [3, 3, 5, 5]
    assert all(e["in_place"] in (come, left) for e in first)
    ledger = read_run(tmp_path).ledger
    attempts = {(line["step"], line["epoch"]) for line in ledger if line["step"] != 11}
    assert len(attempts) == spec.steps - 1  # nothing was computed twice for the move


def migrated(
    spec: JobSpec, sabotage: str, *, zygote: Zygote, data: Path, directory: Path
) -> Outcome:
    """The run of a job whose layer 2 was asked for at stage 0 before its step 6."""
    held = replace(spec, sabotage=UNTIL_TOLD + sabotage)
    with started(held, zygote=zygote, data=data, directory=directory) as (launcher,):
        wait_for_step(directory, 2)
        address = read_addresses(directory)[0].address
        assert run_command(["migrate", "--connect", address, "--layers=2", "--to=0"]) == 0
        (directory / TOLD).touch()
        code = launcher.wait(LIMIT_S * 3)
    output = (directory / "output").read_text()
    return Outcome(spec=held, directory=directory, returncode=code, output=output, seconds=0)


@proves(Kind.MIGRATE_LOSS, Promise.EQUAL)
@pytest.mark.parametrize(
    "victim", [2, pytest.param(0, marks=pytest.mark.slow)], ids=["giver", "receiver"]
)
def test_a_death_while_the_moments_of_a_moved_layer_are_on_their_way_is_survived(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference, victim: int
) -> None:
    """Nothing was sealed in the layout that the layer came to: all is read from the one before."""
    dies = DIES.replace("VICTIM", str(victim))
    run = migrated(SPEC, dies, zygote=zygote, data=data, directory=tmp_path)
    (killed,) = run.events("killed_behind")
    check_equal(run, reference(SPEC))
    moved, lost = (event["reason"] for event in run.events("view_committed")[1:])
    assert "layers 2 move to stage 0" in moved and f"worker {victim}" in lost
    second = [event for event in run.events("recovered") if event["epoch"] == 3]
    assert len(second) == 3
    assert {event["restored_step"] for event in second} == {killed["step"]}


@proves(Kind.DAMAGE, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("parts", ["WEIGHTS", "MOMENTS"])
def test_what_is_damaged_on_its_way_is_served_again_from_where_the_layer_was(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference, parts: str
) -> None:
    """Its old owner has kept it: no step is lost, and the layer moves after all."""
    damages = f"from elaswave_plugin.core.layout.shards import {parts} as PARTS\n{DAMAGES}"
    run = migrated(SPEC, damages, zygote=zygote, data=data, directory=tmp_path)
    owner, step = map(int, (tmp_path / DAMAGED).read_text().split())
    assert owner in (2, 3)
    check_equal(run, reference(SPEC))
    views = run.events("view_committed")
    # Weights are read again at once, moments in another view, since work went on without them.
    assert len(views) == (3 if parts == "MOMENTS" else 2)
    last = [event for event in run.events("recovered") if event["epoch"] == len(views)]
    assert len(last) == 4
    for event in last:
        assert (event["restored_step"], event["layout_after"]["cuts"]) == (step, [0, 3, 4])
