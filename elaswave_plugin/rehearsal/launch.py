"""Starts the command of a rehearsal as it stands, with one zygote for all of its runs."""

import ast
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elaswave_plugin.demo.jobs import JobFailed, running, wait_until_ready, zygote
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.rehearsed import REHEARSAL

RUN_LIMIT_S = 1800.0
LOOK_INTERVAL_S = 0.05
_LAST_LINES = 15
# What a worker says that came back and left again; that the job ends for it is said later.
_CAME_BACK = ", started again: "
_ALWAYS = ("torch", "numpy", "pydantic", "elaswave_plugin.rehearsal.record")
# What a script imports -> what its trainers need, imported once.
_PRELOADED = (
    (
        ("megatron",),
        ("elaswave_plugin.adapters.megatron", "elaswave_plugin.rehearsal.of_megatron"),
    ),
    (
        ("deepspeed", "accelerate", "transformers"),
        (
            "deepspeed",
            "elaswave_plugin.adapters.deepspeed.attach",
            # What deepspeed.initialize imports, which takes two seconds in each process.
            "deepspeed.runtime.zero.muon.muon_optimizer",
            "deepspeed.runtime.zero.stage3",
            "torch._dynamo",
        ),
    ),
)
# Parts of a framework that a script's own imports may name, and that change nothing when imported.
_SAFE = ("megatron.core", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command that is rehearsed: the user's words, and the script or module among them."""

    words: tuple[str, ...]

    @classmethod
    def checked(cls, words: Sequence[str]) -> "Command":
        """Raises ConfigurationError for one that cannot be started."""
        if not words:
            raise ConfigurationError(
                "elaswave rehearse got no command: give the one that starts the job, as in"
                " `elaswave rehearse elaswave run --nproc-per-node 4 train.py --elaswave`"
            )
        if shutil.which(words[0]) is None:
            raise ConfigurationError(
                f"the command {words[0]!r} does not exist: give the one that starts the job"
            )
        return cls(words=tuple(words))

    @property
    def launches(self) -> int | None:
        """The index of the first word behind `elaswave run`; None for other launchers."""
        for number, word in enumerate(self.words[:5]):
            ours = Path(word).name == "elaswave" or word == "elaswave_plugin.cli.main"
            if ours and self.words[number + 1 : number + 2] == ("run",):
                return number + 2
        return None

    @property
    def script(self) -> Path | None:
        """The first word that names a Python file."""
        paths = (Path(word) for word in self.words[1:] if word.endswith(".py"))
        return next((path for path in paths if path.is_file()), None)

    def with_zygote(self, socket: Path | None) -> list[str]:
        """The words, with an option for `elaswave run` where it has none of that kind."""
        at, words = self.launches, list(self.words)
        if at is None or socket is None:
            return words
        return [*words[:at], "--zygote", str(socket), *words[at:]]

    @property
    def has_zygote(self) -> bool:
        """True if it says itself where its trainers come from."""
        own = {word.partition("=")[0] for word in self.words}
        return bool({"--zygote", "--preload", "--elaswave-zygote"} & own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a run: exit code, seconds, the last lines it wrote, and why newcomers left."""

    exit_code: int
    seconds: float
    lines: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Why the first newcomer left; else the last line, which is what is said of bad input."""
        if left := [line for line in self.lines if _CAME_BACK in line]:
            return left[0]
        said = [
            line for line in self.lines if line.startswith(("elaswave", "step")) or ": " in line
        ]
        return (said or list(self.lines) or ["it wrote nothing"])[-1]


def run_command(
    command: Command,
    order: RunOrder,
    socket: Path | None,
    look: Callable[[], None],
) -> Ended:
    """Run the command to its end; raises JobFailed where that takes too long."""
    log = order.folder / order.name / "log"
    env = {REHEARSAL: str(order.write())}
    if socket is not None:
        env["ELASWAVE_ZYGOTE"] = str(socket)
    began_s = time.monotonic()
    with running(command.with_zygote(socket), log, env=env) as process:
        while process.poll() is None:
            look()
            if time.monotonic() > began_s + RUN_LIMIT_S:
                raise JobFailed(f"run {order.name!r} was not done after {RUN_LIMIT_S:g} s", 1)
            time.sleep(LOOK_INTERVAL_S)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    left = [line for line in lines[:-_LAST_LINES] if _CAME_BACK in line]
    return Ended(
        exit_code=process.returncode,
        seconds=time.monotonic() - began_s,
        lines=(*left, *lines[-_LAST_LINES:]),
    )


@contextmanager
def warmed(command: Command, folder: Path) -> Iterator[Path | None]:
    """A zygote that has imported what the script imports; None where there is another, or none."""
    if command.has_zygote:
        yield None
        return
    preload = list(dict.fromkeys([*_ALWAYS, *_imports_of(command.script)]))
    for modules in (preload, list(_ALWAYS)):
        log = folder / "zygote.log"
        with zygote(log, modules) as (process, path):
            try:
                wait_until_ready(process, path, log)
            except JobFailed:
                continue
            yield path
            return
    yield None


def _imports_of(script: Path | None) -> Iterator[str]:
    """Modules to preload for a script, by the names that it imports."""
    if script is None:
        return
    try:
        tree = ast.parse(script.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    named: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.append(node.module)
    tops = {name.partition(".")[0] for name in named}
    tops |= {name.rpartition(".")[2] for name in named if name.startswith("elaswave_plugin.")}
    for words, modules in _PRELOADED:
        if tops & set(words):
            yield from modules
    yield from (name for name in named if name.startswith(_SAFE))
