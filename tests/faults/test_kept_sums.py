"""A loss costs what the lost worker had added up: the others go on from their own sums."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Each replica has four micro-batches, and passes are long enough for a loss to meet the last one.
SPEC = JobSpec(global_batch=16, options=("--num-layers=4",))
PHASES = ("backward", "reduce", "optimizer", "gather", "snapshot")
AT_THE_END = ("reduce", "optimizer", "gather")


def kept(run: Outcome) -> dict[tuple[int, int], list[int]]:
    """The micro-batches that were not run again, by step and worker."""
    return {(one["step"], one["slot"]): one["microbatches"] for one in run.events("sums_kept")}


def read(run: Outcome) -> list[tuple[int, int]]:
    """Return (view, micro-batch) of each batch that was read in step 2, kept ones left out."""
    passed = {(one["slot"], one["epoch"]): one["microbatches"] for one in run.events("sums_kept")}
    return [
        (line["epoch"], line["k"])
        for line in run.files.ledger
        if line["step"] == 2 and line["k"] not in passed.get((line["slot"], line["epoch"]), [])
    ]


@proves(Kind.KILL, Promise.EQUAL, victim="1")
@pytest.mark.parametrize("phase", sampled(AT_THE_END))
def test_behind_the_last_pass_nothing_is_run_twice(
    run: Launch, reference: Reference, phase: str
) -> None:
    spec = replace(SPEC, kills=(f"1@2:{phase}",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    assert kept(struck) == {(2, slot): [slot + 4 * n for n in range(4)] for slot in (0, 2, 3)}
    assert all(one["kept_s"] > 0 for one in struck.events("recovered"))
    # All of the batch, and once more what the lost worker had.
    assert sorted(k for _, k in read(struck)) == sorted([*range(16), 1, 5, 9, 13])


# The lost worker strikes in its first backward pass; the others complete the one that they are in.
@proves(Kind.KILL, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", sampled(range(4)))
def test_a_pass_that_is_met_is_completed(run: Launch, reference: Reference, slot: int) -> None:
    spec = replace(SPEC, kills=(f"{slot}@2:backward",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    others = [one for one in range(4) if one != slot]
    found = kept(struck)
    assert sorted(found) == [(2, one) for one in others]
    for one in others:
        whole = [one + 4 * n for n in range(4)]
        assert found[2, one] == whole[: len(found[2, one])]
    assert any(found.values())
    told = {one["why_not"] for one in struck.events("sums_kept")}
    assert told <= {None, "no micro-batch was complete"}
    # At most one forward pass a survivor is dropped.
    assert len(read(struck)) <= 16 + 4 + len(others)


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize(
    "kills",
    sampled(
        [
            (("1@2:reduce", "3@2:reduce"),),
            (("1@2:reduce", "2@2:replay"),),
            (("0@2:optimizer", "1@2:optimizer", "2@2:optimizer"),),
            (("0@2:optimizer", "1@3:reduce", "2@4:reduce"),),
        ]
    ),
    ids=" ".join,
)
def test_losses_in_turn_keep_what_is_left(
    run: Launch, reference: Reference, kills: tuple[str, ...]
) -> None:
    """Also where the second one strikes while what the first has taken is made again."""
    spec = replace(SPEC, kills=kills)
    struck = run(spec)
    check_equal(struck, reference(spec))
    assert any(kept(struck).values())


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="2:reduce")
@pytest.mark.parametrize(
    "options",
    sampled([("--no-overlap-grad-reduce",), ("--bf16",), ("--fp16",)]),
)
def test_other_ways_to_reduce(run: Launch, reference: Reference, options: str) -> None:
    spec = replace(SPEC, options=(*SPEC.options, options), kills=("2@2:reduce",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    assert len(kept(struck)[2, 0]) == 4


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="2:optimizer")
def test_scaled_gradients_are_made_again(run: Launch, reference: Reference) -> None:
    options = (*SPEC.options, "--calculate-per-token-loss")
    spec = replace(SPEC, options=options, kills=("2@2:optimizer",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    assert {one["why_not"] for one in struck.events("sums_kept")} == {
        "gradients were scaled by the number of tokens"
    }


SABOTAGE = {
    # What was kept is run as well, on top of it.
    "twice": (
        "from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums\n"
        "stand = KeptSums.take_stand\n"
        "def again(self):\n"
        "    found = stand(self)\n"
        "    for buffer in self._buffers:\n"
        "        buffer.grad_data *= 2.0 if found else 1.0\n"
        "    return found\n"
        "KeptSums.take_stand = again\n"
    ),
    "not at all": (
        "from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums\n"
        "stand = KeptSums.take_stand\n"
        "def lost(self):\n"
        "    found = stand(self)\n"
        "    for buffer in self._buffers:\n"
        "        buffer.grad_data *= 0.0 if found else 1.0\n"
        "    return found\n"
        "KeptSums.take_stand = lost\n"
    ),
    "own shard": (
        "from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums\n"
        "KeptSums.before_reduction = lambda self, bucket, shard: None\n"
    ),
}


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="2:optimizer")
@pytest.mark.parametrize("sabotage", SABOTAGE.values(), ids=SABOTAGE.keys())
def test_sums_that_count_twice_or_not_at_all_are_seen(
    run: Launch, reference: Reference, sabotage: str
) -> None:
    spec = replace(SPEC, kills=("2@2:optimizer",), sabotage=sabotage)
    broken, undisturbed = run(spec), reference(replace(spec, sabotage=""))
    check_survived(broken)
    assert broken.trace() != undisturbed.trace()
