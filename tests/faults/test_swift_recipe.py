"""A fine-tuning by ms-swift, as its users launch it and without a line of ours, survives losses.

Where the package is installed, with what it imports; `test_loop_shapes.py` has its loop's shape.
Passed with ms-swift 4.6.0, mcore-bridge 1.6.5, modelscope 1.40.2, triton, and an empty distribution
of the name transformer-engine in whose place the stand-ins are.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults import swift_recipe
from tests.faults.conftest import Launch
from tests.faults.harness import PRELOAD, JobSpec, check_equal
from tests.faults.test_fused_adam import STAND_INS
from tests.faults.test_own_loop import SEED
from tests.proofs import Kind, Promise, proves
from tests.session import Run, Zygotes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec(JobSpec):
    """A job of the recipe."""

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its zygote has imported."""
        return (*PRELOAD, "megatron.core", "swift.megatron")


SPEC = RecipeSpec(script=swift_recipe.__file__, options=(SEED,))


@pytest.fixture(scope="module")
def launched(zygotes: Zygotes, run: Run) -> Launch:
    """Launch recipes; layers of Transformer Engine, which it imports, are stand-ins."""
    if find_spec("swift") is None:
        pytest.skip("ms-swift is not installed")
    zygote = zygotes(SPEC.preload, path=(STAND_INS / "with_te", STAND_INS))
    return lambda spec: run(spec, zygote)


@proves(Kind.KILLS, Promise.EQUAL, victim="1, 2", moment="2:backward, 4:optimizer")
def test_a_fine_tuning_that_loses_two_workers(launched: Launch, tmp_path: Path) -> None:
    swift_recipe.write(tmp_path)
    spec = replace(SPEC, options=(*SPEC.options, f"--folder={tmp_path}"))
    survived = launched(replace(spec, kills=("1@2:backward", "2@4:optimizer")))
    check_equal(survived, launched(spec))
