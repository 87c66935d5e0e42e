"""Runs the program of one item in this process: python -m benchmarks.gpu.child NAME DEVICE FILE."""

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.device import Device
from benchmarks.gpu.item import Item
from benchmarks.gpu.notes import Notes, NotRun


def run_program(item: Item, device: Device, findings: Path) -> None:
    """Call the item's function with the device and its notes; what it raises ends the process."""
    notes = Notes(findings)
    module, _, function = item.place.partition(":")
    try:
        getattr(import_module(module), function)(device, notes, *item.arguments)
    except NotRun as reason:
        notes.conclude(not_run=str(reason))
        return
    notes.conclude()


def command(list_of_items: str, item: Item, device: Device, findings: Path) -> list[str]:
    """Return the command line that runs an item; `list_of_items` is "module:function"."""
    where = [list_of_items, item.name, str(device), str(device.count), str(findings)]
    return [sys.executable, "-m", "benchmarks.gpu.child", *where]


def main() -> None:
    """Find the item by its name and run it."""
    list_of_items, name, device, count, findings = sys.argv[1:]
    module, _, function = list_of_items.partition(":")
    (item,) = (one for one in getattr(import_module(module), function)() if one.name == name)
    here = Device(is_stand_in=device == "stand-in", count=int(count))
    run_program(item, here, Path(findings))


if __name__ == "__main__":
    main()
