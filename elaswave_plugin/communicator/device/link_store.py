"""A torch Store over our own links: what one member sets is sent to all members of its group."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Group, Operation, Steps
from elaswave_plugin.communicator.links.transfers import ANY_SOURCE
from elaswave_plugin.errors import ConfigurationError

_SIZES = struct.Struct("<II")  # bytes of the key, bytes of the value
_TAG = 0


class LinkStore(Store):
    """Enough of a store for backends to meet: set, get, check and wait.

    No server and no thread: a member that waits for a key reads what the others have sent.  It
    belongs to one group and follows its members.  Raises EpochChanged out of every wait.
    """

    def __init__(
        self, links: LinkTable, name: str, members: Sequence[int], *, timeout_s: float
    ) -> None:
        """`members` are slots in rank order, alike on all of them; `name` names the store."""
        super().__init__()
        self._links = links
        self._name = name
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._reading = threading.Lock()
        digest = hashlib.blake2b(f"store of {name}".encode(), digest_size=8).digest()
        self._id = int.from_bytes(digest, "big")
        self.follow(members)

    def follow(self, members: Sequence[int]) -> None:
        """The members have changed; what was set stays."""
        slots = tuple(members)
        self._group = Group(
            number=self._id,
            label=f"store of {self._name}",
            members=slots,
            rank=slots.index(self._links.slot),
        )

    def set(self, key: str, value: Any) -> None:
        """Keep it and send it to all other members."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        name = key.encode()
        sizes = memoryview(_SIZES.pack(len(name), len(data)))
        payload = memoryview(name + data)

        def body(op: Operation) -> Steps:
            for rank in op.others():
                op.send(rank, sizes)
                op.send(rank, payload, part=1)
            yield from ()

        operation = self._operation(f"set {key!r}", self._timeout_s)
        self._links.run(operation, body)
        self._links.wait(operation)

    def get(self, key: str) -> bytes:
        """The value; blocks until a member sets it. Raises LinkError after the timeout."""
        self._read_until([key], self._timeout_s)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have arrived, among what has been read so far."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. Raises LinkError after the timeout, EpochChanged."""
        self._read_until(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        """Refuse: no member owns a key."""
        raise ConfigurationError(
            f"add({key!r}, {value}) on the store of {self._name!r} is not supported: it has set, "
            "get, check and wait"
        )

    def _read_until(self, keys: Sequence[str], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._reading:
            while missing := [key for key in keys if key not in self._values]:
                self._read(f"wait for {missing}", deadline_s - time.monotonic())

    def _read(self, what: str, timeout_s: float) -> None:
        """Take one key and its value from the next sender."""
        sizes = bytearray(_SIZES.size)

        def body(op: Operation) -> Steps:
            head = op.receive(ANY_SOURCE, memoryview(sizes))
            yield head
            key_bytes, value_bytes = _SIZES.unpack(sizes)
            payload = bytearray(key_bytes + value_bytes)
            rank = op.group.members.index(head.peer)
            yield op.receive(rank, memoryview(payload), part=1)
            self._values[payload[:key_bytes].decode()] = bytes(payload[key_bytes:])

        operation = self._operation(what, timeout_s)
        self._links.run(operation, body)
        self._links.wait(operation)

    def _operation(self, what: str, timeout_s: float) -> Operation:
        return Operation(self._links, self._group, what, timeout_s=timeout_s, tag=_TAG)
