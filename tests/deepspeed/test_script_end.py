"""DeepSpeed scripts after their last step."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import EXAMPLE, EngineSpec
from tests.faults.harness import check_survived
from tests.faults.test_script_end import DIST, ENDS
from tests.proofs import Kind, Promise, proves

FORMS = {
    "of torch": "dist.destroy_process_group()",
    "of DeepSpeed": "deepspeed.comm.destroy_process_group()",
    "by name": "destroyed_by_name()",
    "after a barrier": "dist.barrier(); dist.destroy_process_group(dist.group.WORLD)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSpec(EngineSpec):
    """A launch of the example with another end."""

    end: str
    script: str = ENDS
    nproc: int = 4
    steps: int = 3

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """The statement and the script come first."""
        words = super(EndSpec, self).arguments(data, directory)
        return [DIST + self.end, str(EXAMPLE), *words]


@proves(Kind.KILL, Promise.ENDS_WELL, victim="1", moment="1:backward")
@pytest.mark.parametrize("end", FORMS.values(), ids=FORMS.keys())
def test_a_script_may_destroy_its_groups(run: Launch, end: str) -> None:
    check_survived(run(EndSpec(end=end, kills=("1@1:backward",))))
