"""Runs a trainer's script as the interpreter would, and tells the agent what ended it.

    python -u -m elaswave_plugin.trainer.script_run [-m] SCRIPT ARGUMENTS

An exception that leaves the script is not printed here: the job says it once for all its workers.
Of bad input it says one sentence.
Standard library only.
"""

import contextlib
import io
import os
import re
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

from elaswave_plugin.core.agreement.messages import Raised
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import AGENT
from elaswave_plugin.ipc.stack_line import offer_stack
from elaswave_plugin.rehearsed import REHEARSAL
from elaswave_plugin.trainer.control_link import AgentContact
from elaswave_plugin.trainer.fatal import end_in_a_sentence, explained

MOST_LINES = 4
"""And one that says that there are more."""
_LONGEST = 240


class _Few:
    """The stand-in for `warnings.showwarning`."""

    def __init__(self, *, shows: bool) -> None:
        self._left = MOST_LINES if shows else -1
        self._show = warnings.showwarning
        self._seen: set[tuple[str, int, str]] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not _is_of_a_library(filename):
            return self._show(message, category, filename, lineno, file, line)
        text = str(message).strip().split("\n")[0]
        if self._left < 0 or (filename, lineno, text) in self._seen:
            return None
        self._seen.add((filename, lineno, text))
        said = f"{filename}:{lineno}: {category.__name__}: {text[:_LONGEST]}"
        if not self._left:
            said = "elaswave: more warnings of libraries are not shown; PYTHONWARNINGS=default does"
        self._left -= 1
        out = sys.stderr if file is None else file
        if out is not None:
            out.write(f"{said}\n")
        return None


def show_few_warnings(environ: Mapping[str, str]) -> None:
    """Keep the warnings of libraries to a few lines a node, in a trainer that begins, or a zygote.

    Each worker would repeat them, in two lines each. The first worker of a node shows the first
    ones, each once and in one line; those of the script's own files come from every worker as ever.
    A zygote, and a worker that was started again, show none of libraries. PYTHONWARNINGS and -W
    have their usual effect.
    """
    if not sys.warnoptions and "PYTHONWARNINGS" not in environ:
        first = environ.get("LOCAL_RANK", "0") == "0" and environ.get("ELASWAVE_INCARNATION") == "0"
        shown: Any = _Few(shows=first)
        warnings.showwarning = shown


def _is_of_a_library(filename: str) -> bool:
    """Return whether it lies in a folder of installed packages, or of Python itself."""
    parts = Path(filename).parts
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or filename.startswith(os.path.dirname(os.__file__))
    )


EXIT_RAISED = 1
# Both ends of a longer traceback say most; whatever it has, it is one message of the kernel's.
_LONGEST_TRACEBACK = 8000
_LONGEST_MESSAGE = 400
# More than the calls of a training step go deep, and a quarter of a MiB.
_WORDS_OF_FRAMES = 1 << 14
_OWN_FILES = (__file__, "<frozen runpy>")


class Reporter:
    """Tells this process's agent of the exception that ends its script."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # None where nobody has started this process for a job.
        self._agent = AgentContact.from_environment(environ) if AGENT in environ else None

    def tell(self, error: BaseException, *, ours: Sequence[str] = ()) -> None:
        """Tell the agent, or print it where none listens; without frames of `ours`."""
        trace = _without(error.__traceback__, (*_OWN_FILES, *ours))
        text = _shown(error, trace)
        if not self._send(error, trace, text):
            sys.stderr.write(text)

    def _send(self, error: BaseException, trace: TracebackType | None, text: str) -> bool:
        """Tell the agent, and return whether it was told; a child of the trainer tells nothing."""
        raised = Raised(
            error=type(error).__name__,
            message=_message(error),
            where=_place(error, trace),
            traceback=_cut(text),
        )
        return self._agent is not None and self._agent.say(raised)


def run(script: str, args: Sequence[str], *, module: bool, first_path: str | None = None) -> None:
    """Run a script, or a module by name, as `__main__`; whatever it raises passes through.

    ``first_path``: takes the place of the first entry of sys.path.
    """
    if first_path is not None:
        sys.path[0] = first_path
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [script, *args]
    imported = sys.modules.get("elaswave_plugin.megatron_core")
    if imported is not None:  # by the zygote, before this was a worker
        imported.be_not_first()
    if module:
        runpy._run_module_as_main(script)  # type: ignore[attr-defined]
    elif os.path.isfile(script) and not _is_archive(script):
        _run_file(script, main)
    else:
        runpy.run_path(script, run_name="__main__")


def _in_one_piece(work: Callable[[], None]) -> None:
    """Have the frames of all that is called in one piece of memory.

    CPython maps 16 KiB for frames, and gives them back once a call returns over their end. A script
    whose calls stand at such an end maps memory in each of them.
    Source: push_chunk() in CPython's Python/pystate.c, 3.11 to 3.13.
    """

    def roomy() -> None:
        work()

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_WORDS_OF_FRAMES)
    roomy()


def guarded(reporter: Reporter, work: Callable[[], None], *, ours: Sequence[str] = ()) -> None:
    """Run the script; an exception is told and becomes exit code 1, as the interpreter's own."""
    offer_stack(os.environ)
    show_few_warnings(os.environ)
    try:
        if REHEARSAL in os.environ:
            import_module("elaswave_plugin.rehearsal.files").begin(os.environ[REHEARSAL])
        _in_one_piece(work)
    except (SystemExit, KeyboardInterrupt):
        raise
    except ConfigurationError as error:
        end_in_a_sentence(error)
    except BaseException as error:
        refusal = explained(error)
        if refusal is not None:
            end_in_a_sentence(refusal)
        reporter.tell(error, ours=ours)
        raise SystemExit(EXIT_RAISED) from None


def main(argv: Sequence[str]) -> None:
    """Be the script, in this interpreter."""
    module, (script, *args) = argv[0] == "-m", argv[1:] if argv[0] == "-m" else argv
    first = None
    if not sys.flags.safe_path and not module:
        first = os.path.dirname(os.path.realpath(script))
    reporter = Reporter(os.environ)
    guarded(reporter, lambda: run(script, args, module=module, first_path=first))


def _run_file(path: str, main: ModuleType) -> None:
    path = os.path.abspath(path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    main.__file__ = path
    main.__dict__["__cached__"] = None
    exec(code, main.__dict__)


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _shown(error: BaseException, trace: TracebackType | None) -> str:
    """Return what the hook for uncaught exceptions writes, the script's own or torch's."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    # Torch says on each line whose it is, and the job says that once.
    return re.sub(r"^\[rank\d+\]: ?", "", text.getvalue(), flags=re.MULTILINE)


def _without(trace: TracebackType | None, files: Sequence[str]) -> TracebackType | None:
    """A traceback without its first frames, which are of these files."""
    while trace is not None and trace.tb_frame.f_code.co_filename in files:
        trace = trace.tb_next
    return trace


def _message(error: BaseException) -> str:
    """The first line of what it says; without the place, which `_place` has."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return text.strip().split("\n")[0][:_LONGEST_MESSAGE]


def _place(error: BaseException, trace: TracebackType | None) -> str:
    """File and line where it was raised, or, of what cannot be compiled, where that is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(trace)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n  [{len(text) - 2 * half} characters left out]\n{text[-half:]}"


if __name__ == "__main__":
    main(sys.argv[1:])
