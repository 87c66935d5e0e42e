"""The command `elaswave` with its subcommands; bad input costs one sentence and exit code 2."""

import sys
from typing import Any

from elaswave_plugin.errors import ConfigurationError, ElasWaveError

USAGE_EXIT_CODE = 2


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit."""
    raise SystemExit(run_command(sys.argv[1:] if argv is None else argv))


def run_command(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        if argv[:1] == ["run"]:
            # Its options belong to the launcher, which is standard library only.
            from elaswave_plugin.runtime.launch import main as launch

            return int(launch(argv[1:]) or 0)
        return _run_typer(argv)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except ConfigurationError as error:
        return _failed(str(error), USAGE_EXIT_CODE)
    except ElasWaveError as error:
        return _failed(str(error), getattr(error, "exit_code", 1))


def _run_typer(argv: list[str]) -> int:
    import typer

    from elaswave_plugin.commands import make_command
    from elaswave_plugin.unwinding import signals_unwind

    try:
        with signals_unwind():
            code: Any = make_command().main(
                argv or ["--help"], prog_name="elaswave", standalone_mode=False
            )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.Exit as stop:
        return int(stop.exit_code)
    except Exception as error:
        describe = getattr(error, "format_message", None)  # errors of usage, in every version
        if describe is None:
            raise
        return _failed(" ".join(describe().split()), USAGE_EXIT_CODE)
    return code if isinstance(code, int) else 0


def _failed(message: str, exit_code: int) -> int:
    print(f"elaswave: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()
