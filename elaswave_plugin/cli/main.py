"""The command `elaswave` with its subcommands; bad input costs one sentence and exit code 2."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from elaswave_plugin.errors import ConfigurationError, ElasWaveError

USAGE_EXIT_CODE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit."""
    raise SystemExit(run_command(sys.argv[1:] if argv is None else argv))


def run_command(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    if argv[:1] == ["run"]:
        # Its options belong to the launcher, which is standard library only.
        from elaswave_plugin.launch.launch import main as launch

        return exit_code_of(lambda: int(launch(argv[1:]) or 0))
    return exit_code_of(lambda: _run_typer(argv))


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; what it raises for its user is one sentence and an exit code."""
    try:
        return command()
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except ConfigurationError as error:
        return _failed(str(error), USAGE_EXIT_CODE)
    except ElasWaveError as error:
        return _failed(str(error), getattr(error, "exit_code", 1))
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return _failed(_unwritten(error), 1)


def _unwritten(error: OSError) -> str:
    """Say what has no room; standard output is given up, so that nothing tries it again."""
    what = "standard output" if error.filename is None else repr(os.fspath(error.filename))
    if error.filename is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return f"{what} cannot be written: {error.strerror}; free some, or write it elsewhere"


def _run_typer(argv: list[str]) -> int:
    from elaswave_plugin.cli.commands import make_command
    from elaswave_plugin.launch.options import check_environment

    check_environment(os.environ)
    return run_click(make_command(), argv or ["--help"], "elaswave")


def run_click(command: Any, argv: list[str], name: str) -> int:
    """Run a command of click or typer under this name and return its exit code."""
    import typer

    try:
        with signals_unwind():
            code: Any = command.main(argv, prog_name=name, standalone_mode=False)
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


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit(128 + number), except where ignored (nohup).

    To be called in the main thread only.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


if __name__ == "__main__":
    main()
