"""Makes a function the command of its module: bad input costs one sentence and exit code 2."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from elaswave_plugin.cli.main import exit_code_of, run_click

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="File for the summary, as JSON.")
]
Picture = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Picture.")]


def run(function: Callable[..., int], module: str, argv: Sequence[str]) -> int:
    """Run ``function`` with the options in ``argv``; its exit code."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    name = f"python -m benchmarks.{module}"
    return exit_code_of(lambda: run_click(typer.main.get_command(app), [*argv], name))


def tell(text: str) -> None:
    """Say what is going on, beside the results."""
    typer.echo(text, err=True)


def write(result: dict[str, Any], json_file: Path | None) -> None:
    """Write a result where a file is asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
