"""Order of the tests, and a hard limit that shows all stacks and leaves no process behind."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from tests import sample
from tests.convoys import convoy as convoy
from tests.convoys import played as played
from tests.durations import RECORD, Durations
from tests.idle import Deadline, completed
from tests.results import Results
from tests.session import data as data
from tests.session import once as once
from tests.session import reference as reference
from tests.session import run as run
from tests.session import zygote as zygote
from tests.session import zygotes as zygotes
from tests.tiers import REPRESENTATIVES, is_long, unknown_representatives, waits_for_faults

FIRST = ("tidy", "core", "config")
# One process, then groups of worker processes and whole jobs without a framework.
ROOMS = (
    "ipc",
    "trainer",
    "communicator",
    "snapshot",
    "agent",
    "launch",
    "recovery",
    "tracking",
)
LAST = ("faults",)
STACKS_GRACE_S = 2.0
NO_CHECKOUT = "MEGATRON_LM_PATH is not set, wanted a checkout of Megatron-LM, tag core_v0.16.1"
ENDED = pytest.StashKey[threading.Event]()
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make durations`, `make megatron-lm` and `make python312`."""
    said = "write tests/durations.json when all tests have passed"
    parser.addoption(RECORD, action="store_true", help=said)
    said = "write what became of the tests, and where, to this file when they have ended"
    parser.addoption("--record-results", type=Path, metavar="FILE", help=said)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr: during a test descriptor 2 belongs to pytest's capture."""
    config.stash[STDERR] = os.dup(2)
    config.pluginmanager.register(Durations(config))
    if (file := config.getoption("record_results")) is not None:
        config.pluginmanager.register(Results(file))
    # How long an example takes says how busy the machine is, nothing about the product. The same
    # examples in every run: what fails can be run again. `make matrix` draws others.
    for name, is_repeatable in (("repeatable", True), ("exploring", False)):
        hypothesis.settings.register_profile(name, deadline=None, derandomize=is_repeatable)
    hypothesis.settings.load_profile(config.getoption("hypothesis_profile") or "repeatable")
    # Started in the background, pytest ignores Ctrl-C, and what the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what a tier leaves out, and put cheap and fundamental tests first, faults last.

    Of tests that the command line names, all cases run. Raises UsageError for a representative that
    is no test, and for a part that there is not.
    """
    for item in items:
        if waits_for_faults(item.nodeid, getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.fault)
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("checkout") and not os.environ.get("MEGATRON_LM_PATH"):
            item.add_marker(pytest.mark.skip(NO_CHECKOUT))
    if not any("::" in argument for argument in config.args):
        unknown = unknown_representatives([item.nodeid for item in items])
        if unknown:
            raise pytest.UsageError(f"tests/tiers.py names {unknown}, which are no tests")
        said = sample.draw(items, sample.chosen_part(), REPRESENTATIVES)
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:  # `-q` has no header: the draw is said either way
            terminal.write_line(said)
    items.sort(key=lambda item: _place(item.path))


@pytest.fixture(scope="session")
def doctor() -> "subprocess.CompletedProcess[str]":
    """Run `elaswave doctor --json`, in a process of its own since it imports everything."""
    command = [sys.executable, "-m", "elaswave_plugin.cli.main", "doctor", "--json"]
    environ = {key: value for key, value in os.environ.items() if key != "MEGATRON_LM_PATH"}
    return completed(command, 100, env=environ)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Take the place of pytest-timeout's own timer, which would orphan the test's processes."""
    if not settings.timeout or settings.timeout <= 0:
        return True
    stderr = item.config.stash[STDERR]
    ended = item.stash[ENDED] = threading.Event()
    arguments = (ended, item.nodeid, settings.timeout, stderr)
    threading.Thread(target=_expire, args=arguments, daemon=True).start()
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """Tell the thread that waits for a test that it has ended in time."""
    ended = item.stash.get(ENDED, None)
    if ended is not None:
        ended.set()
    return True


def _place(path: Path) -> int:
    folder = path.relative_to(Path(__file__).parent).parts[0]
    order = (*FIRST, *ROOMS)
    if folder in order:
        return order.index(folder)
    return len(order) + (1 if folder in LAST else 0)


def _expire(ended: threading.Event, nodeid: str, limit_s: float, stderr: int) -> None:
    """End the run, and all processes that it started, if a test has not ended within its limit."""
    deadline = Deadline(limit_s)
    while left_s := deadline.left_s():
        if ended.wait(left_s):
            return
    out = os.fdopen(stderr, "w", closefd=False)
    os.dup2(stderr, 2)  # so that what the children print now is seen as well
    print(f"\n{nodeid} ran longer than {limit_s:g} s; stacks of all threads:", file=out, flush=True)
    faulthandler.dump_traceback(file=out, all_threads=True)
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(child.cmdline())[:200]
            print(f"child {child.pid} ({child.status()}): {command}", file=out, flush=True)
            if _dumps_on_usr1(child.pid):
                child.send_signal(signal.SIGUSR1)
    psutil.wait_procs(children, timeout=STACKS_GRACE_S)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()  # psutil checks that the pid still belongs to the process it saw
    os._exit(1)


def _dumps_on_usr1(pid: int) -> bool:
    """Tell whether a process catches SIGUSR1 (faulthandler.register): else it would end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)
