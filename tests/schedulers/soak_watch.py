"""Memory, descriptors and files of a long job, sampled while it runs, and whether they grow."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

EVERY_S = 10.0
# What lived for less is not judged: a process grows for some minutes after its start.
JUDGED_MINUTES = 10.0
MAY_GROW, MORE_DESCRIPTORS = 0.05, 3
Sample = dict[str, Any]


class Watch:
    """Samples of the processes of a job, of its folder for the rendezvous, and of /dev/shm."""

    def __init__(self, rendezvous: Path) -> None:
        self._rendezvous = rendezvous
        self._before = set(os.listdir("/dev/shm"))
        self._next_s = 0.0
        self.samples: list[Sample] = []
        self.files: list[Sample] = []

    def look(self, processes: Mapping[int, str]) -> None:
        """Take samples if it is time; ``processes``: what each is, by its id."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + EVERY_S
        now_s = time.time()
        for pid, role in processes.items():
            # Some are lost, and their successors have not come yet.
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                figures = {"rss_mib": process.memory_info().rss / 2**20, "fds": process.num_fds()}
                who = {"role": role, "pid": pid, "started_s": process.create_time()}
                self.samples.append({"time_s": now_s, **who, **figures})
        found = [path for path in self._rendezvous.rglob("*") if path.is_file()]
        sizes = []
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        shared = len(set(os.listdir("/dev/shm")) - self._before)
        row = {"rendezvous_files": len(sizes), "rendezvous_bytes": sum(sizes), "shm": shared}
        self.files.append({"time_s": now_s, **row})

    def growth(self) -> list[Sample]:
        """Per role over the whole run, and per process that lived long: quarter 2 and the last."""
        roles, lives = defaultdict(list), defaultdict(list)
        for one in self.samples:
            roles[one["role"]].append(one)
            lives[one["role"], one["pid"], one["started_s"]].append(one)
        rows = [{"of": f"all {role}s", **_compared(found)} for role, found in roles.items()]
        each = [{"of": f"{who[0]} {who[1]}", **_compared(life)} for who, life in lives.items()]
        return rows + sorted((row for row in each if _is_judged(row)), key=lambda row: row["of"])

    def file_growth(self) -> Sample:
        """Medians of the files in the second and the last quarter."""
        second, last = _quarters(self.files)
        names = ("rendezvous_files", "rendezvous_bytes", "shm")
        return {name: [_median(second, name), _median(last, name)] for name in names}


def grows(row: Sample) -> bool:
    """Tell whether memory or descriptors are more in the last quarter than is taken for flat."""
    rss, fds = row["rss_mib"], row["fds"]
    return _is_judged(row) and bool(
        rss[1] > (1 + MAY_GROW) * rss[0] or fds[1] > fds[0] + MORE_DESCRIPTORS
    )


def _is_judged(row: Sample) -> bool:
    return bool(row["minutes"] >= JUDGED_MINUTES)


def _compared(samples: Sequence[Sample]) -> Sample:
    second, last = _quarters(samples)
    figures = {name: [_median(second, name), _median(last, name)] for name in ("rss_mib", "fds")}
    minutes = (samples[-1]["time_s"] - samples[0]["time_s"]) / 60
    return {"samples": len(samples), "minutes": round(minutes, 1), **figures}


def _quarters(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The second and the last quarter of the time."""
    begin_s, end_s = samples[0]["time_s"], samples[-1]["time_s"]
    quarter_s = (end_s - begin_s) / 4
    second = [s for s in samples if quarter_s <= s["time_s"] - begin_s <= 2 * quarter_s]
    return second, [s for s in samples if s["time_s"] >= end_s - quarter_s]


def _median(samples: Sequence[Sample], name: str) -> float | None:
    return round(median(s[name] for s in samples), 2) if samples else None
