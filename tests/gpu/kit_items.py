"""Items that prove the kit's runner: one of each way to end, and one that no budget would end."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.device import Device
from benchmarks.gpu.item import Item
from benchmarks.gpu.notes import Notes, NotRun

PIDS = "ELASWAVE_TEST_PIDS"
# It leads a session of its own and does not end by SIGTERM: what a job may leave behind.
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def items() -> list[Item]:
    home = "tests.gpu.kit_items"
    return [
        Item(name="good", title="Good", budget_s=60, place=f"{home}:good"),
        Item(name="device", title="Of a device", budget_s=60, gpus=1, place=f"{home}:of_device"),
        Item(name="many", title="Of many", budget_s=60, gpus=99, place=f"{home}:good"),
        Item(name="slow", title="Slow", budget_s=4, place=f"{home}:slow"),
        Item(name="bad", title="Bad", budget_s=60, place=f"{home}:bad"),
        Item(name="raises", title="Raises", budget_s=60, place=f"{home}:raises"),
        Item(name="idle", title="Checks nothing", budget_s=60, place=f"{home}:idle"),
        Item(name="absent", title="Has nothing", budget_s=60, place=f"{home}:absent"),
        Item(name="leaves", title="Leaves", budget_s=60, place=f"{home}:leaves", arguments=(7,)),
    ]


def good(device: Device, notes: Notes) -> None:
    notes.figure("answer", 42)
    notes.check("one is one", True)


def of_device(device: Device, notes: Notes) -> None:
    notes.check(f"it computes on {device} of {device.count}", True)


def _start_stubborn() -> None:
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    with Path(os.environ[PIDS]).open("a") as file:
        file.write(f"{child.pid}\n")


def slow(device: Device, notes: Notes) -> None:
    _start_stubborn()
    notes.check("what it found before", True)
    time.sleep(600)


def bad(device: Device, notes: Notes) -> None:
    notes.check("two is three", False)
    notes.check("two is two", True)


def raises(device: Device, notes: Notes) -> None:
    notes.check("before", True)
    raise RuntimeError("the device is on fire")


def idle(device: Device, notes: Notes) -> None:
    notes.say("nothing")


def absent(device: Device, notes: Notes) -> None:
    raise NotRun("its library is not installed")


def leaves(device: Device, notes: Notes, number: int) -> None:
    _start_stubborn()
    notes.check(f"number {number}", number == 7)
