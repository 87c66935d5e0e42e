"""Runs items one after the other, each in a process of its own that ends with its budget."""

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.child import command
from benchmarks.gpu.device import Device
from benchmarks.gpu.item import Item, Outcome, Status

_SET_CHILD_SUBREAPER = 36
END_LIMIT_S = 10.0
LOG_LINES = 12
# An item with less time than this would only show that it was ended.
LEAST_S = 5.0
ROOT = Path(__file__).resolve().parents[2]


def adopt_orphans() -> None:
    """Become the parent of whatever our children leave behind, so that we can end it.

    Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants(limit_s: float = END_LIMIT_S) -> list[str]:
    """SIGKILL all processes below this one and wait for them; returns those that stay."""
    deadline_s = time.monotonic() + limit_s
    while True:
        left = psutil.Process().children(recursive=True)
        if not left:
            return []
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        # What dies may leave orphans, which are ours now: look again.
        psutil.wait_procs(left, timeout=max(0.0, deadline_s - time.monotonic()))
        if time.monotonic() > deadline_s:
            return [str(one) for one in psutil.Process().children(recursive=True)]


class Runner:
    """Items within a whole budget, most telling first; what one finds never stops the next."""

    def __init__(
        self,
        list_of_items: str,
        *,
        device: Device | None,
        folder: Path,
        budget_s: float,
        tell: Callable[[str], None],
    ) -> None:
        """`list_of_items`: "module:function" that returns them; `device` None: no GPU is here."""
        self._list = list_of_items
        self._device = device
        self._folder = folder
        self._tell = tell
        self._deadline_s = time.monotonic() + budget_s

    def run(self, items: Sequence[Item]) -> Iterator[Outcome]:
        """Yield the outcome of each item as it ends."""
        for item in items:
            self._tell(f"{item.title} ({item.name}, at most {item.budget_s:g} s)")
            outcome = self._run(item)
            self._tell(
                f"  {outcome.status} after {outcome.seconds:.1f} s {outcome.reason}".rstrip()
            )
            yield outcome

    def _run(self, item: Item) -> Outcome:
        nothing = _outcome(item, Status.NOT_RUN)
        device = self._device
        if item.gpus and device is None:
            return replace(nothing, reason="no CUDA device on this machine")
        if device is not None and item.gpus > device.count:
            reason = f"needs {item.gpus} CUDA devices, this machine has {device.count}"
            return replace(nothing, reason=reason)
        limit_s = min(item.budget_s, self._deadline_s - time.monotonic())
        if limit_s < min(LEAST_S, item.budget_s):
            return replace(nothing, reason="the time of the whole kit is over")
        return self._run_child(item, device or Device(is_stand_in=True, count=0), limit_s)

    def _run_child(self, item: Item, device: Device, limit_s: float) -> Outcome:
        findings, log = (self._folder / f"{item.name}.{end}" for end in ("json", "log"))
        findings.unlink(missing_ok=True)
        began_s = time.monotonic()
        with _started(command(self._list, item, device, findings), log) as process:
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
        outcome = _outcome(
            item,
            Status.PASSED,
            seconds=round(time.monotonic() - began_s, 1),
            device=str(device) if item.gpus else "cpu",
        )
        return _judged(outcome, code, limit_s, findings, log)


def _outcome(item: Item, status: Status, **more: Any) -> Outcome:
    known = {"name": item.name, "title": item.title, "budget_s": item.budget_s}
    return Outcome(**{"seconds": 0.0, **known, "status": status, **more})


def _judged(
    outcome: Outcome, code: int | None, limit_s: float, findings: Path, log: Path
) -> Outcome:
    """The outcome by exit code (None: it was ended) and by what the program wrote."""
    found = json.loads(findings.read_text()) if findings.exists() else {}
    tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    outcome = replace(outcome, lines=found.get("lines", ()), figures=found.get("figures", {}))
    if code is None:
        ended = f"ended after {limit_s:.0f} s"
        return replace(outcome, status=Status.TIMED_OUT, reason=ended, log_tail=tail[-LOG_LINES:])
    if code or not found.get("concluded"):
        last = tail[-1] if tail else "it wrote nothing"
        reason = f"exit code {code}: {last}"
        return replace(outcome, status=Status.FAILED, reason=reason, log_tail=tail[-LOG_LINES:])
    if found["not_run"]:
        return replace(outcome, status=Status.NOT_RUN, device="", reason=found["not_run"])
    if found["failed"] or not found["checks"]:
        reason = "; ".join(found["failed"]) or "it checked nothing"
        return replace(outcome, status=Status.FAILED, reason=reason, log_tail=tail[-LOG_LINES:])
    return outcome


@contextmanager
def _started(words: Sequence[str], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A process whose output goes to a file; nothing below us is left when the block is over."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            yield process
        finally:
            left = end_descendants()
            if left:
                output.write(f"\nstill there {END_LIMIT_S:g} s after SIGKILL: {left}\n".encode())
            process.wait(END_LIMIT_S)
