"""The kit's command: python -m benchmarks.gpu [--stand-ins] [--only NAME] [--out FOLDER]."""

import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.circumstances import circumstances
from benchmarks.command import run, tell
from benchmarks.gpu.device import Device
from benchmarks.gpu.item import Item, Status
from benchmarks.gpu.page import page
from benchmarks.gpu.runner import Runner, adopt_orphans
from elaswave_plugin.errors import ConfigurationError

LIST_OF_ITEMS = "benchmarks.gpu.items:items"
BUDGET_MINUTES = 25.0
STAND_IN_DEVICES = 2


def main(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for result.json, page.md and the logs.")
    ] = Path("out/gpu"),
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this item (several times).")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Budget of all items.")] = BUDGET_MINUTES,
    stand_ins: Annotated[
        bool, typer.Option("--stand-ins", help="The CPU stands in for two GPUs, at small sizes.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the items and run none.")] = False,
    items: Annotated[str, typer.Option(hidden=True)] = LIST_OF_ITEMS,
) -> int:
    """Run the items within their budgets, write one JSON and one page; 1 if one of them failed."""
    chosen = _chosen(items, only or [])
    if show:
        for one in chosen:
            typer.echo(f"{one.name:14} {one.budget_s:5g} s, {one.gpus} GPUs  {one.title}")
        return 0
    if minutes <= 0:
        raise ConfigurationError(f"--minutes is {minutes:g}, wanted more than 0")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out is {str(out)!r}, which cannot be written: {error.strerror}; name another folder"
        ) from None
    about = circumstances("benchmarks.gpu")
    adopt_orphans()
    runner = Runner(
        items, device=_device(stand_ins), folder=out, budget_s=60.0 * minutes, tell=tell
    )
    outcomes = []
    for outcome in runner.run(chosen):
        # After each item: what stops the kit itself loses no more than the item that runs.
        outcomes.append(outcome)
        found = {**about, "items": [dataclasses.asdict(one) for one in outcomes]}
        (out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
        (out / "page.md").write_text(page(about, outcomes))
    typer.echo(page(about, outcomes))
    tell(f"written to {out}: result.json, page.md and a log of each item")
    bad = (Status.FAILED, Status.TIMED_OUT)
    return 1 if any(one.status in bad for one in outcomes) else 0


def _chosen(items: str, only: list[str]) -> list[Item]:
    """The items of the list that are asked for; raises ConfigurationError for another name."""
    module, _, function = items.partition(":")
    there: list[Item] = getattr(import_module(module), function)()
    names = [one.name for one in there]
    for name in only:
        if name not in names:
            raise ConfigurationError(f"--only is {name!r}, wanted one of {', '.join(names)}")
    return [one for one in there if not only or one.name in only]


def _device(stand_ins: bool) -> Device | None:
    """The GPUs of this machine, which stay untouched; None where there are none."""
    if stand_ins:
        return Device(is_stand_in=True, count=STAND_IN_DEVICES)
    import torch

    count = torch.cuda.device_count()
    return Device(is_stand_in=False, count=count) if count else None


if __name__ == "__main__":
    raise SystemExit(run(main, "gpu", sys.argv[1:]))
