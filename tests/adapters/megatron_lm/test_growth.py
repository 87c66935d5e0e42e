"""An unmodified pretrain_gpt.py goes on with a worker more than it was launched with."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_pieces import check_checkpoints
from tests.faults.growth import grow
from tests.faults.harness import Zygote, check_equal
from tests.faults.test_join import LATER
from tests.faults.test_stage_moves import stages_after
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.slow, pytest.mark.timeout(300)]


def saving(name: str) -> ScriptSpec:
    """A run that evaluates after 3, 6 and 9 steps, and saves after 4, 8 and 9."""
    save = ("--save", "{data}/" + name, "--save-interval", "4")
    return ScriptSpec(steps=9, dump="last", options=(*EVALUATION, "--log-interval", "4", *save))


@proves(Kind.JOIN, Promise.EQUAL)
def test_a_fifth_worker_joins_pretrain_gpt(
    script: Path, zygote: Zygote, data: Path, reference: Launch, tmp_path: Path
) -> None:
    """Evaluations, saves, the log's averages and the end are those of four workers."""
    spec = replace(saving("grown"), launcher=("--reserve=1",), awaits=((4, 1),))
    spec = replace(spec, script=str(script))
    grown = grow(spec, zygote=zygote, data=data, directory=tmp_path)
    undisturbed = reference(saving("whole"))
    check_equal(grown, undisturbed)
    assert printed(grown) == printed(undisturbed)
    assert [event["slot"] for event in grown.events("entered")] == [4]
    assert grown.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3, 4]
    check_checkpoints(data, "grown", "whole", 4, 8, 9)
    assert "Traceback" not in grown.output


@proves(Kind.JOIN, Promise.EQUAL)
def test_a_tp_group_joins_pretrain_gpt(
    script: Path, zygote: Zygote, data: Path, reference: Launch, tmp_path: Path
) -> None:
    """TP2 x PP2 x DP2, and a third replica of the first stage."""

    def in_stages(name: str) -> ScriptSpec:
        one = saving(name)
        return replace(one, nproc=8, options=(*one.options, *TP2_PP2))

    spec = replace(
        in_stages("widened"),
        script=str(script),
        launcher=("--reserve=2",),
        awaits=((2, 1), (5, 2)),
        sabotage=LATER.format(slot=9),
    )
    grown = grow(spec, joiners=2, zygote=zygote, data=data, directory=tmp_path)
    undisturbed = reference(in_stages("staged"))
    check_equal(grown, undisturbed)
    assert printed(grown) == printed(undisturbed)
    assert [event["slot"] for event in grown.events("entered")] == [8, 9]
    assert stages_after(grown) == [[[0, 1], [2, 3], [8, 9]], [[4, 5], [6, 7]]]
    check_checkpoints(data, "widened", "staged", 4, 8, 9)
    assert "Traceback" not in grown.output
