"""A worker of a benchmark job: a member of the view with links and groups, and no training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.core.layout.worker_facts import SealedShard, WorkerFacts
from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.trainer.member import Commit, Member

JOIN_LIMIT_S = 300.0
LINGER_S = 2.0


class BenchMember:
    """Joins the job, takes part in view changes, and writes down figures."""

    def __init__(self, out: Path) -> None:
        self.member = Member.from_environment(os.environ)
        self.slot = self.member.slot
        self.links = LinkTable(self.slot, secret=self.member.secret, host=self.member.host)
        self.groups = GroupTable(self.links)
        self._out = out / f"{self.slot}.jsonl"
        self.member.start(self.links.interrupt)
        first = self.member.join(self._facts(), JOIN_LIMIT_S)
        assert isinstance(first, Commit), "nobody replaces a worker of the bench"
        self._open(first)
        # A worker that has sealed something may be lost without ending the job.
        nothing = SealedShard(
            owner=self.slot,
            buffer=0,
            step=0,
            epoch=self.view.epoch,
            shard_group=(0, 0),
            units=(),
            ranks=(self.slot,),
            shard=0,
            length=0,
            payload_bytes=0,
            capsule_bytes=0,
            table_digest=0,
        )
        self.member.sealed(nothing, [])

    def _facts(self) -> WorkerFacts:
        return WorkerFacts(address=self.links.address)

    def _open(self, commit: Commit) -> None:
        self.view = commit.view
        addresses = {slot: facts.address for slot, facts in commit.facts.items()}
        self.links.open_epoch(commit.view.epoch, addresses)

    def store(self, port: int) -> Any:
        """The benchmark's store, with names of this job alone."""
        c10d: Any = dist
        return c10d.PrefixStore(self._out.parent.name, c10d.TCPStore("127.0.0.1", port))

    def write(self, **figures: object) -> None:
        """Append a line of figures."""
        with self._out.open("a") as lines:
            lines.write(json.dumps({"slot": self.slot, **figures}) + "\n")

    def install(self, groups: dict[str, tuple[int, ...]]) -> list[Any]:
        """Make WORLD and these groups out of ours, through torch; returns the own ones."""
        ranks = self.view.ranks
        dist.init_process_group(**self.groups.install(ranks))
        return [dist.group.WORLD, *own_groups(groups, ranks, self.slot)]

    def uninstall(self) -> None:
        """Take them away again."""
        dist.destroy_process_group()
        self.groups.uninstall()

    def follow(self) -> Commit:
        """Agree on the open proposal and edit every group."""
        before = set(self.view.ranks)
        while True:
            try:
                commit = self.member.quiesce(self._facts())
                self._open(commit)
            except EpochChanged:
                continue
            break
        self.groups.edit_all(self.view.ranks, before - set(self.view.ranks))
        return commit

    def wait_for_change(self, work: Callable[[], object]) -> None:
        """Work until a proposal interrupts it."""
        try:
            while True:
                work()
        except EpochChanged:
            return

    def leave(self) -> None:
        """Say when, and go; the process ends later, so that its end costs the others nothing."""
        at_s = time.monotonic()
        self.member.leave("its departure is measured")
        self.write(what="leaves", at_s=at_s)
        time.sleep(LINGER_S)
        os._exit(0)


def own_groups(groups: dict[str, tuple[int, ...]], ranks: Sequence[int], slot: int) -> list[Any]:
    """Call new_group for each group, as all ranks must; returns those with this slot."""
    found = []
    for members in groups.values():
        group = dist.new_group([ranks.index(one) for one in members])
        if slot in members:
            found.append(group)
    return found
