"""Runs a drawn scenario: starts the job, does from outside what the drawn events ask for."""

import contextlib
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elaswave_plugin.cli.status import addresses_in, drain_worker
from elaswave_plugin.tracking.events import EVENTS_FILE, Tail
from tests.chaos.draws import Scenario, undisturbed
from tests.chaos.twins import ranks_by_step, twin_of
from tests.faults.harness import (
    ROOT,
    JobSpec,
    Outcome,
    Zygote,
    launch,
    left_alive,
    open_launcher,
    pids_of,
    started,
    started_under,
)
from tests.faults.warm_launcher import WarmLauncher

# Ten times what one takes on two cores.
LIMIT_S = 150.0
DRAIN_LIMIT_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
ARM = """
import sys
sys.path.insert(0, {root!r})
from tests.chaos.strikes import Striker
Striker({events}, standbys={standbys}, joiners={joiners}, per_node={per_node}).arm()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The outcome of a scenario; ``codes``: of the launchers, those of the nodes first."""

    scenario: Scenario
    outcome: Outcome
    codes: tuple[int | None, ...]
    shared_memory_left: tuple[str, ...]


class Stage:
    """The stage for scenarios: one zygote, one dataset, and each undisturbed run once."""

    def __init__(self, zygote: Zygote, *, data: Path, folder: Path) -> None:
        """``folder``: where the directories of the runs are."""
        self._zygote, self._data, self._folder = zygote, data, folder
        self._made: dict[JobSpec, Outcome] = {}

    def play(self, scenario: Scenario) -> Played:
        """Run it."""
        directory = self._folder / f"seed-{scenario.seed}"
        shutil.rmtree(directory, ignore_errors=True)
        spec = replace(scenario.spec, sabotage=_armed(scenario))
        where = {"zygote": self._zygote, "data": self._data, "directory": directory}
        before, started_s = _shared_memory(), time.monotonic()
        with started(spec, **where) as launchers:
            _attend(launchers, scenario, spec, where)
            codes = tuple(launcher.poll() for launcher in launchers)
        outcome = Outcome(
            spec=spec,
            directory=directory,
            returncode=next((code for code in codes if code), 0),
            output=(directory / "output").read_text(),
            seconds=time.monotonic() - started_s,
            orphans=left_alive(pids_of(directory), limit_s=5.0)
            + left_alive(started_under(directory), limit_s=5.0),
        )
        left = tuple(sorted(_shared_memory() - before))
        return Played(scenario=scenario, outcome=outcome, codes=codes, shared_memory_left=left)

    def twin(self, played: Played) -> Outcome | None:
        """The run with the same changes as planned; None where there is none to compare."""
        run = played.outcome
        is_ruined = any(event["how"] == "ruin" for event in run.events("fault_fired"))
        spec = None if is_ruined else twin_of(run)
        twin = None if spec is None else self.reference(spec)
        return twin if twin is not None and ranks_by_step(twin) == ranks_by_step(run) else None

    def reference(self, spec: JobSpec) -> Outcome:
        """The run of a job that nothing disturbs."""
        spec = undisturbed(spec)
        if spec not in self._made:
            directory = self._folder / f"undisturbed-{len(self._made)}"
            made = launch(spec, zygote=self._zygote, data=self._data, directory=directory)
            assert made.returncode == 0, made.output[-4000:]
            self._made[spec] = made
        return self._made[spec]


def _armed(scenario: Scenario) -> str:
    standbys = scenario.spec.nodes if scenario.standby else 0
    return ARM.format(
        root=str(ROOT),
        events=scenario.for_workers(),
        standbys=standbys,
        joiners=scenario.grows_by,
        per_node=scenario.spec.nproc // scenario.spec.nodes,
    )


def _attend(
    launchers: list[WarmLauncher], scenario: Scenario, spec: JobSpec, where: dict[str, Any]
) -> None:
    """Drain and join where events ask for it, until all launchers have ended or time is up."""
    directory: Path = where["directory"]
    log, deadline_s = Tail(directory / EVENTS_FILE), time.monotonic() + LIMIT_S
    while any(one.poll() is None for one in launchers) and time.monotonic() < deadline_s:
        for event in log.new():
            if event["kind"] != "fault_fired" or event["how"] not in ("drain", "grow", "join"):
                continue
            known = addresses_in(directory)
            if event["how"] == "drain":
                drain_worker(known, slot=event["slot"], reason="drawn", timeout_s=DRAIN_LIMIT_S)
            else:
                width = scenario.grows_by if event["how"] == "grow" else 1
                place = [
                    f"--join={_answering(list(map(str, known.addresses)))}",
                    f"--nproc-per-node={width}",
                ]
                launchers.append(open_launcher(spec, place, **where))
            (directory / f"done-{event['number']}").touch()
        time.sleep(0.02)  # the file is all that a running job shows


def _answering(addresses: Sequence[str]) -> str:
    """Return the first address where an agent still is, as a user would look for one."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2):
            return address
    raise AssertionError(f"none of {addresses} answers")


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}
