"""Every verb of Megatron-Core's adapter, at every width and stage, for every loss of up to two."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from operator import floordiv, mod

import pytest

from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.core.recovery_plan.placement import GridPlacement, Placement
from elaswave_plugin.errors import LayoutError
from elaswave_plugin.recovery.place import Place
from elaswave_plugin.recovery.worker import Worker
from tests.adapters import sabotaged_verbs as sabotaged
from tests.adapters import tiny_megatron as tiny
from tests.adapters.one_process import OneProcess
from tests.adapters.verbs import losses

WIDEST = 4


@pytest.fixture(scope="module")
def one() -> Iterator[OneProcess]:
    with pytest.MonkeyPatch.context() as patch:
        yield from tiny.in_one_process(patch)


@pytest.mark.parametrize("width", range(2, WIDEST + 1))
@pytest.mark.parametrize(
    "kind",
    [tiny.Kind(), tiny.Kind(bf16=True, keeps=True)],
    ids=str,
)
def test_state_survives_every_loss_and_every_return(
    one: OneProcess, kind: tiny.Kind, width: int
) -> None:
    tiny.start(one, width, kind).through_every_loss()


@pytest.mark.parametrize(
    ("kind", "width", "move"),
    [
        (tiny.Kind(stages=2), 2, "never"),
        (tiny.Kind(stages=2, bf16=True), 3, "always"),
        (tiny.Kind(stages=2, chunks=2, keeps=True), 2, "never"),
        (tiny.Kind(stages=2, bf16=True, keeps=True), 2, "always"),
    ],
    ids=str,
)
def test_state_survives_where_layers_and_workers_change_stage(
    one: OneProcess, kind: tiny.Kind, width: int, move: str
) -> None:
    change = tiny.start(one, width, kind, move_layers=move)
    everyone = change.ranks
    change.check()
    cuts, ends = {layout_of(change.placement).cuts}, []
    # Of six workers, pairs of one stage or of one replica.
    for lost in losses(everyone):
        staying = tuple(slot for slot in everyone if slot not in lost)
        stages, replicas = ({place(slot, width) for slot in lost} for place in (floordiv, mod))
        if width == 3 and len(stages) == len(replicas) == 2:
            continue
        try:
            change.after(staying)
        except LayoutError:
            ends.append(lost)
            continue
        cuts.add(layout_of(change.after(staying)).cuts)
        change.through(staying, everyone)
    assert (len(cuts) > 1) is (move == "always")
    # Interleaved stages cannot change: their last workers were these.
    assert ends == ([(0, 1), (2, 3)] if kind.chunks else [])


def layout_of(placement: Placement) -> ParallelLayout:
    assert isinstance(placement, GridPlacement)
    return placement.layout


@pytest.mark.parametrize(
    ("kind", "width", "sabotage"),
    [
        *((tiny.Kind(bf16=True), 3, sabotage) for sabotage in sabotaged.ALL),
        *((tiny.Kind(stages=2), 2, sabotage) for sabotage in sabotaged.WRITES),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_verb_that_is_wrong_is_seen(
    one: OneProcess,
    kind: tiny.Kind,
    width: int,
    sabotage: sabotaged.Sabotage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same change as passes above."""
    change = tiny.start(one, width, kind, move_layers="always" if kind.stages > 1 else "auto")
    everyone = change.ranks
    seen = sabotage(monkeypatch, one)
    with pytest.raises(sabotaged.RAISED, match=seen):
        change.through(everyone[:1] + everyone[2:], everyone)


def test_the_stand_in_of_a_worker_has_what_a_worker_has() -> None:
    """The real one needs an agent, so its class is read: what it assigns to itself and defines."""
    assigned = {
        node.attr
        for one in (Worker, Place)
        for node in ast.walk(ast.parse(inspect.getsource(one)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    mine = {one.name for one in fields(tiny.StandInWorker)} | {"remember"}
    assert mine <= assigned | {*dir(Worker)}
