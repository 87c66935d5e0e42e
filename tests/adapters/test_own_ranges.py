"""Ranges of flattened tensors as boxes: of a checkpoint each worker writes and reads its own."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import Range
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from elaswave_plugin.adapters.megatron.compat.own_ranges import (
    NAMES,
    boxes,
    load_state,
    sharded_state,
)
from elaswave_plugin.errors import ConfigurationError


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range_in_order_and_few(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    values = torch.arange(count).view(shape)
    found = [*boxes(shape, start, stop)]
    seen = []
    for offset, size in found:
        box = values[tuple(slice(a, a + b) for a, b in zip(offset, size, strict=True))]
        assert box.numel()
        seen += box.flatten().tolist()
    assert seen == [*range(start, stop)]
    assert len(found) <= 2 * len(shape) - 1


class Optimizer:
    """An optimizer as far as it is asked: one parameter, of which it has a range."""

    distributed_optimizer_instance_id = 0

    def __init__(self, param: torch.Tensor, start: int, stop: int) -> None:
        ranges = {"param": Range(start, stop)}
        self.gbuf_ranges = [{torch.float32: [{"param_map": {param: ranges}}]}]
        self.state = {
            name: 1000.0 * number + torch.arange(param.numel()).float()[start:stop]
            for number, name in enumerate(NAMES)
        }

    def _get_main_param_and_optimizer_states(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(3.0), **self.state}

    def _set_main_param_and_optimizer_states(self, param: torch.Tensor, tensors: Any) -> None:
        for name, tensor in tensors.items():
            self.state[name].copy_(tensor)


def described(param: torch.Tensor, *, of_layers: int, gated: bool) -> Any:
    """The parameter of TP rank 1 of 2, in the second of some layers that lie in one tensor."""
    lead = [(0, 1, of_layers)] if of_layers else []
    whole = ShardedTensor.from_rank_offsets(
        "weight",
        param,
        *lead,
        (len(lead), 1, 2),
        replica_id=(0, 0, 5),
        prepend_axis_num=len(lead),
    )
    return apply_swiglu_sharded_factory(whole, lead) if gated else whole


@pytest.mark.parametrize("of_layers", [0, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_ranges_of_all_workers_are_the_whole_tensor(of_layers: int, gated: bool) -> None:
    param = torch.empty(6, 5)
    model = {"weight": described(param, of_layers=of_layers, gated=gated)}
    one = model["weight"]
    native = one.build_fn("k", torch.arange(30).float().view(6, 5), 0, None) if gated else None
    shape = (native[0] if native else one).global_shape
    whole = torch.full(shape, -1.0)
    cuts = [0, 7, 8, 20, 30]
    for start, stop in itertools.pairwise(cuts):
        pieces = sharded_state(Optimizer(param, start, stop), model)[0]
        for key, piece in pieces.items():
            assert piece.replica_id == (0, 0, 0)
            if key.startswith("param "):
                assert piece.key == "optimizer.state.param.weight"
                whole[piece_slice(piece)] = piece.data
    # As upstream lays it out from the whole state.
    wanted = torch.full(shape, -1.0)
    for part in native or [replace(one, data=torch.arange(30).float().view(6, 5))]:
        at = part.global_slice()
        wanted[at] = part.data
    assert whole.equal(wanted)
    # Another cut reads what it has of it.
    optimizer = Optimizer(param, 3, 22)
    before = {name: tensor.clone() for name, tensor in optimizer.state.items()}
    asked = sharded_state(optimizer, model, is_loading=True)[0]
    read = {
        key: piece.data.copy_(whole[piece_slice(piece)] + 1000.0 * NAMES.index(key.split()[0]))
        for key, piece in asked.items()
    }
    for tensor in optimizer.state.values():
        tensor.zero_()
    load_state(optimizer, {0: read})
    assert all(optimizer.state[name].equal(before[name]) for name in NAMES)


def piece_slice(piece: ShardedTensor) -> tuple[slice, ...]:
    """The place of a box in the whole tensor."""
    return tuple(
        slice(a, a + b) for a, b in zip(piece.global_offset, piece.local_shape, strict=True)
    )


def test_pieces_that_are_no_rows_are_refused() -> None:
    param = torch.empty(4, 6)

    def columns(key: str, whole: torch.Tensor, replica: Any, flat: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, half, (1, n, 2), replica_id=replica)
            for n, half in enumerate(whole.chunk(2, dim=1))
        ]

    model = {"w": ShardedTensorFactory("w", param, columns, torch.cat, (0, 0, 0))}
    with pytest.raises(ConfigurationError, match="checkpoints have w in pieces that are no rows"):
        sharded_state(Optimizer(param, 0, 9), model)
