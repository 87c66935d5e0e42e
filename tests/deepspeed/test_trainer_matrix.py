"""The Trainer's fault matrix, pairwise, in convoys: the whole of it is run by `make matrix`."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.convoys import Convoy, convoys, verdicts
from tests.deepspeed.test_negative_controls import OF_ONE
from tests.deepspeed.trainer_matrix import (
    MOMENTS,
    STAGES,
    TrainerSpec,
    case,
    cases,
    check,
    cover,
    launch,
)
from tests.fault_matrix import Runs
from tests.faults.harness import Outcome, Zygote, check_survived
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


@pytest.fixture(scope="module")
def run(runs: Runs) -> Callable[[TrainerSpec], Outcome]:
    """Launch a case; one that is resumed, from a checkpoint of the undisturbed run."""
    return lambda spec: launch(spec, runs)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("spec", convoys(cover(), lambda spec: spec, first=1), ids=name_of)
def test_a_loss_at_any_moment_equals_the_planned_departure(
    runs: Runs, convoy: Convoy, spec: TrainerSpec
) -> None:
    planned = runs.twin(convoy.planned)
    convoy.check(planned.trace(), lambda: check(convoy.run, runs))


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1 0 3", moment="1:data 2:save 3:snapshot")
def test_the_fault_of_a_convoy_that_breaks_it_is_named(runs: Runs) -> None:
    whole = replace(case("save", 1, False, False), kills=("1@1:data", "0@2:save", "3@3:snapshot"))
    broken = runs.run(replace(whole, sabotage=OF_ONE))
    check_survived(broken)
    planned = runs.twin(replace(Convoy(broken, ()).planned, sabotage=""))
    found = verdicts(broken, lambda one: one.check(planned.trace(), lambda: check(broken, runs)))
    assert found == ["passes", "passes", "fails"]
