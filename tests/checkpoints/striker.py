"""Kills workers from outside while they write checkpoints, at moments that the files show."""

import contextlib
import os
import random
import re
import signal
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from elaswave_plugin.tracking.events import EVENTS_FILE, Tail

LIMIT_S, POLL_S = 90.0, 0.005


# As Megatron-LM saves by default: every replica writes a part.
FULLY_PARALLEL = """
import functools
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
save = dist_checkpointing.save
@functools.wraps(save)
def fully_parallel(state, folder):
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    return save(state, folder, strategy)
dist_checkpointing.save = fully_parallel
"""
# A writer that has a part of its file, and one that has all and not the name yet, stay there in the
# saves that are struck, until the kill, or so long.
HOLD = """
import functools, os, re, time
def hold(path, point):
    for number in map(int, re.findall(r"{number}", str(path))):
        mark = os.path.join({directory!r}, "struck-%d" % number)
        deadline_s = time.monotonic() + {limit_s}
        while point in {points}.get(number, "") and not os.path.exists(mark):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.002)  # the file is all that the striker and the writers share
"""
HOLD_MEGATRON = """
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
write_item = filesystem_async._write_item
@functools.wraps(write_item)
def write_and_hold(*args, **kwargs):
    result = write_item(*args, **kwargs)
    stream = next(one for one in args if hasattr(one, "flush"))
    if stream.name not in held:
        held.add(stream.name)
        stream.flush()
        hold(stream.name, "part")
    return result
held, save_config = set(), serialization.save_config
def save_config_and_hold(config, folder):
    save_config(config, folder)
    hold(folder, "all")
serialization.save_config = save_config_and_hold
filesystem_async._write_item = write_and_hold
"""
# The same for whatever torch.save writes for DeepSpeed, and for the name that it gets then.
HOLD_DEEPSPEED = """
import io, pathlib, torch
rename = pathlib.Path.rename
def hold_and_rename(self, target):
    if self.is_dir():
        hold(self, "all")
    return rename(self, target)
pathlib.Path.rename = hold_and_rename
save = torch.save
def save_and_hold(obj, path, *args, **kwargs):
    if not str(path).endswith("_states.pt"):
        return save(obj, path, *args, **kwargs)
    written = io.BytesIO()
    save(obj, written, *args, **kwargs)
    data = written.getvalue()
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        hold(path, "part")
        file.write(data[len(data) // 2 :])
torch.save = save_and_hold
"""
# Where writers stay, for each moment of a strike.
POINTS = {"open": "part", "exists": "part", "named": "all"}


@dataclass(frozen=True, slots=True)
class Kind:
    """The names that a framework gives to saves: folders, the tracker, files of data."""

    folder: str
    # The number of a save in a path, as a pattern.
    number: str
    tracker: str
    data: str
    # Statements that have a writer stay at HOLD's two points.
    holds: str
    # Whether all data of so many workers is in a folder.
    is_written: Callable[[Path, int], bool]

    def held(self, points: Mapping[int, str], directory: Path, limit_s: float = LIMIT_S) -> str:
        """Return the statements by which a worker's writers stay at these points of saves.

        ``points``: by the number of the save, the words "part" and "all".
        """
        values = {"points": dict(points), "directory": str(directory), "limit_s": limit_s}
        return HOLD.format(number=self.number, **values) + self.holds


def _has_every_shard(folder: Path, writers: int) -> bool:
    """Return whether every shard is whole: torch.save writes zip archives, whose end comes last."""
    files = [*folder.glob("*.pt")]
    shards = [file for file in files if file.name.endswith("optim_states.pt")]
    return len(shards) == writers and all(map(zipfile.is_zipfile, files))


MEGATRON = Kind(
    folder="iter_{:07d}",
    number=r"iter_(\d{7})",
    tracker="latest_checkpointed_iteration.txt",
    data=".distcp",
    holds=HOLD_MEGATRON,
    is_written=lambda folder, writers: (folder / "metadata.json").exists(),
)
DEEPSPEED = Kind(
    folder="global_step{}",
    number=r"global_step(\d+)",
    tracker="latest",
    data=".pt",
    holds=HOLD_DEEPSPEED,
    is_written=_has_every_shard,
)
TRACKER = MEGATRON.tracker


@dataclass(slots=True)
class Strike:
    """One kill: in the save of this step's number, at this moment; what was seen then."""

    step: int
    phase: str
    slot: int
    pid: int = 0
    bytes_written: int = 0
    fired: bool = field(default=False)

    def __str__(self) -> str:
        return f"{self.slot}@{self.step}:{self.phase}"

    @property
    def has_struck(self) -> bool:
        """True if there was something to tear."""
        return self.fired and self.bytes_written > 0


def plan(
    seed: int, iterations: Sequence[int], moments: Sequence[str], slots: int
) -> tuple[Strike, ...]:
    """A kill in each of these saves; never of the same worker twice in a row."""
    dice = random.Random(seed)
    strikes: list[Strike] = []
    for number, iteration in enumerate(iterations):
        last = strikes[-1].slot if strikes else -1
        slot = dice.choice([slot for slot in range(slots) if slot != last])
        strikes.append(Strike(iteration, moments[number % len(moments)], slot))
    return tuple(strikes)


class Striker:
    """Watches one job's run directory and the folder that it saves to."""

    def __init__(self, directory: Path, saves: Path, kind: Kind = MEGATRON) -> None:
        self._directory, self._saves, self._kind = directory, saves, kind
        self._events = Tail(directory / EVENTS_FILE)
        self._pids: dict[int, int] = {}
        self._writers = 0

    def strike_all(self, strikes: Sequence[Strike], running: Callable[[], bool]) -> None:
        """Carry them out in order; ends with the job."""
        for strike in strikes:
            deadline_s = time.monotonic() + LIMIT_S
            while running() and not strike.fired:
                assert time.monotonic() < deadline_s, f"no moment for {strike}"
                self._learn()
                if not self._is_time(strike):
                    time.sleep(POLL_S)  # the files are all that a job shows, and it needs the cores
                else:
                    strike.pid = self._pids[strike.slot]
                    strike.bytes_written = self._written(strike.step)
                    os.kill(strike.pid, signal.SIGKILL)
                    strike.fired = True
                    (self._directory / f"struck-{strike.step}").touch()

    def await_save(self, iteration: int, running: Callable[[], bool]) -> None:
        """Wait for the first bytes of a save."""
        deadline_s = time.monotonic() + LIMIT_S
        while not self._written(iteration):
            assert running() and time.monotonic() < deadline_s, f"no save of {iteration}"
            time.sleep(POLL_S)

    def _learn(self) -> None:
        for event in self._events.new():
            if event["kind"] == "worker_started":
                self._pids[event["slot"]] = event["pid"]
            if event["kind"] == "view_committed":
                self._writers = len(event["ranks"])

    def _is_time(self, strike: Strike) -> bool:
        if strike.slot not in self._pids or self._named() >= strike.step:
            return False
        if strike.phase == "open":
            return self._written(strike.step) > 0 and self._is_open(strike)
        if strike.phase == "named":
            # Between the data and the tracker.
            parts = self._parts(strike.step)
            return any(self._kind.is_written(part, self._writers) for part in parts)
        assert strike.phase == "exists"
        return self._written(strike.step) > 0

    def _named(self) -> int:
        with contextlib.suppress(OSError, IndexError):
            text = (self._saves / self._kind.tracker).read_text()
            return int(re.findall(r"\d+", text)[-1])
        return -1

    def _parts(self, iteration: int) -> list[Path]:
        """The folder of a save, under whatever name it is being written."""
        return list(self._saves.glob(f"{self._kind.folder.format(iteration)}*"))

    def _written(self, iteration: int) -> int:
        return sum(size for folder in self._parts(iteration) for size in _sizes(folder))

    def _is_open(self, strike: Strike) -> bool:
        """Return whether the victim, or a process of its own, has a file of the save open."""
        with contextlib.suppress(psutil.Error):
            victim = psutil.Process(self._pids[strike.slot])
            for process in (victim, *victim.children(recursive=True)):
                with contextlib.suppress(OSError, psutil.Error):
                    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                        with contextlib.suppress(OSError):
                            if descriptor.readlink().name.endswith(self._kind.data):
                                return True
        return False


def _sizes(folder: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                yield path.stat().st_size
