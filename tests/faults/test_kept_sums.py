"""A loss costs what the lost worker had added up: the others go on from their own sums."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Each replica has four micro-batches, and passes are long enough for a loss to meet the last one.
SPEC = JobSpec(global_batch=16, options=("--num-layers=4",))
PHASES = ("backward", "reduce", "optimizer", "gather", "snapshot")
AT_THE_END = ("reduce", "optimizer", "gather")


def kept(run: Outcome) -> dict[tuple[int, int], list[int]]:
    """The micro-batches that were not run again, by step and worker."""
    return {(one["step"], one["slot"]): one["microbatches"] for one in run.events("sums_kept")}


def read(run: Outcome) -> list[int]:
    """The micro-batches that were read in step 2, in all attempts, kept ones left out."""
    return [one["k"] for one in run.files.ledger if one["step"] == 2 and not one.get("kept")]


def check_only_missing(run: Outcome, *, lost: range, in_flight: int) -> None:
    """The others go on from all of their sums, or from what they have where they are met before.

    ``lost``: micro-batches of the lost worker's replica; ``in_flight``: passes that a replica may
    be met in.
    """
    found, count = kept(run), run.spec.global_batch
    assert len(found) == run.spec.nproc - 1
    dropped = set[int]()
    for (step, slot), has in found.items():
        whole = list(range(slot % lost.step, count, lost.step))
        assert step == 2 and has == whole[: len(has)] and (in_flight or len(has) == len(whole))
        dropped.update(whole[len(has) :])
    again = Counter(read(run)) - Counter(range(count))
    assert max(again.values()) == 1
    assert set(lost) <= again.keys() <= dropped.union(lost)
    assert len(again.keys() - {*lost}) <= in_flight * (lost.step - 1)
    for one in run.events("recovered"):
        assert (one["kept_s"] > 0) == bool(found[2, one["slot"]])


@proves(Kind.KILL, Promise.EQUAL, victim="1")
@pytest.mark.parametrize("phase", sampled(AT_THE_END))
def test_behind_the_last_pass_nothing_is_run_twice(
    run: Launch, reference: Reference, phase: str
) -> None:
    spec = replace(SPEC, kills=(f"1@2:{phase}",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    check_only_missing(struck, lost=range(1, 16, 4), in_flight=int(phase == "reduce"))


# In its third backward pass: in the first one, none of the others may have begun theirs.
LATE = "from benchmarks.late_strike import strike_late; strike_late(3)"


# The lost worker strikes in a backward pass; the others complete the one that they are in.
@proves(Kind.KILL, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", sampled(range(4)))
def test_a_pass_that_is_met_is_completed(run: Launch, reference: Reference, slot: int) -> None:
    spec = replace(SPEC, kills=(f"{slot}@2:backward",), sabotage=LATE)
    struck = run(spec)
    check_equal(struck, reference(replace(spec, sabotage="")))
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
    check_only_missing(struck, lost=range(2, 16, 4), in_flight=1)


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="2:optimizer")
def test_scaled_gradients_are_made_again(run: Launch, reference: Reference) -> None:
    options = (*SPEC.options, "--calculate-per-token-loss")
    spec = replace(SPEC, options=options, kills=("2@2:optimizer",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    assert {one["why_not"] for one in struck.events("sums_kept")} == {
        "gradients were scaled by the number of tokens"
    }


# Stages with one layer each, of which none moves.
STAGES = replace(PP2_DP2, global_batch=8)
TP_GROUPS = replace(TP2_PP2_DP2, options=TP2_PP2_DP2.options[:3])


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("slot", "phase"), sampled([(slot, phase) for slot in range(4) for phase in AT_THE_END])
)
def test_stages_run_again_what_the_lost_worker_had(
    run: Launch, reference: Reference, slot: int, phase: str
) -> None:
    """Behind the last pass; also the other stage runs that again, and does not add it up."""
    spec = replace(STAGES, kills=(f"{slot}@2:{phase}",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    in_flight = 2 if phase == "reduce" else 0
    check_only_missing(struck, lost=range(slot % 2, 8, 2), in_flight=in_flight)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("slot", "phase"),
    sampled([(slot, phase) for slot in range(4) for phase in ("forward", "backward")]),
)
def test_stages_that_are_met_amid_their_passes(
    run: Launch, reference: Reference, slot: int, phase: str
) -> None:
    spec = replace(STAGES, kills=(f"{slot}@2:{phase}",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    told = {one["why_not"] for one in struck.events("sums_kept")}
    assert told <= {None, "no micro-batch was complete"}
    for (_, one), found in kept(struck).items():
        assert found == list(range(one % 2, 8, 2))[: len(found)]


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize(
    ("spec", "kills"),
    sampled(
        [
            (STAGES, ("1@2:reduce", "3@2:replay")),
            (STAGES, ("1@2:gather", "2@4:optimizer")),
            (replace(STAGES, nproc=8, global_batch=16), ("1@2:reduce", "6@2:replay")),
            (TP_GROUPS, ("2@2:optimizer", "7@2:replay")),
        ]
    ),
    ids=str,
)
def test_stages_that_lose_workers_in_turn(
    run: Launch, reference: Reference, spec: JobSpec, kills: tuple[str, ...]
) -> None:
    struck = run(replace(spec, kills=kills))
    check_equal(struck, reference(spec))
    assert any(kept(struck).values())


@proves(Kind.KILLS, Promise.EQUAL)
def test_all_is_run_again_where_no_micro_batch_is_whole_at_each_stage(
    run: Launch, reference: Reference
) -> None:
    """Each stage has lost another replica, so that what is kept would save nothing."""
    spec = replace(STAGES, kills=("0@2:optimizer", "3@2:optimizer"))
    struck = run(spec)
    check_equal(struck, reference(spec))
    last = [one for one in struck.events("sums_kept") if one["slot"] in (1, 2)][-2:]
    assert {one["why_not"] for one in last} == {"all of the step takes no longer"}


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("slot", "phase"), sampled([(slot, phase) for slot in (1, 6) for phase in AT_THE_END])
)
def test_tp_groups_keep_what_they_have_behind_the_last_pass(
    run: Launch, reference: Reference, slot: int, phase: str
) -> None:
    """Sequence-parallel norms and the shared embedding are added up behind the reduction, too."""
    spec = replace(TP_GROUPS, kills=(f"{slot}@2:{phase}",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    found, partner = kept(struck), slot ^ 1
    assert not found.get((2, partner))
    # One that reduces later may be met in a pass, whose sums over TP are ended; the last stage of
    # the lost one's replica was done before it.
    sure = 6 if phase != "reduce" else 2 if slot == 1 else 0
    assert sum(len(one) == 4 for one in found.values()) >= sure


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:optimizer")
def test_of_layers_that_move_nothing_is_kept(run: Launch, reference: Reference) -> None:
    spec = replace(STAGES, options=(*STAGES.options, "--num-layers=4"), kills=("1@2:optimizer",))
    struck = run(spec)
    check_equal(struck, reference(spec))
    assert {one["layout_after"]["cuts"][1] for one in struck.events("recovered")} == {1}
    assert {one["why_not"] for one in struck.events("sums_kept")} == {
        "this worker has had another part of the model since"
    }
    assert sorted(read(struck)) == sorted([*range(8), *range(8)])


SABOTAGE = {
    # What was kept is run as well, on top of it.
    "twice": (
        "from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums\n"
        "stand = KeptSums.take_stand\n"
        "def again(self, *why_not):\n"
        "    found = stand(self, *why_not)\n"
        "    for buffer in self._buffers:\n"
        "        buffer.grad_data *= 2.0 if found else 1.0\n"
        "    return found\n"
        "KeptSums.take_stand = again\n"
    ),
    "not at all": (
        "from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums\n"
        "stand = KeptSums.take_stand\n"
        "def lost(self, *why_not):\n"
        "    found = stand(self, *why_not)\n"
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


# What is run again beside the sums is added to them.
ASIDE_TWICE = (
    "from elaswave_plugin.adapters.megatron.sums.accumulators import ASIDE, GradAccumulators\n"
    "select = GradAccumulators.select\n"
    "GradAccumulators.select = lambda self, one: one == ASIDE or select(self, one)\n"
)
# Gradients are not copied before they are added up over stages.
NO_COPIES = (
    "from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums\n"
    "KeptSums.before_finalize = lambda self: None\n"
)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="2:optimizer")
@pytest.mark.parametrize(
    "sabotage",
    [SABOTAGE["twice"], SABOTAGE["not at all"], SABOTAGE["own shard"], ASIDE_TWICE, NO_COPIES],
    ids=["twice", "not at all", "own shard", "aside twice", "no copies"],
)
def test_sums_of_stages_that_are_wrong_are_seen(
    run: Launch, reference: Reference, sabotage: str
) -> None:
    spec = replace(STAGES, kills=("1@2:optimizer",), sabotage=sabotage)
    broken, undisturbed = run(spec), reference(replace(spec, sabotage=""))
    check_survived(broken)
    assert broken.trace() != undisturbed.trace()
