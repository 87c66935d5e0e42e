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
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SPEC = EngineSpec(nproc=2, steps=5, global_batch=4, kills=("1@3:backward",))
MUTANTS = list(call_mutants())


@proves(Kind.WRONG_SCRIPT, Promise.TOLD)
@pytest.mark.parametrize("mutant", sampled(MUTANTS), ids=map(str, MUTANTS))
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
