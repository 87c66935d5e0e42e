"""The answers of parallel_state to a script of Megatron-Core while its worker has no place."""

from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

import pytest
import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel import schedules

from elaswave_plugin.adapters.megatron.state.free_worker import answer_for
from elaswave_plugin.core.layout.group_rules import coordinates_of, members_of, rule_of
from tests.core.test_return_orders import LAUNCH, LEVEL, views_of


class Group(NamedTuple):
    """A process group as parallel_state asks it."""

    members: tuple[int, ...]
    slot: int

    def size(self) -> int:
        """Its members."""
        return len(self.members)

    def rank(self) -> int:
        """The place of the own worker."""
        return self.members.index(self.slot)


RULES = {
    "_TENSOR_MODEL_PARALLEL_GROUP": rule_of((0, 1), LAUNCH),
    "_PIPELINE_MODEL_PARALLEL_GROUP": rule_of((0, 4), LAUNCH),
}
SIZES = ModelParallelConfig(
    tensor_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Groups without a world, and what is told of them until the end of the test."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank())
    yield monkeypatch
    answer_for(SIZES, placed=True)


@pytest.mark.parametrize("count", [2, 3])
def test_a_script_reads_the_job_in_every_view(told: pytest.MonkeyPatch, count: int) -> None:
    """In whatever view it asks, it may keep the schedule: it is that of the launch."""
    seen, free = set(), 0
    for order in permutations(range(8), count):
        for view in views_of(order, LEVEL):
            for slot in view.layout.workers:
                place = coordinates_of(view.layout).get(slot)
                groups = {one: members_of(rule, view.layout, slot) for one, rule in RULES.items()}
                key = slot, place, *groups.values()
                if key in seen:
                    continue
                seen.add(key)
                for name, members in groups.items():
                    told.setattr(parallel_state, name, Group(members, slot))
                answer_for(SIZES, placed=place is not None)
                free += place is None
                assert (
                    schedules.get_forward_backward_func()
                    is schedules.forward_backward_pipelining_without_interleaving
                ), (order, slot)
                assert parallel_state.get_tensor_model_parallel_world_size() == 2
                stage = None if place is None else place.stage
                assert parallel_state.is_pipeline_first_stage() == (stage == 0)
                assert parallel_state.is_pipeline_last_stage() == (stage == 1)
    assert free > 0
