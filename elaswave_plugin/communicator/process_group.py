"""All process groups of one worker: made through torch, edited together when the view changes."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elaswave_plugin.communicator.device import nccl
from elaswave_plugin.communicator.device.calls import DeviceProcessGroup, OrderedProcessGroup
from elaswave_plugin.communicator.device.communicator import Maker
from elaswave_plugin.communicator.device.engine import Answers, DeviceEngine
from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.core.layout.device_groups import CommunicatorFacts
from elaswave_plugin.core.layout.group_rules import GroupEdit
from elaswave_plugin.errors import ConfigurationError


class GroupTable:
    """The groups of one worker, WORLD first once init_process_group has run."""

    def __init__(
        self,
        links: LinkTable,
        *,
        gpu_engine: str = "host",
        maker: Maker | None = None,
        exact: bool = False,
    ) -> None:
        """`gpu_engine` is the setting auto, host or nccl; auto and nccl make init_process_group()
        collective. `maker`: makes the native groups, whatever the setting says. `exact`: native
        sums of floats do not depend on the workers that compute them.
        """
        c10d_tables.check_torch()
        self.links = links
        self._native_class = OrderedProcessGroup if exact else DeviceProcessGroup
        self._gpu_engine = gpu_engine
        self._engine = None if maker is None else DeviceEngine(links, maker)
        self.launched_on: dict[int, str] = {}
        """The device of every slot at launch, where they have native groups; for who is alone."""
        self._undo_batches: Callable[[], None] | None = None
        self.world: ElasticProcessGroup | None = None
        # Called before WORLD ends, as where the script destroys it.
        self.before_the_end: Callable[[], None] = lambda: None
        self._world_ranks: tuple[int, ...] = ()
        self._first_ranks: tuple[int, ...] = ()
        self._of_all: set[str] = set()
        self._groups: dict[str, ElasticProcessGroup] = {}
        self._launched: dict[str, tuple[int, ...]] = {}
        self._installed = False
        # Torch keeps no reference that Python would see.
        self._store = c10d_tables.LocalStore()

    @property
    def has_native_groups(self) -> bool:
        """True if tensors of a device go to native groups."""
        return self._engine is not None

    @property
    def groups(self) -> tuple[ElasticProcessGroup, ...]:
        """Every group that has not been shut down."""
        return tuple(self._groups.values())

    def create(
        self, name: str, members: Sequence[int], *, timeout_s: float = 1800.0
    ) -> ElasticProcessGroup:
        """A new group of slots in rank order. Raises ConfigurationError when the name is taken."""
        if name in self._groups:
            raise ConfigurationError(f"a group named {name!r} exists already: choose another name")
        # Without an engine no call pays for looking at its tensors.
        group: ElasticProcessGroup
        slots, forget = tuple(members), self._forget
        if self._engine is None:
            group = ElasticProcessGroup(
                self.links, name, slots, timeout_s=timeout_s, on_shutdown=forget
            )
        else:
            group = self._native_class(
                self._engine, self.links, name, slots, timeout_s=timeout_s, on_shutdown=forget
            )
        self._groups[name] = group
        self._launched[name] = slots
        if {*slots} == {*self._world_ranks}:
            self._of_all.add(name)
        return group

    def _forget(self, name: str) -> None:
        if self.world is not None and self._groups.get(name) is self.world:
            self.before_the_end()
        group = self._groups.pop(name, None)
        self._launched.pop(name, None)
        if group is not None:
            self.links.forget(group.group_id)
        if self.world is group:
            self.world = None

    def edit_all(self, view_ranks: Sequence[int], dead: set[int]) -> None:
        """Take the dead slots out of every group; WORLD becomes `view_ranks`."""
        self.edit_groups(
            view_ranks,
            {
                name: GroupEdit(tuple(slot for slot in slots if slot not in dead))
                for name, slots in self.members().items()
            },
        )

    def members(self) -> dict[str, tuple[int, ...]]:
        """The members of every group but WORLD, by name, in the order in which they were made."""
        return {g.group_name: g.members for g in self.groups if g is not self.world}

    def launched(self) -> dict[str, tuple[int, ...]]:
        """The members that every group but WORLD was made with, by name."""
        names = [group.group_name for group in self.groups if group is not self.world]
        return {name: self._launched[name] for name in names}

    def is_of_all(self, group: ElasticProcessGroup) -> bool:
        """Return whether a group was made of all workers that there were."""
        return group is self.world or group.group_name in self._of_all

    def made_of(self, group: ElasticProcessGroup) -> tuple[int, ...]:
        """The slots that a group was made of; a group that was made aside has its members."""
        return self._launched.get(group.group_name, group.members)

    def as_made(self, group: ElasticProcessGroup, *, view: int) -> ElasticProcessGroup:
        """Return the group of those that one was made of and that are there; ``view``: its number.

        It is that one itself where nobody is missing.
        """
        made = self.made_of(group)
        if (self._world_ranks, group.members) == (self._first_ranks, made):
            return group
        there = [slot for slot in made if slot in self._world_ranks]
        return self._beside(group, f"in view {view}", there)

    def alone(self, group: ElasticProcessGroup) -> ElasticProcessGroup:
        """Return a group of this worker, in which what is in a tensor is the result."""
        return self._beside(group, "alone", [self.links.slot])

    def _beside(
        self, group: ElasticProcessGroup, which: str, members: Sequence[int]
    ) -> ElasticProcessGroup:
        """Make a group that torch does not know, and which nobody edits."""
        return ElasticProcessGroup(
            self.links,
            f"{group.group_name} {which}",
            members,
            timeout_s=group.timeout_s,
            on_shutdown=lambda name: None,
        )

    def edit_groups(self, view_ranks: Sequence[int], edits: Mapping[str, GroupEdit]) -> None:
        """Set the members of WORLD and of the named groups together, in torch's tables too."""
        world = tuple(view_ranks)
        strangers = {slot for edit in edits.values() for slot in edit.members} - set(world)
        if strangers:
            raise ConfigurationError(
                f"groups would hold slots {sorted(strangers)}, which are not in the view {world}"
            )
        self._world_ranks = world
        if self.world is not None:
            self.world.edit(world)
        for name, edit in edits.items():
            self._groups[name].edit(edit.members, edit.identity)
        c10d_tables.forget_coalescing(self.groups)
        self.list_ranks()

    def list_ranks(self) -> None:
        """Have torch's tables list the members that the groups have now; `LinkTable.asked`."""
        rank_of = {slot: rank for rank, slot in enumerate(self._world_ranks)}
        c10d_tables.update_ranks(
            {group: [rank_of[slot] for slot in group.members] for group in self.groups},
            self.world,
        )

    def device_facts(self) -> dict[str, CommunicatorFacts]:
        """The communicators that this worker holds, by name, for the commit.

        Call it when the step has unwound: what is still in flight is aborted.
        """
        return {} if self._engine is None else self._engine.facts()

    def settle(self, answers: Answers) -> None:
        """Choose the communicators that go on after an edit, from all members' device_facts().

        Without this call none does, and each group makes a new one. Raises EpochChanged, LinkError.
        """
        if self._engine is not None:
            self._engine.settle({g.group_name: g.members for g in self.groups}, answers)

    def install(self, world_ranks: Sequence[int]) -> dict[str, Any]:
        """Register backend "elaswave"; returns the arguments for init_process_group.

        `world_ranks` are slots in rank order.  No store server is started or needed.
        """
        world = tuple(world_ranks)
        if self.links.slot not in world:
            raise ConfigurationError(f"slot {self.links.slot} is not in the world {world}")
        c10d_tables.register_backend(self._make)
        if self._engine is not None or self._gpu_engine != "host":
            self._undo_batches = c10d_tables.route_batches(_batch_of)
        self._installed = True
        self._world_ranks = self._first_ranks = world
        return {
            "backend": c10d_tables.BACKEND,
            "store": self._store,
            "rank": world.index(self.links.slot),
            "world_size": len(world),
        }

    def uninstall(self) -> None:
        """Undo install(); groups that exist stay usable. Idempotent."""
        if self._installed:
            self._installed = False
            c10d_tables.unregister_backend()
            if self._undo_batches is not None:
                self._undo_batches()
                self._undo_batches = None

    def _make(self, options: Any, _: Any) -> ElasticProcessGroup:
        """Make a group; torch calls this for init_process_group and for each new_group with us."""
        ranks = list(options.global_ranks_in_group)
        members = [self._world_ranks[rank] for rank in ranks] if ranks else self._world_ranks
        timeout_s = options.timeout.total_seconds()
        if not ranks and self._engine is None:
            maker = nccl.maker_for(
                self.links,
                members,
                self._gpu_engine,
                os.environ,
                timeout_s=timeout_s,
                launched_on=self.launched_on,
            )
            if maker is not None:
                self.launched_on = maker.devices
                self._engine = DeviceEngine(self.links, maker)
        group = self.create(str(options.group_id), members, timeout_s=timeout_s)
        if not ranks:
            self.world = group
        return group


def check_growing_groups(groups: GroupTable, *, width: int | None) -> None:
    """Raise ConfigurationError where a group's members are not plain once a worker more joins.

    `width`: workers of a data-parallel launch; None where rules tell the members of a group.
    """
    if groups.has_native_groups:
        raise ConfigurationError(
            "--reserve lets workers join, which is not carried with NCCL: set gpu_engine to host, "
            "or leave --reserve out"
        )
    for name, members in groups.launched().items() if width else ():
        if len(members) not in (1, width):
            raise ConfigurationError(
                f"the group {name!r} has {len(members)} of {width} workers, and with --reserve "
                "a group is of one worker or of all: leave --reserve out"
            )


def _batch_of(group: Any, tensor: Any) -> Callable[[Any], Any] | None:
    """Return the runner of a point-to-point batch that begins with this tensor; None: torch."""
    if isinstance(group, DeviceProcessGroup) and group.takes_batches_on(tensor.device):
        return group.batch
    return None
