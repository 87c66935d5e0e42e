"""Random sequences of faults: some seeds of DeepSpeed's jobs."""

from pathlib import Path

import pytest

from tests.chaos.draws import draw
from tests.chaos.runs import Stage
from tests.chaos.verdict import judge, judge_by_twin
from tests.faults.harness import Zygote
from tests.faults.test_chaos import check_that_it_sees
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# In these nobody comes back in a step in which another one may, too: they have twins.
SEEDS = (("zero1", 0), ("zero2", 42), ("zero3", 62), ("deepspeed-pipeline", 0))


@proves(Kind.CHAOS, Promise.PLANNED)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seed"), sampled(SEEDS))
def test_a_seed_of_deepspeed(zygote: Zygote, tmp_path: Path, name: str, seed: int) -> None:
    stage = Stage(zygote, data=tmp_path, folder=tmp_path)
    scenario = draw(name, seed)
    played = stage.play(scenario)
    reference = stage.reference(scenario.spec)
    judge(played, reference)
    twin = stage.twin(played)
    assert twin is not None
    judge_by_twin(played, twin)
    # Negative control: with everyone there the sums are made in another order.
    with pytest.raises(AssertionError, match="not bit-equal"):
        judge_by_twin(played, reference)
    check_that_it_sees(played)
