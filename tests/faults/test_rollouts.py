"""A loop whose rollouts are in memory survives losses: up to the struck step with equal bits."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.config import STEP_PHASES, parse_kill
from elaswave_plugin.observer.observer import audit_samples
from tests.faults import rl_loop
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import Outcome, check_equal, check_survived, check_went_on
from tests.faults.own_scripts import Change
from tests.faults.rl_loop import RolloutSpec
from tests.faults.test_join import entered
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SEED = "--elaswave-seed=1234"
SPEC = RolloutSpec(steps=6, options=(SEED,))
TP2 = replace(SPEC, replicas=2, options=(SEED, "--tensor-model-parallel-size=2"))
PP2 = replace(SPEC, replicas=2, options=(SEED, "--pipeline-model-parallel-size=2"))
# In the first mini-batch of a rollout and in the second, and while log-probabilities are computed.
KILLS = [
    "1@2:evaluation",
    *(f"{1 - number % 2}@{2 + number % 2}:{phase}" for number, phase in enumerate(STEP_PHASES)),
]
OF_SLOT_1 = [kill for kill in KILLS if kill.startswith("1@")]
PRECISIONS = [(), ("--bf16",)]


def ratios_of(run: Outcome, steps: range) -> dict[tuple[int, int], set[str]]:
    """Read what each caller was told of its samples, by replica and step."""
    told: dict[tuple[int, int], set[str]] = {}
    for replica, step, ratios in re.findall(r"ratios (\d) (\d) (.+)", run.output):
        if int(step) in steps:
            told.setdefault((int(replica), int(step)), set()).add(ratios)
    return told


def check_left_out(run: Outcome, planned: Outcome, whole: Outcome, *, step: int) -> None:
    """Check that before a step all is as in the undisturbed run, and then as planned."""
    check_went_on(run)
    check_went_on(planned)
    before = range(step)
    assert run.trace() == planned.trace()
    assert [run.trace()[one] for one in before] == [whole.trace()[one] for one in before]
    assert run.trace()[step] != whole.trace()[step]
    told, wanted = ratios_of(run, range(6)), ratios_of(whole, before)
    assert told.items() >= ratios_of(planned, range(step, 6)).items()
    assert {**wanted, **told} == {**told, **wanted}
    lost, repeated = audit_samples(run.files, batches=run.spec.batches)
    assert (lost, repeated) == (sum(run.spec.batches[step:]) // run.spec.replicas, 0)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("kill", sampled(KILLS))
def test_the_struck_step_is_whole_and_those_after_it_are_the_survivors(
    run: Launch, reference: Reference, tmp_path: Path, kill: str
) -> None:
    spec = replace(SPEC, script=rl_loop.write(tmp_path, "get_next"))
    fault = parse_kill(kill)
    step = fault.step + (fault.phase != "evaluation")
    planned = run(replace(spec, changes=(f"{fault.slot}@{step}",)))
    survived = run(replace(spec, kills=(kill,)))
    check_left_out(survived, planned, reference(spec), step=step)
    assert survived.output.count(f"the script of replica {fault.slot} had in memory are lost") == 1
    assert f"from step {step} on gradients are those of the other replicas" in survived.output


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="3:backward")
@pytest.mark.parametrize("reads", sampled([one for one in rl_loop.READERS if one != "get_next"]))
def test_other_ways_to_have_batches_in_memory(
    run: Launch, reference: Reference, tmp_path: Path, reads: str
) -> None:
    """Their numbers are those of the same batches, however these are read."""
    spec = replace(SPEC, script=rl_loop.write(tmp_path, reads))
    known = replace(spec, script=rl_loop.write(tmp_path, "get_next"))
    planned = run(replace(known, changes=("2@4",)))
    check_left_out(run(replace(spec, kills=("2@3:backward",))), planned, reference(known), step=4)


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="3:backward")
def test_batches_of_the_scripts_own_classes(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    spec = replace(SPEC, script=rl_loop.write(tmp_path, "get_next", *rl_loop.CLASSES))
    known = replace(spec, script=rl_loop.write(tmp_path, "get_next"))
    planned = run(replace(known, changes=("2@4",)))
    check_left_out(run(replace(spec, kills=("2@3:backward",))), planned, reference(known), step=4)


@proves(Kind.KILL, Promise.PLANNED, victim="1")
@pytest.mark.parametrize("kill", sampled(["1@2:evaluation", "1@2:backward"]))
def test_a_second_model_without_an_optimizer(
    run: Launch, reference: Reference, tmp_path: Path, kill: str
) -> None:
    spec = replace(SPEC, script=rl_loop.write(tmp_path, "get_next", *rl_loop.REFERENCE))
    step = 2 + ("evaluation" not in kill)
    planned = run(replace(spec, changes=(f"1@{step}",)))
    check_left_out(run(replace(spec, kills=(kill,))), planned, reference(spec), step=step)


@proves(Kind.KILL, Promise.PLANNED, victim="3", moment="3:reduce")
def test_losses_by_token(run: Launch, reference: Reference, tmp_path: Path) -> None:
    script = rl_loop.write(tmp_path, "get_next", *rl_loop.PER_TOKEN)
    spec = replace(SPEC, script=script, options=(SEED, "--calculate-per-token-loss"))
    planned = run(replace(spec, changes=("3@4",)))
    check_left_out(run(replace(spec, kills=("3@3:reduce",))), planned, reference(spec), step=4)


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="2:backward")
def test_in_fast_mode(run: Launch, tmp_path: Path) -> None:
    spec = replace(SPEC, script=rl_loop.write(tmp_path, "get_next"), consistency="fast")
    check_went_on(run(replace(spec, kills=("1@2:backward",))))


@proves(Kind.KILLS, Promise.PLANNED, victim="1, 2", moment="2:backward, 2:replay")
def test_the_worker_with_the_copy_is_lost_as_well(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """With two copies the step is whole."""
    spec = replace(SPEC, script=rl_loop.write(tmp_path, "get_next"))
    copies = (*spec.options, "--elaswave-snapshot-copies=2")
    survived = run(replace(spec, options=copies, kills=("1@2:backward", "2@2:replay")))
    check_went_on(survived)
    assert survived.trace() == run(replace(spec, changes=("1@3", "2@3"))).trace()


@proves(Kind.KILL, Promise.EQUAL, victim="1")
@pytest.mark.parametrize("kill", sampled(["1@2:evaluation", "1@2:backward", "0@3:data"]))
def test_a_replica_of_which_a_worker_is_left_goes_on(
    run: Launch, reference: Reference, tmp_path: Path, kill: str
) -> None:
    """Its script has the batches, and is told of them by those that run them."""
    spec = replace(TP2, script=rl_loop.write(tmp_path, "get_next"))
    survived, whole = run(replace(spec, kills=(kill,))), reference(spec)
    check_equal(survived, whole)
    assert ratios_of(survived, range(6)) == ratios_of(whole, range(6))


@proves(Kind.KILL, Promise.EQUAL, victim="1")
@pytest.mark.parametrize(
    ("kill", "precision"), sampled([(kill, one) for kill in OF_SLOT_1 for one in PRECISIONS])
)
def test_a_loop_that_offloads_between_its_phases(
    run: Launch, reference: Reference, tmp_path: Path, kill: str, precision: tuple[str, ...]
) -> None:
    spec = replace(TP2, options=(*TP2.options, *precision))
    whole = reference(replace(spec, script=rl_loop.write(tmp_path, "get_next")))
    script = rl_loop.write(tmp_path, "get_next", *rl_loop.OFFLOAD)
    survived = run(replace(spec, script=script, kills=(kill,)))
    check_equal(survived, whole)
    freed = re.findall(r"freed (\d+) of (\d+)\n", survived.output)
    assert len(freed) == 11
    assert all(one == of for one, of in freed)
    assert ratios_of(survived, range(6)) == ratios_of(whole, range(6))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="in a rollout")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("meeting", [(), (rl_loop.MEETING,)], ids=["weights", "nothing"])
def test_a_worker_is_lost_in_a_rollout_while_all_is_offloaded(
    run: Launch,
    reference: Reference,
    tmp_path: Path,
    meeting: tuple[Change, ...],
    precision: tuple[str, ...],
) -> None:
    """The others learn of it when they have their weights, and nothing else, or not even these."""
    spec = replace(TP2, options=(*TP2.options, *precision))
    whole = reference(replace(spec, script=rl_loop.write(tmp_path, "get_next")))
    changes = (*rl_loop.OFFLOAD, *meeting, rl_loop.LOST_IN_ROLLOUT)
    survived = run(replace(spec, script=rl_loop.write(tmp_path, "get_next", *changes)))
    lost = survived.events("worker_exited")[0]
    assert (lost["slot"], lost["status"]) == (1, "killed by SIGKILL"), lost
    assert survived.events("recovered")[0]["restored_step"] == 2
    check_equal(survived, whole)
    assert ratios_of(survived, range(6)) == ratios_of(whole, range(6))


# A large shard is sealed beside what follows its step; here it is all the same, and takes long.
SLOW_SEALS = """
import time
from elaswave_plugin.recovery import state_keeper
from elaswave_plugin.snapshot.host_copies import HostCopies
state_keeper.BESIDE_BYTES, copy = 0, HostCopies._copy
def slowly(self, *args):
    time.sleep(0.1)
    yield from copy(self, *args)
HostCopies._copy = slowly
"""


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:backward")
def test_a_step_is_sealed_before_its_weights_are_offloaded(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    spec = replace(SPEC, script=rl_loop.write(tmp_path, "get_next"))
    script = rl_loop.write(tmp_path, "get_next", *rl_loop.OFFLOAD, rl_loop.LONG_ROLLOUTS)
    planned = run(replace(spec, changes=("1@3",)))
    survived = run(replace(spec, script=script, kills=("1@2:backward",), sabotage=SLOW_SEALS))
    check_left_out(survived, planned, reference(spec), step=3)


_LOSES = "                    data_iterator=[reader],\n"
_COUNT = "            num_microbatches=count,\n"
_OLD = '            samples["old"] = '
BAD: dict[str, tuple[Change, tuple[str, ...], str]] = {
    "batches that are no plain values": (
        (_OLD, '            samples["advantage"] = [object()] * 20\n' + _OLD),
        (),
        "a batch of data_iterator['advantage'][0] is of the class builtins.object",
    ),
    "more than is set": (
        (_OLD, '            samples["advantage"] = [torch.ones(1 << 18)] * 20\n' + _OLD),
        ("--elaswave-input-seal-mib=1",),
        "MiB on rank",
    ),
    "another number on each worker": (
        (_COUNT, "            num_microbatches=count - (replica == 1),\n"),
        (),
        "num_microbatches is 1 on rank 1 and 2 on rank 0",
    ),
    "reading behind the model": (
        (
            "    def loss_of(losses):\n",
            "    def loss_of(losses):\n        read(reader, ['tokens'])\n",
        ),
        (),
        "forward_step reads its data_iterator by get_next(['tokens'],) once more",
    ),
}


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize("what", BAD)
def test_what_it_cannot_do_is_one_sentence(run: Launch, tmp_path: Path, what: str) -> None:
    change, options, sentence = BAD[what]
    script = rl_loop.write(tmp_path, "get_next", change)
    spec = replace(SPEC, nproc=2, replicas=2, steps=3, script=script)
    refused = run(replace(spec, options=(SEED, *options)))
    assert (refused.returncode, refused.orphans) == (2, ())
    assert refused.output.count(sentence) >= 1
    assert "Traceback" not in refused.output


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("kill", sampled(["0@2:evaluation", "1@2:backward", "2@3:forward"]))
def test_a_stage_that_loses_a_replica(
    run: Launch, reference: Reference, tmp_path: Path, kill: str
) -> None:
    """The last stage alone has what the log-probabilities were; the struck step is whole."""
    spec = replace(PP2, script=rl_loop.write(tmp_path, "get_next", *rl_loop.STAGES))
    fault = parse_kill(kill)
    step = fault.step + (fault.phase != "evaluation")
    survived, whole = run(replace(spec, kills=(kill,))), reference(spec)
    planned = run(replace(spec, changes=(f"{fault.slot}@{step}",)))
    check_left_out(survived, planned, whole, step=step)


@proves(Kind.KILLS, Promise.PLANNED, victim="2, 3", moment="2:backward")
def test_a_whole_replica_of_a_tensor_parallel_job_is_lost(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """As with the node that it is on."""
    spec = replace(TP2, script=rl_loop.write(tmp_path, "get_next"))
    planned = run(replace(spec, changes=("2@3", "3@3")))
    survived = run(replace(spec, kills=("2@2:backward", "3@2:backward")))
    check_left_out(survived, planned, reference(spec), step=3)


def returned(run: Launch, spec: RolloutSpec, kill: str) -> Outcome:
    """Run a job whose lost worker comes back behind the struck step."""
    fault = parse_kill(kill)
    change = f"+{fault.slot}@{fault.step + 1}"
    survived = run(replace(spec, kills=(kill,), changes=(change,), respawn=1))
    assert entered(survived) == [(fault.slot, 1)]
    return survived


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("kill", sampled(["1@0:backward", *KILLS]))
def test_a_worker_comes_back_to_a_replica_of_which_another_is_left(
    run: Launch, reference: Reference, tmp_path: Path, kill: str
) -> None:
    """That one tells it what the evaluations of their replica returned."""
    spec = replace(TP2, script=rl_loop.write(tmp_path, "get_next"))
    survived, whole = returned(run, spec, kill), reference(spec)
    check_equal(survived, whole)
    assert ratios_of(survived, range(6)) == ratios_of(whole, range(6))


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize(
    ("kill", "reads"), sampled([(kill, reads) for kill in KILLS[1:] for reads in rl_loop.READERS])
)
def test_a_worker_comes_back_whose_batches_follow_from_no_evaluation(
    run: Launch, reference: Reference, tmp_path: Path, kill: str, reads: str
) -> None:
    fault = parse_kill(kill)
    spec = replace(SPEC, script=rl_loop.write(tmp_path, reads, *rl_loop.UNEVALUATED))
    survived, whole = returned(run, spec, kill), reference(spec)
    check_equal(survived, whole)
    told, wanted = ratios_of(survived, range(6)), ratios_of(whole, range(6))
    # Those of its struck step nobody was told; where it passes over a step, it has another's.
    del wanted[fault.slot, fault.step]
    assert all(wanted[one] <= told[one] for one in wanted)


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="2:backward")
def test_a_replica_adds_to_gradients_again_once_its_worker_is_back(
    run: Launch, tmp_path: Path
) -> None:
    spec = replace(SPEC, script=rl_loop.write(tmp_path, "get_next", *rl_loop.UNEVALUATED))
    spec = replace(spec, respawn=1)
    survived = run(replace(spec, kills=("1@2:backward",), changes=("+1@4",)))
    planned = run(replace(spec, changes=("1@3", "+1@4")))
    check_went_on(survived)
    assert survived.trace() == planned.trace()
    assert entered(survived) == [(1, 1)]
    assert survived.output.count("has batches again, and adds to gradients from step 4 on") == 1


STAYING: dict[str, tuple[RolloutSpec, tuple[Change, ...]]] = {
    "all of its replica are lost": (SPEC, ()),
    "an evaluation before the first step was large": (TP2, (rl_loop.LARGE,)),
}


@proves(Kind.RETURN, Promise.SENT_AWAY, victim="1", moment="2:backward")
@pytest.mark.parametrize("why", STAYING)
def test_one_that_cannot_know_its_evaluations_stays_away(
    run: Launch, reference: Reference, tmp_path: Path, why: str
) -> None:
    shape, changes = STAYING[why]
    script = rl_loop.write(tmp_path, "get_next", *changes)
    spec = replace(shape, steps=8, script=script)
    kill = {"kills": ("1@2:backward",), "awaits": ((4, 1),), "failing": (1,)}
    survived = run(replace(spec, respawn=2, **kill))
    check_went_on(survived)
    wanted = run(replace(spec, changes=("1@3",))) if shape is SPEC else reference(spec)
    assert survived.trace() == wanted.trace()
    assert survived.output.count("its script evaluates batches that it has in memory") == 1
    check_survived(reference(spec))
