"""No wrong call of `elaswave_plugin.deepspeed` is silent: it trains right, is told, or fails."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.call_mutants import CALLS, call_mutants
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, as_it_counted
from tests.faults.harness import check_survived
from tests.faults.mutant_ends import check_told
from tests.faults.mutants import Mutant
from tests.faults.replacements import TRAINS

SPEC = EngineSpec(nproc=2, steps=5, global_batch=4, kills=("1@3:backward",))
MUTANTS = list(call_mutants())
ON_ONE = "if torch.distributed.get_rank() == 0 else 0.0"


@pytest.mark.parametrize("mutant", MUTANTS, ids=map(str, MUTANTS))
def test_a_wrong_call_is_not_silent(
    run: Launch, twin: Twin, tmp_path: Path, mutant: Mutant
) -> None:
    script = tmp_path / "calls.py"
    script.write_text(mutant.script)
    trains = mutant.end == TRAINS
    done = run(replace(SPEC, script=str(script), respawn=0 if trains else 10))
    if trains:
        check_survived(done)
        assert done.trace() == twin(replace(as_it_counted(done), script=str(CALLS))).trace()
    else:
        check_told(done, mutant.end, mutant.words)


def test_work_of_one_worker_is_found_by_what_the_others_do(run: Launch, tmp_path: Path) -> None:
    """Nobody sees it at once; whoever waits alone is killed, and the line says for what."""
    text = next(one.script for one in MUTANTS if str(one) == "2 twice")
    script = tmp_path / "calls.py"
    script.write_text(text.replace("run(engine, evaluate)", f"run(engine, evaluate) {ON_ONE}"))
    done = run(replace(SPEC, script=str(script), kills=(), steps=2))
    said = [line for line in done.output.splitlines() if "in another operation than" in line]
    assert len(said) == 1 and "in evaluation of step 1 " in said[0], done.output[-3000:]
    assert "every worker has to make the same calls of the engine, run" in said[0]
    assert not done.orphans
