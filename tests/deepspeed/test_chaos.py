"""Random sequences of faults: some seeds of DeepSpeed's jobs."""

from pathlib import Path

import pytest

from tests.chaos.draws import draw
from tests.chaos.runs import Stage
from tests.chaos.verdict import judge
from tests.faults.harness import Zygote
from tests.faults.test_chaos import check_that_it_sees
from tests.tiers import sampled

SEEDS = (
    *(("zero1", 0), ("zero1", 1), ("zero2", 1), ("zero3", 1)),
    *(("deepspeed-pipeline", 0), ("deepspeed-pipeline", 1)),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "seed"), sampled(SEEDS, keep=(0,)))
def test_a_seed_of_deepspeed(zygote: Zygote, tmp_path: Path, name: str, seed: int) -> None:
    stage = Stage(zygote, data=tmp_path, folder=tmp_path)
    scenario = draw(name, seed)
    played = stage.play(scenario)
    judge(played, stage.reference(scenario.spec))
    check_that_it_sees(played)
