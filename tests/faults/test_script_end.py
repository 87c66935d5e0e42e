"""Scripts after their last step, with the plugin and without."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.conftest import Launch
from tests.faults.harness import ROOT, JobSpec, check_survived
from tests.proofs import Kind, Promise, proves

ENDS = str(ROOT / "tests" / "faults" / "ends_with.py")
DIST = "from torch import distributed as dist\n"
FORMS = {
    "world": "dist.destroy_process_group()",
    "by name": "from torch.distributed import destroy_process_group as d; d(dist.group.WORLD)",
    "where there is one": "if dist.is_initialized(): dist.destroy_process_group()",
    "after a barrier": "dist.barrier(); dist.destroy_process_group()",
    "after Megatron's": "parallel_state.destroy_model_parallel(); dist.destroy_process_group()",
    "only Megatron's": "parallel_state.destroy_model_parallel()",
    "after the last word": "print('rank', dist.get_rank()); dist.destroy_process_group()",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSpec(JobSpec):
    """A launch of the example with another end."""

    end: str
    elastic: bool
    script: str = ENDS
    nproc: int = 2
    steps: int = 3

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """The statement and the script come first."""
        words = super(EndSpec, self).arguments(data, directory)
        if not self.elastic:
            words = [word for word in words if not word.startswith("--elaswave")]
        return [DIST + self.end, JobSpec(kills=()).script, *words]


@proves(Kind.SCRIPT_END, Promise.ENDS_WELL)
@pytest.mark.parametrize("end", FORMS.values(), ids=FORMS.keys())
def test_a_script_without_the_plugin_may_destroy_its_groups(run: Launch, end: str) -> None:
    """Its launcher says once, for both workers, that nothing attached."""
    ended = run(EndSpec(end=end, elastic=False))
    assert ended.returncode == 0, ended.output[-3000:]
    assert not ended.orphans
    assert ended.output.count("trains without elaswave, and no loss will be survived") == 1
    assert ended.output.count("--elaswave is not among the script's arguments") == 1


@proves(Kind.KILL, Promise.ENDS_WELL, victim="1", moment="1:backward")
@pytest.mark.parametrize("end", FORMS.values(), ids=FORMS.keys())
def test_a_script_with_the_plugin_may_destroy_its_groups(run: Launch, end: str) -> None:
    ended = run(EndSpec(end=end, elastic=True, kills=("1@1:backward",)))
    check_survived(ended)
    assert "without elaswave" not in ended.output and "never attached" not in ended.output


# A worker is lost in what follows the last step, which only its collectives show.
AFTER = """
import os, signal, torch
if os.environ["RANK"] == {lost!r}:
    os.kill(os.getpid(), signal.SIGKILL)
both = torch.ones(1)
dist.all_reduce(both)
assert float(both) == dist.get_world_size() == 2, both
print(f"summed by {{int(both)}}\\n", end="", flush=True)  # in one write: two do so at once
"""


@proves(Kind.KILL_AT_END, Promise.ENDS_WELL)
@pytest.mark.parametrize("lost", ["0", "2"])
def test_a_loss_after_the_last_step_is_survived_until_the_script_ends(
    run: Launch, lost: str
) -> None:
    ended = run(EndSpec(end=AFTER.format(lost=lost), elastic=True, nproc=3, global_batch=6))
    assert ended.returncode == 0, ended.output[-3000:]
    assert not ended.orphans and len(ended.trace()) == 3
    assert ended.output.count("summed by 2") == 2
    assert "1 loss survived" in ended.output


@proves(Kind.RAISE, Promise.STOPS)
def test_an_error_after_the_last_step_ends_the_job_once(run: Launch) -> None:
    ended = run(EndSpec(end="raise ValueError('of the script')", elastic=True))
    assert ended.returncode == 1, ended.output[-3000:]
    assert ended.output.count("Traceback") == 1 and not ended.orphans
    assert "all workers failed alike" in ended.output
