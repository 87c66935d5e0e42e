"""A switch between network namespaces that drops and delays what passes, in a process of its own.

    python -m tests.faults.lossy DEVICE...

Kernels without netem (tc) cannot; here each node's device is a tap, whose frames this forwards. It
reads "LOSS DELAY_S" from standard input, and answers with the numbers of packets that it has
dropped and held up so far, once that holds.
"""

import contextlib
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.faults.network import LIMIT_S, Network, namespaces, set_up

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# linux/if_tun.h
_SET_INTERFACE, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_TUN = "/dev/net/tun"
_FRAME_BYTES = 1 << 16
_SEED = 1


class LossyNetwork:
    """Nodes that hear each other through a bad network."""

    def __init__(self, network: Network, switch: "subprocess.Popen[str]") -> None:
        self.network = network
        self._switch = switch

    def disturb(self, *, loss: float, delay_s: float = 0.0) -> tuple[int, int]:
        """Drop this part of the packets from now on, and hold up the others for so long.

        Returns how many have been dropped, and how many held up, before.
        """
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(f"{loss} {delay_s}\n")
        self._switch.stdin.flush()
        told = self._switch.stdout.readline().split()
        assert len(told) == 2, "the switch is gone"
        return int(told[0]), int(told[1])


@contextlib.contextmanager
def lossy_network_of(nodes: int) -> Iterator[LossyNetwork]:
    """Make them, undisturbed at first; the test is skipped where there can be none."""
    if not os.access(_TUN, os.W_OK):
        pytest.skip(f"{_TUN} is not there: no switch of our own can be made")
    with namespaces(nodes) as enters:
        network = Network(switch=(), nodes=tuple(enters))
        # As long as 15 bytes; of this process, so that two of them do not meet.
        devices = [f"tap{os.getpid() % 100000}n{node}" for node in range(nodes)]
        command = [sys.executable, "-m", "tests.faults.lossy", *devices]
        with subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        ) as switch:
            lossy = LossyNetwork(network, switch)
            try:
                lossy.disturb(loss=0.0)
                for node, (enter, device) in enumerate(zip(enters, devices, strict=True)):
                    move = ["ip", "link", "set", device, "netns", enter[2]]
                    subprocess.run(move, check=True, timeout=LIMIT_S)
                    set_up(network, node, cable=device)
                yield lossy
            finally:
                switch.terminate()


def main(devices: Sequence[str]) -> None:
    """Forward until standard input ends."""
    taps = [_open(device) for device in devices]
    selector = selectors.DefaultSelector()
    for tap in taps:
        selector.register(tap, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    dice = random.Random(_SEED)
    ports: dict[bytes, int] = {}
    late: list[tuple[float, int, int, bytes]] = []
    loss, delay_s, number = 0.0, 0.0, 0
    dropped = held = 0
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for key, _ in selector.select(wait_s):
            if key.fd == 0:
                line = os.read(0, 4096).decode().split()
                if not line:
                    return
                loss, delay_s = float(line[0]), float(line[1])
                os.write(1, f"{dropped} {held}\n".encode())
                continue
            frame = os.read(key.fd, _FRAME_BYTES)
            ports[frame[6:12]] = key.fd
            known = ports.get(frame[:6])
            for target in taps if known is None else [known]:
                if target == key.fd:
                    continue
                if dice.random() < loss:
                    dropped += 1
                else:
                    number, held = number + 1, held + (delay_s > 0)
                    heapq.heappush(late, (time.monotonic() + delay_s, number, target, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(late)
            # A node whose device is not up yet, or full: a switch drops it as well.
            with contextlib.suppress(OSError):
                os.write(target, frame)


def _open(device: str) -> int:
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        descriptor, _SET_INTERFACE, struct.pack("16sH22x", device.encode(), _TAP_WITHOUT_HEADER)
    )
    return descriptor


if __name__ == "__main__":
    main(sys.argv[1:])
