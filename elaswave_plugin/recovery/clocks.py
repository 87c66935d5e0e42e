"""Sets the clock of a worker's device: a GPU's through NVML, or emulated, by sleep.

Clocks are relative to the one at which the job starts, 1. The highest clock of the table is the
device's highest: a job that may raise clocks after a loss has to start below that.
"""

import atexit
import os
import select
import subprocess
import sys
import time
from typing import Any

from elaswave_plugin.config import ElasticConfig, parse_clocks
from elaswave_plugin.errors import ConfigurationError

GUARD = "elaswave_plugin.recovery.clock_guard"
GUARD_READY_S = 20.0


class Clocks:
    """The clock of one worker's device; this one is left alone."""

    clock = 1.0

    def set(self, clock: float) -> None:
        """Run at ``clock`` from now on, one of the table; here no plan asks for another one."""
        assert clock == 1.0, clock

    def stretch(self, elapsed_s: float) -> None:
        """A pass through layers took so long: wait for as long as it would have taken longer."""

    def close(self) -> None:
        """Give the device its own clocks back."""


class EmulatedClocks(Clocks):
    """A processor whose passes take 1 / clock of their time: at the highest clock, as they are."""

    def __init__(self, highest: float) -> None:
        self._highest = highest

    def set(self, clock: float) -> None:
        """Passes take highest / clock of their time from now on."""
        self.clock = clock

    def stretch(self, elapsed_s: float) -> None:
        """Sleep off the rest."""
        time.sleep(elapsed_s * (self._highest / self.clock - 1))


class NvmlClocks(Clocks):
    """The graphics clock of one GPU, locked through NVML.

    Another process gives the clocks back when this one is gone, however it ended: NVML keeps them
    locked. Where that process is killed as well, they stay, until `nvidia-smi -rgc` or the end of
    the next job. Passes take longer by themselves, and are not stretched.
    """

    def __init__(self, uuid: str, *, lowest: float, highest: float) -> None:
        """Lock at clock 1. Raises ConfigurationError without NVML, permission or such clocks."""
        self._nvml = _nvml()
        try:
            self._nvml.nvmlInit()
            self._gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            kind = self._nvml.NVML_CLOCK_GRAPHICS
            self._most = int(self._nvml.nvmlDeviceGetMaxClockInfo(self._gpu, kind))
            memory = max(self._nvml.nvmlDeviceGetSupportedMemoryClocks(self._gpu))
            least = min(self._nvml.nvmlDeviceGetSupportedGraphicsClocks(self._gpu, memory))
        except self._nvml.NVMLError as error:
            raise ConfigurationError(
                f"clocks is nvml, and NVML does not tell the clocks of {uuid}: {error}; set it to"
                " off"
            ) from error
        self._highest = highest
        if self._mhz(lowest) < least:
            raise ConfigurationError(
                f"clock_table begins with {lowest:g}, which is {self._mhz(lowest)} MHz of {uuid},"
                f" wanted at least {least} MHz; leave out the lowest clocks"
            )
        self._guard = _start_guard(uuid)
        atexit.register(self.close)
        try:
            self.set(1.0)
        except self._nvml.NVMLError as error:
            self.close()
            raise ConfigurationError(
                f"clocks is nvml, and the clocks of {uuid} cannot be set: {error}; run as root or"
                " with the permission to lock clocks, or set it to off"
            ) from error

    def _mhz(self, clock: float) -> int:
        return round(self._most * clock / self._highest)

    def set(self, clock: float) -> None:
        """Lock the graphics clock."""
        self._nvml.nvmlDeviceSetGpuLockedClocks(self._gpu, self._mhz(clock), self._mhz(clock))
        self.clock = clock

    def close(self) -> None:
        """Unlock, once; the guard does so again when this process is gone, and goes itself."""
        atexit.unregister(self.close)
        self._nvml.nvmlDeviceResetGpuLockedClocks(self._gpu)


def clocks_for(config: ElasticConfig, gpu: str | None) -> Clocks:
    """The clocks of the GPU with this UUID, of a CPU where it is None, as configured.

    Raises ConfigurationError where they cannot be set.
    """
    table = parse_clocks(config.clock_table)
    if config.clocks == "off":
        return Clocks()
    if config.clocks == "nvml" and gpu is not None:
        return NvmlClocks(gpu, lowest=table[0], highest=table[-1])
    if config.clocks == "emulated" and gpu is None:
        return EmulatedClocks(table[-1])
    where, other = ("a CPU", "emulated") if gpu is None else ("a GPU", "nvml")
    raise ConfigurationError(
        f"clocks is {config.clocks}, and the model is on {where}; set it to {other} or off"
    )


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise ConfigurationError(
            "clocks is nvml, which needs the package nvidia-ml-py; install elaswave_plugin[gpu], or"
            " set it to off"
        ) from None
    return pynvml


def _start_guard(uuid: str) -> "subprocess.Popen[str]":
    """Have another process unlock the clocks when this one is gone; it watches once this returns.

    In a session of its own, so that what ends the group of this process does not end it.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", GUARD, str(os.getpid()), uuid],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert guard.stdout is not None
    poll = select.poll()
    poll.register(guard.stdout, select.POLLIN)
    told = poll.poll(1000 * GUARD_READY_S)
    if told and guard.stdout.readline() == "watching\n":
        return guard
    if not told:
        guard.kill()
    guard.stdout.close()
    why = f"exit code {guard.wait(GUARD_READY_S)}" if told else f"not within {GUARD_READY_S:g} s"
    raise ConfigurationError(
        f"clocks is nvml, and the process that gives the clocks of {uuid} back did not start"
        f" ({why}); set it to off"
    )
