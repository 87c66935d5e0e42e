"""The clock of leases, which also counts while the machine is suspended (standard library only).

Others count on while this machine is suspended, and may give it up. Of the clocks that nobody sets,
the monotonic one stands still then, which is right for the durations of hangs only.
"""

import time


def lease_clock_s() -> float:
    """Return the time in seconds since the machine has booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
