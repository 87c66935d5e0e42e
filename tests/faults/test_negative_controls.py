"""The comparison can fail: what breaks equality is seen, and sabotage is caught."""

from dataclasses import replace

import pytest

from tests.convoys import verdicts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.faults.hybrid_matrix import TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves

SABOTAGE = {
    # A running stream instead of keyed draws.
    "running draws": (
        "from elaswave_plugin.adapters.megatron.compat import rng; "
        "rng.set_key = lambda *k, **size: None"
    ),
    # Megatron's own norm: a sum over pieces whose value depends on the cut.
    "native norm": (
        "from elaswave_plugin.adapters import megatron; "
        "from elaswave_plugin.adapters.megatron.compat import patches; "
        "megatron.elastic_patches = lambda exact, saves: "
        "patches.elastic_patches(exact=False, saves=saves)"
    ),
    # Contributions added in the order of workers instead of the canonical order.
    "order of workers": (
        "from elaswave_plugin.core.step import dataflow; fold = dataflow.fold_order; "
        "dataflow.fold_order = lambda *a, **k: fold(*a, **k)[::-1]"
    ),
}


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="2:backward")
@pytest.mark.parametrize("sabotage", SABOTAGE.values(), ids=SABOTAGE.keys())
def test_breaking_one_part_of_exactness_is_seen(
    run: Launch, reference: Reference, sabotage: str
) -> None:
    # Else the job's own first step finds two of them before anybody is lost (test_first_step.py).
    off = ("--elaswave-rehearse-first-step=off",)
    spec = JobSpec(kills=("2@2:backward",), sabotage=sabotage, options=off)
    broken, undisturbed = run(spec), reference(replace(spec, sabotage=""))
    check_survived(broken)
    assert broken.trace() != undisturbed.trace()


# A running stream from the view on that a loss leaves with so many workers.
WITH_FEW = """
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.recovery.worker import Worker
install = Worker.install_view
def install_and_forget(self, commit):
    install(self, commit)
    if len(self.view.ranks) == {left}:
        rng.set_key = lambda *k, **size: None
Worker.install_view = install_and_forget
"""


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.parametrize(
    ("spec", "left", "wanted"),
    [
        (
            JobSpec(kills=("1@2:forward", "0@3:data", "3@4:gather")),
            2,
            ["passes", "fails", "not run"],
        ),
        (replace(TP2_PP2_DP2, kills=("1@3:forward", "6@4:reduce")), 6, ["passes", "fails"]),
    ],
    ids=["dp4", "tp2 pp2 dp2"],
)
def test_the_fault_of_a_convoy_that_breaks_it_is_named(
    run: Launch, reference: Reference, spec: JobSpec, left: int, wanted: list[str]
) -> None:
    broken, undisturbed = run(replace(spec, sabotage=WITH_FEW.format(left=left))), reference(spec)
    check_survived(broken)
    found = verdicts(
        broken,
        lambda one: one.check(undisturbed.trace(), lambda: check_equal(broken, undisturbed)),
    )
    assert found == wanted


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="99:backward")
def test_a_missing_kill_is_seen(run: Launch, reference: Reference) -> None:
    late = run(JobSpec(kills=("2@99:backward",)))
    with pytest.raises(AssertionError, match="'fired': False"):
        check_equal(late, reference(JobSpec()))


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_another_seed_is_seen(run: Launch, reference: Reference) -> None:
    other = run(JobSpec(options=("--seed=4321",)))
    assert other.trace() != reference(JobSpec()).trace()
