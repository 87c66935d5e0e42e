"""A recipe of Megatron-Bridge, as its users launch it and without a line of ours, survives losses.

Where the package is installed, with what it imports; `test_loop_shapes.py` has its loop's shape.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.faults import bridge_loop
from tests.faults.conftest import Launch
from tests.faults.harness import PRELOAD, JobSpec, check_equal
from tests.faults.test_fused_adam import STAND_INS
from tests.faults.test_own_loop import PP2, SEED, TP2
from tests.proofs import Kind, Promise, proves
from tests.session import Run, Zygotes

_RECIPE = str(Path(bridge_loop.__file__).with_name("bridge_recipe.py"))
_IMPORTED = ("megatron.bridge.training.pretrain", "megatron.bridge.models.gpt_provider")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec(JobSpec):
    """A job of the recipe."""

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its zygote has imported."""
        return (*PRELOAD, *_IMPORTED)


SPEC = RecipeSpec(script=_RECIPE, options=(SEED, "--eval-interval=2"))


@pytest.fixture(scope="module")
def launched(zygotes: Zygotes, run: Run) -> Launch:
    """Launch recipes; layers of Transformer Engine, which it imports, are stand-ins."""
    if not any((Path(one) / "megatron" / "bridge").is_dir() for one in sys.path):
        pytest.skip("megatron-bridge is not installed")
    zygote = zygotes(SPEC.preload, path=(STAND_INS / "with_te", STAND_INS))
    return lambda spec: run(spec, zygote)


@proves(Kind.KILLS, Promise.EQUAL, victim="1, 2", moment="2:backward, 4:optimizer")
@pytest.mark.parametrize("sizes", [(), TP2[:1], PP2], ids=" ".join)
def test_a_recipe_that_loses_two_workers(launched: Launch, sizes: tuple[str, ...]) -> None:
    spec = replace(SPEC, options=(*SPEC.options, *sizes))
    survived = launched(replace(spec, kills=("1@2:backward", "2@4:optimizer")))
    check_equal(survived, launched(spec))
