"""The content of a commit as text: the facts and the seals of all workers, as tables (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.core.codec import from_json, shortened
from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.core.layout.worker_facts import WorkerFacts
from elaswave_plugin.core.table import objects_of, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The content of a commit: the facts by slot, and every sealed record that a worker has.

    The agents hand it on as text: at many workers, to take it apart and put it together again
    on the way to each trainer is most of the work of a commit.
    """

    facts: dict[int, WorkerFacts]
    inventory: list[SealedShard]


def pack_payload(
    facts: Mapping[int, Mapping[str, Any]], inventory: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of a `Payload`, of parts that are not read on the way.

    Both are tables: what many workers have alike is in it once.
    """
    packed = {
        "slots": shortened(list(facts)),
        "facts": table_of(list(facts.values())),
        "inventory": table_of(inventory),
    }
    return json.dumps(packed, separators=(",", ":"))


def unpack_payload(text: str) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Return the parts that were packed, as JSON; raises ValueError for anything else."""
    packed: _Packed = from_json(_Packed, json.loads(text))
    facts = objects_of(packed.facts)
    if len(facts) != len(packed.slots):
        raise ValueError(f"the facts of {len(facts)} workers for {len(packed.slots)} slots")
    return dict(zip(packed.slots, facts, strict=True)), objects_of(packed.inventory)


def read_payload(text: str) -> Payload:
    """Return what was packed; raises ValueError where it is something else."""
    facts, inventory = unpack_payload(text)
    return Payload(
        facts={slot: from_json(WorkerFacts, one) for slot, one in facts.items()},
        inventory=[from_json(SealedShard, one) for one in inventory],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """A payload as it travels."""

    slots: tuple[int, ...]
    facts: Mapping[str, Any]
    inventory: Mapping[str, Any]
