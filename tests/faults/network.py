"""Nodes in network namespaces, joined by a switch that can stop forwarding for one of them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

LIMIT_S = 10.0
# No cable's: the switch sends it everywhere, and nobody takes it.
_NOBODY = "02:00:00:00:00:01"
_HOLD = ["unshare", "-n", "sh", "-c", "echo ready; read line"]


@dataclass(frozen=True, slots=True)
class Network:
    """A switch, and the words that enter each node's namespace."""

    switch: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]

    @staticmethod
    def address(node: int) -> str:
        """The address of a node."""
        return f"10.97.0.{node + 1}"

    def holder(self, node: int) -> str:
        """The process whose network namespace is a node's."""
        return self.nodes[node][2]

    def cut_off(self, node: int) -> None:
        """Forward nothing from or to a node any more; its link stays up, and no peer answers."""
        run(self.switch, f"ip link set port{node} nomaster")

    def part(self, one: int, other: int, *, one_way: bool = False) -> None:
        """Have two nodes lose each other's packets, silently; all others hear both.

        ``one_way``: only those that the first sends.
        """
        for command in self.parting(one, other, one_way=one_way):
            subprocess.run(command, check=True, timeout=LIMIT_S)

    def parting(self, one: int, other: int, *, one_way: bool = False) -> list[list[str]]:
        """Return the commands that do so, from any namespace."""
        ways = ((one, other),) if one_way else ((one, other), (other, one))
        nowhere = ["lladdr", _NOBODY, "dev", "cable", "nud", "permanent"]
        return [
            [*self.nodes[here], "ip", "neigh", "replace", self.address(there), *nowhere]
            for here, there in ways
        ]

    def heal(self, one: int, other: int) -> None:
        """Let them hear each other again."""
        for here, there in ((one, other), (other, one)):
            forget = f"ip neigh del {self.address(there)} dev cable"
            # Of one that sent nothing to the other since, there is no entry.
            subprocess.run(
                [*self.nodes[here], *forget.split()], capture_output=True, timeout=LIMIT_S
            )


def run(enter: tuple[str, ...], command: str) -> None:
    """Run a command in a namespace."""
    subprocess.run([*enter, *command.split()], check=True, timeout=LIMIT_S)


@contextlib.contextmanager
def namespaces(number: int) -> Iterator[list[tuple[str, ...]]]:
    """Make empty ones; the test is skipped, by what is missing, where none can be made."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("network namespaces need root, unshare, nsenter and ip")
    with contextlib.ExitStack() as stack:
        enters = []
        for _ in range(number):
            holder = stack.enter_context(
                subprocess.Popen(_HOLD, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                pytest.skip("network namespaces are not permitted here")
            enters.append(("nsenter", "-t", str(holder.pid), "-n"))
        yield enters


def set_up(network: Network, node: int, *, cable: str) -> None:
    """Give a node its address, on the device that leads to the others."""
    enter = network.nodes[node]
    run(enter, f"ip addr add {network.address(node)}/24 dev {cable}")
    run(enter, f"ip link set {cable} up")
    run(enter, "ip link set lo up")


@contextlib.contextmanager
def network_of(nodes: int) -> Iterator[Network]:
    """Make the nodes and a switch; the test is skipped where there can be none."""
    with namespaces(nodes + 1) as enters:
        network = Network(switch=enters[nodes], nodes=tuple(enters[:nodes]))
        bridge = [*network.switch, *["ip", "link", "add", "switch", "type", "bridge"]]
        if subprocess.run(bridge, capture_output=True, timeout=LIMIT_S).returncode:
            pytest.skip("this kernel has no bridge between network namespaces")
        run(network.switch, "ip link set switch up")
        for node in range(nodes):
            cable = f"ip link add port{node} type veth peer name cable netns {network.holder(node)}"
            run(network.switch, cable)
            run(network.switch, f"ip link set port{node} master switch up")
            set_up(network, node, cable="cable")
        yield network
