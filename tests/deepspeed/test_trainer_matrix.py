"""The Trainer's fault matrix, pairwise: the whole of it is run by `make matrix`."""

import itertools

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.deepspeed.trainer_matrix import MOMENTS, STAGES, TrainerSpec, cases, check, cover, launch
from tests.fault_matrix import Runs
from tests.faults.harness import Zygote
from tests.proofs import Kind, Promise, proves


@pytest.fixture(scope="module")
def runs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Launches, of which each undisturbed run and each twin is made once."""
    return Runs(zygote, tmp_path_factory.mktemp("trainer"))


def name_of(spec: TrainerSpec) -> str:
    """As in "zero3-lora-offload-backward"."""
    kinds = [name for name in ("lora", "offload") if getattr(spec, name)]
    return "-".join([f"zero{spec.stage}", *kinds, spec.moment.replace(" ", "-")])


def test_the_cover_has_every_pair() -> None:
    axes = ("moment", "stage", "lora", "offload")
    values = (MOMENTS, STAGES, (False, True), (False, True))
    assert set(cover()) <= set(cases())
    for (one, some), (other, others) in itertools.combinations(zip(axes, values, strict=True), 2):
        found = {(getattr(spec, one), getattr(spec, other)) for spec in cover()}
        # ZeRO 0 offloads nothing.
        impossible = {(0, True)} if (one, other) == ("stage", "offload") else set()
        assert found == set(itertools.product(some, others)) - impossible


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("spec", cover(), ids=name_of)
def test_a_loss_at_any_moment_equals_the_planned_departure(runs: Runs, spec: TrainerSpec) -> None:
    check(launch(spec, runs), runs)
