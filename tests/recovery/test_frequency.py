"""Clocks: emulated ones take their time, NVML's are given back however a process ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.clocks import EmulatedClocks, NvmlClocks, clocks_for
from tests.agent.jobs import WAIT_S, Job
from tests.idle import Deadline

ROOT = Path(__file__).resolve().parents[2]
UUID = "GPU-1234"
# A stand-in for the module of nvidia-ml-py: a GPU of 600 to 2200 MHz that writes down its locks.
FAKE = """
import os
NVML_CLOCK_GRAPHICS = 0
class NVMLError(Exception):
    pass
def _log(text):
    with open(os.environ["NVML_LOG"], "a") as log:
        log.write(text + "\\n")
def nvmlInit():
    pass
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != "GPU-1234":
        raise NVMLError("Not Found")
    return uuid
def nvmlDeviceGetMaxClockInfo(gpu, kind):
    return 2200
def nvmlDeviceGetSupportedMemoryClocks(gpu):
    return [800, 1600]
def nvmlDeviceGetSupportedGraphicsClocks(gpu, memory):
    return [2200, 1400, 600] if memory == 1600 else [405]
def nvmlDeviceSetGpuLockedClocks(gpu, low, high):
    if "NVML_FORBIDS" in os.environ:
        raise NVMLError("Insufficient Permissions")
    assert low == high
    _log(f"lock {low}")
def nvmlDeviceResetGpuLockedClocks(gpu):
    _log("reset")
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the fake writes; it is imported here and in processes that are started."""
    (tmp_path / "pynvml.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("NVML_LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    return tmp_path / "log"


def awaited(log: Path, wanted: list[str]) -> None:
    """The guard ends a moment after the process that it watches."""
    deadline = Deadline(20)
    while log.read_text().splitlines() != wanted:
        assert deadline.left_s(), log.read_text()
        time.sleep(0.02)


def run(code: str) -> int:
    head = "import os, signal\nfrom elaswave_plugin.recovery.clocks import NvmlClocks\n"
    return subprocess.run([sys.executable, "-c", head + code], timeout=60).returncode


def test_an_emulated_pass_takes_as_much_longer_as_the_clock_is_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    clocks = EmulatedClocks(1.25)
    for clock in (1.0, 0.5, 1.25):
        clocks.set(clock)
        clocks.stretch(0.05)
        assert clocks.clock == clock
    assert slept_s == pytest.approx([0.0125, 0.075, 0.0])


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(3)", 3),
        ("raise SystemExit(4)", 4),
    ],
    ids=["returns", "killed", "leaves", "exits"],
)
def test_clocks_are_given_back_however_the_process_ends(log: Path, end: str, code: int) -> None:
    clocks = f"NvmlClocks({UUID!r}, lowest=0.5, highest=1.1)"
    assert run(f"clocks = {clocks}\nclocks.set(1.1)\n{end}") == code
    orderly = ["reset"] if code in (0, 4) else []
    awaited(log, ["lock 2000", "lock 2200", *orderly, "reset"])


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        ("the trainer's group", signal.SIGTERM),
        ("every process", signal.SIGTERM),
        pytest.param("every process", signal.SIGINT, marks=pytest.mark.slow),
        ("the guardian", signal.SIGKILL),
        pytest.param("the launcher", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_clocks_are_given_back_whoever_of_a_job_is_signalled(
    log: Path, tmp_path: Path, whom: str, number: signal.Signals
) -> None:
    """A signal to a trainer's children may not end the guard, one of them, before the trainer."""
    with Job(tmp_path / "job", 1).start() as job:
        job.tell(0, f"lock_clocks {UUID}")
        job.one("lock_clocks", 0)
        (guard,) = psutil.Process(job.pids[0]).children()
        job.watch(guard.pid)
        assert log.read_text() == "lock 2000\n"
        match whom:
            case "the trainer's group":
                os.killpg(job.pids[0], number)
                job.kill(0)  # to trainers alone the signal is no order to end
            case "every process":
                os.kill(guard.pid, number)
                job.kill(0)  # before it can unlock by itself
            case "the guardian":
                job.kill_node(0)
            case _:
                job.launchers[0].send_signal(number)
        job.code()
        assert job.left(WAIT_S) == []
    # An orderly end unlocks first, by itself.
    assert log.read_text() in ("lock 2000\nreset\n", "lock 2000\nreset\nreset\n")


def test_closing_gives_clocks_back_at_once(log: Path) -> None:
    code = "c = NvmlClocks('GPU-1234', lowest=0.5, highest=1.1)\nc.close()\nos._exit(0)"
    assert run(code) == 0
    awaited(log, ["lock 2000", "reset", "reset"])


def test_without_permission_it_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVML_FORBIDS", "1")
    monkeypatch.setattr("elaswave_plugin.recovery.clocks._start_guard", lambda uuid: None)
    with pytest.raises(
        ConfigurationError, match=r"cannot be set: Insufficient Perm.*set it to off"
    ):
        NvmlClocks(UUID, lowest=0.5, highest=1.1)


def test_a_clock_below_the_device_is_refused(log: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"begins with 0.2, which is 400 MHz.*600 MHz"):
        NvmlClocks(UUID, lowest=0.2, highest=1.1)
    with pytest.raises(ConfigurationError, match="does not tell the clocks of GPU-5: Not Found"):
        NvmlClocks("GPU-5", lowest=0.5, highest=1.1)
    assert not log.read_text()


def test_backends_that_do_not_fit_the_device_are_refused() -> None:
    assert clocks_for(ElasticConfig(), UUID).clock == 1.0
    assert isinstance(clocks_for(ElasticConfig(clocks="emulated"), None), EmulatedClocks)
    with pytest.raises(ConfigurationError, match="clocks is nvml, and the model is on a CPU"):
        clocks_for(ElasticConfig(clocks="nvml"), None)
    with pytest.raises(ConfigurationError, match="emulated, and the model is on a GPU"):
        clocks_for(ElasticConfig(clocks="emulated"), UUID)


def test_nvml_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigurationError, match="needs the package nvidia-ml-py"):
        NvmlClocks(UUID, lowest=0.5, highest=1.1)


def test_a_guard_that_does_not_start_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT / "nowhere"))
    monkeypatch.setattr("elaswave_plugin.recovery.clocks.GUARD", "elaswave_plugin.no_such_module")
    with pytest.raises(ConfigurationError, match=r"did not start \(exit code 1\)"):
        NvmlClocks(UUID, lowest=0.5, highest=1.1)
