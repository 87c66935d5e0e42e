"""Wide jobs, uneven deals, and what happens beside the optimizer's own state."""

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.proofs import Kind, Promise, proves


@proves(Kind.KILLS, Promise.EQUAL, victim="2 7", moment="1:backward 2:reduce")
def test_eight_workers_lose_two_and_go_on(run: Launch, reference: Reference) -> None:
    spec = JobSpec(nproc=8, steps=4, kills=("2@1:backward", "7@2:reduce"))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="1:forward")
def test_twelve_microbatches_over_five_survivors(run: Launch, reference: Reference) -> None:
    spec = JobSpec(nproc=6, steps=4, global_batch=12, kills=("0@1:forward",))
    survived = run(spec)
    check_equal(survived, reference(spec))
    dealt = [line["num_microbatches"] for line in survived.files.steps if line["step"] == 3]
    assert sorted(dealt) == [2, 2, 2, 3, 3]


@proves(Kind.KILL, Promise.EQUAL, victim="3", moment="2:backward")
def test_micro_batches_of_two_samples(run: Launch, reference: Reference) -> None:
    spec = JobSpec(
        global_batch=16, steps=4, options=("--micro-batch-size=2",), kills=("3@2:backward",)
    )
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="1:gather")
def test_one_survivor_without_a_copy_target(run: Launch, reference: Reference) -> None:
    spec = JobSpec(nproc=2, steps=5, kills=("0@1:gather",))
    check_equal(run(spec), reference(spec))
