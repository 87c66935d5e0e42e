"""A lost worker comes back to a script without a line of ours, which it runs from its start."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elaswave_plugin.config import SAVE_PHASE
from tests.checkpoints.reader import differences, read_checkpoint
from tests.faults import own_loop
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.own_scripts import Change
from tests.faults.test_join import entered
from tests.faults.test_own_loop import (
    FORMS,
    LINES,
    MADE,
    PP2,
    SEED,
    TP2,
    TRAINS,
    VERBS,
    reading,
    spec_of,
    validation_of,
)
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


def coming_back(slot: int, *, phase: str = "backward", at: int = 4) -> JobSpec:
    """The job that loses a worker in its third step, and has it back before step ``at``."""
    return replace(spec_of(slot, phase), respawn=1, changes=(f"+{slot}@{at}",))


@proves(Kind.RETURN, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_it_is_equal_to_the_loop_of_the_job(run: Launch, reference: Reference, slot: int) -> None:
    survived = run(coming_back(slot))
    check_equal(survived, reference(VERBS))
    assert entered(survived) == [(slot, 1)]
    # What only rank 0 prints is printed once, except for a step that a loss has undone.
    assert survived.output.count("step    3 |") == 2


@proves(Kind.RETURN, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize(("sizes", "slot"), [(one, slot) for one in FORMS for slot in (0, 2)])
def test_with_stages_and_tensor_parallelism(
    run: Launch, reference: Reference, sizes: tuple[str, ...], slot: int
) -> None:
    spec, verbs = coming_back(slot), replace(VERBS, options=(*VERBS.options, *sizes))
    survived = run(replace(spec, options=(*spec.options, *sizes)))
    check_equal(survived, reference(verbs))
    assert entered(survived) == [(slot, 1)]


_GATHERS = """\
        # A width that was asked for before the loss, and one that is asked for each time.
        width = width if iteration else torch.distributed.get_world_size()
        norms = [torch.full((1,), -1.0) for _ in range(width)]
        torch.distributed.all_gather(norms, torch.tensor([float(grad_norm)]))
        names = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(names, {"step": iteration})
        missing = norms.count(-1.0)
        if any(one["step"] != iteration for one in names) or len({*map(float, norms)}) > 1 + (
            missing > 0
        ):
            raise RuntimeError(f"gathered {names} and {norms}")
        slots = [torch.zeros(1) for _ in range(parallel_state.get_data_parallel_world_size())]
        mine = torch.tensor([float(os.environ["ELASWAVE_SLOT"]) + 1])
        torch.distributed.all_gather(slots, mine, group=parallel_state.get_data_parallel_group())
        print(f"gathered {iteration} {[int(one) for one in slots]}\\n", end="")
        print(f"missing {iteration} {missing}\\n", end="")
"""
# Each worker goes its own way by what a sum was, and the validation loss is such a thing.
_FOLLOWS = """\
        total = torch.tensor([float(grad_norm)])
        torch.distributed.all_reduce(total)
        seen = seen + float(total) if iteration else float(total)
        print(f"seen {torch.distributed.get_rank()} {iteration} {seen.hex()}\\n", end="")
"""
MORE: dict[str, tuple[Change, ...]] = {
    **{name: changes for name, (changes, _) in LINES.items()},
    "gathers": ((TRAINS, TRAINS + _GATHERS),),
}


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize("line", MORE)
def test_lines_that_stand_between_the_calls(
    run: Launch, reference: Reference, tmp_path: Path, line: str
) -> None:
    spec = replace(coming_back(1), script=own_loop.write(tmp_path, *MORE[line]))
    survived = run(spec)
    check_equal(survived, reference(spec.undisturbed()))
    assert entered(survived) == [(1, 1)]
    if line == "gathers":
        missing = {(int(s), int(n)) for s, n in re.findall(r"missing (\d) (\d)", survived.output)}
        assert missing == {(step, int(step in (2, 3))) for step in range(6)}
        # Each worker has the same, also who has passed over it; a lost one's entry stays zero.
        wanted = [*[[1, 2, 3, 4]] * 2, *[[1, 0, 3, 4]] * 2, *[[1, 2, 3, 4]] * 2]
        for step, slots in enumerate(wanted):
            assert survived.output.count(f"gathered {step} {slots}") in (4, 5)
            assert survived.output.count(f"gathered {step} ") in (4, 5)


_STREAMS = "    train_batches, valid_loader ="
# A name that the first worker makes up, a sum and a list, before the script trains.
_BEFORE = """\
    name = [os.urandom(4).hex()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(name, src=0)
    pids = torch.tensor([float(os.getpid())])
    torch.distributed.all_reduce(pids)
    names = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, {"pid": os.getpid()})
    known = f"{name[0]} {int(pids)} {sum(one['pid'] for one in names)}"
"""
_KNOWN = '        print(f"known {iteration} {known}\\n", end="")\n'


@proves(Kind.RETURN, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", sampled([0, 2]))
def test_it_is_told_what_all_had_before_they_trained(
    run: Launch, reference: Reference, tmp_path: Path, slot: int
) -> None:
    changes = (_STREAMS, _BEFORE + _STREAMS), (TRAINS, TRAINS + _KNOWN)
    spec = replace(coming_back(slot), script=own_loop.write(tmp_path, *changes))
    survived = run(spec)
    check_equal(survived, reference(spec.undisturbed()))
    assert entered(survived) == [(slot, 1)]
    known: dict[int, set[str]] = {step: set() for step in range(spec.steps)}
    for step, text in re.findall(r"known (\d) (\w+ \d+ \d+)", survived.output):
        known[int(step)].add(text)
    (one,) = set.union(*known.values())
    assert one.split()[1] == one.split()[2] and all(texts == {one} for texts in known.values())
    assert survived.output.count("known 5") == 4


_SAVES = """\
        torch.save(
            torch.cat([one.detach().view(-1) for one in model[0].parameters()]),
            Path(args.save) / f"{iteration}-{os.environ['ELASWAVE_SLOT']}.pt",
        )
"""


@proves(Kind.RETURN, Promise.WHOLE, victim="1", moment="2:backward")
def test_a_state_of_its_own_is_not_written_again(run: Launch, tmp_path: Path) -> None:
    """While a script passes over steps, the model that it has is that of its start."""
    script, saves = own_loop.write(tmp_path, (TRAINS, TRAINS + _SAVES)), tmp_path / "saves"
    saves.mkdir()
    survived = run(
        replace(coming_back(1), script=script, options=(*VERBS.options, SEED, f"--save={saves}"))
    )
    check_survived(survived)
    assert entered(survived) == [(1, 1)]
    every = {f"{step}-{slot}.pt" for step in range(6) for slot in range(4)}
    assert every - {path.name for path in saves.glob("*.pt")} == {"2-1.pt", "3-1.pt"}
    for step in range(6):
        saved = [torch.load(one) for one in saves.glob(f"{step}-*.pt")]
        assert all(torch.equal(one, saved[0]) for one in saved)


@proves(Kind.RETURN, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("made", MADE)
def test_iterators_that_go_on_over_a_loader(
    run: Launch, reference: Reference, tmp_path: Path, made: str, slot: int
) -> None:
    spec = replace(
        coming_back(slot), script=own_loop.write(tmp_path, *reading(MADE[made], num_workers=0))
    )
    survived = run(spec)
    check_equal(survived, reference(spec.undisturbed()))
    assert entered(survived) == [(slot, 1)]


_EPOCHS = """\
        try:
            losses, grad_norm = train_step()
        except StopIteration:
            train_batches = iter(loader(few))
            losses, grad_norm = train_step()
"""


@proves(Kind.RETURN, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", [0, 3])
def test_an_epoch_that_ends_in_a_stopiteration(
    run: Launch, reference: Reference, tmp_path: Path, slot: int
) -> None:
    """It leaves forward_backward on all workers, whatever they run, also for who comes back.

    Four batches of a replica, of which a step takes two: an epoch is two steps.
    """
    batches = "iter(loader(train)), loader(valid)"
    changes = (
        (TRAINS, _EPOCHS),
        (batches, batches.replace("loader(train)", "loader(few)")),
        (_STREAMS, "    few = torch.utils.data.Subset(train, range(16))\n" + _STREAMS),
    )
    spec = replace(coming_back(slot), script=own_loop.write(tmp_path, *changes), steps=9)
    spec = replace(spec, changes=(f"+{slot}@7",))
    survived = run(spec)
    check_equal(survived, reference(spec.undisturbed()))
    assert entered(survived) == [(slot, 1)]


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="2:backward")
def test_the_script_has_the_variables_of_the_others(run: Launch, tmp_path: Path) -> None:
    """A sum over all steps, also those that it has passed over, is the same on all workers."""
    script = own_loop.write(tmp_path, (TRAINS, TRAINS + _FOLLOWS))
    survived = run(replace(coming_back(2), script=script))
    check_survived(survived)
    for step in (4, 5):
        seen = re.findall(rf"seen (\d) {step} (0x[\w.]+p\+\d+)", survived.output)
        assert sorted(rank for rank, _ in seen) == [*"0123"]
        assert len({value for _, value in seen}) == 1


_LOG = """\
    def log(text, mode="a"):
        if torch.distributed.get_rank() == 0:
            with open(Path(args.save) / "log.txt", mode) as file:
                file.write(f"{text}\\n")

    os.makedirs(args.save, exist_ok=True)
    log("begins", mode="w")
"""
_LOOP = "    for iteration in range(args.train_iters):\n"
_KEEPS = """\
RANK = int(os.environ["RANK"])


def build_model("""
_WRITES = """\
        if RANK == 0:
            print(f"by the environment {iteration}\\n", end="")
        if rank == 0:
            print(f"by a variable {iteration}\\n", end="")
        if parallel_state.get_data_parallel_rank() == 0:
            print(f"by the replica {iteration}\\n", end="")
        replica = int(os.environ["ELASWAVE_SLOT"]) // args.tensor_model_parallel_size
        if replica and f"{parallel_state.get_data_parallel_rank()}" != f"{replica}":
            raise RuntimeError(f"replica {replica} is told to be another one")
"""


@proves(Kind.RETURN, Promise.WHOLE, victim="0", moment="2:backward")
@pytest.mark.parametrize("sizes", [(), TP2], ids=" ".join)
def test_what_one_worker_writes_is_written_once(
    run: Launch, tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    """By a rank from before the loss nobody writes any more; by the replica the next one does."""
    changes = (
        ("def build_model(", _KEEPS),
        (_LOOP, "    rank = torch.distributed.get_rank()\n" + _LOOP),
        (TRAINS, TRAINS + _WRITES),
    )
    spec = replace(coming_back(0, at=5), script=own_loop.write(tmp_path, *changes), steps=7)
    survived = run(replace(spec, options=(*spec.options, *sizes)))
    check_survived(survived)
    assert entered(survived) == [(0, 1)]
    written = {
        what: [int(step) for step in re.findall(rf"by {what} (\d)", survived.output)]
        for what in ("the environment", "a variable", "the replica")
    }
    assert written["the environment"] == written["a variable"] == [0, 1]
    # One worker of each place in a TP group.
    wanted = [step for step in range(7) for _ in range(2 if sizes else 1)]
    assert sorted(written["the replica"]) == wanted


@proves(Kind.RETURN, Promise.WHOLE, victim="0", moment="2:backward")
def test_nothing_is_written_twice(run: Launch, tmp_path: Path) -> None:
    """Neither checkpoints nor a file of rank 0's, which that has begun anew at its start."""
    changes = (
        (_LOOP, _LOG + _LOOP),
        (TRAINS, TRAINS + '        log(f"step {iteration}")\n'),
    )
    script, runs = own_loop.write(tmp_path, *changes), []
    for number, spec in enumerate((VERBS, coming_back(0, at=5))):
        saves = tmp_path / str(number)
        options = (*VERBS.options, SEED, f"--save={saves}", "--save-interval=2")
        runs.append(run(replace(spec, script=script, options=options)))
        check_survived(runs[-1])
        assert (saves / "latest_checkpointed_iteration.txt").read_text() == "6"
        assert (saves / "log.txt").read_text().split("\n") == [
            *("begins", *(f"step {step}" for step in range(6)), "")
        ]
    assert entered(runs[1]) == [(0, 1)]
    for step in (2, 4, 6):
        first, second = (read_checkpoint(tmp_path / n / f"iter_{step:07d}") for n in ("0", "1"))
        assert differences(first, second) == []


@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="1", moment="5:forward")
def test_more_are_lost_once_one_has_come_back(run: Launch, reference: Reference) -> None:
    spec = replace(VERBS, options=(*VERBS.options, SEED), script=own_loop.__file__, steps=9)
    spec = replace(
        spec,
        respawn=2,
        kills=("1@2:backward", "0@4:optimizer", "1.1@5:forward"),
        changes=("+1@4", "+0@5", "+1@7"),
    )
    survived = run(spec)
    check_equal(survived, reference(replace(VERBS, steps=9)))
    assert entered(survived) == [(1, 1), (0, 1), (1, 2)]


@proves(Kind.NEWCOMER, Promise.EQUAL, victim="1.1", moment="0:move")
def test_it_is_lost_again_while_it_enters(run: Launch, reference: Reference) -> None:
    spec = replace(spec_of(1, "backward"), steps=9, respawn=2, awaits=((4, 1), (6, 2)))
    survived = run(replace(spec, kills=(*spec.kills, "1.1@0:move")))
    check_equal(survived, reference(replace(VERBS, steps=9)))
    assert entered(survived) == [(1, 2)]


@proves(Kind.IN_RECOVERY, Promise.EQUAL, victim="0", moment="4:move")
def test_the_last_that_knows_the_loop_is_lost_while_another_enters(
    run: Launch, reference: Reference
) -> None:
    """The results of its calls lie with the snapshots."""
    spec = replace(coming_back(1), nproc=2, respawn=5)
    survived = run(replace(spec, kills=(*spec.kills, "0@4:move")))
    check_equal(survived, reference(replace(VERBS, nproc=2)))
    assert entered(survived)[0] == (1, 1)


@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="0")
@pytest.mark.parametrize("phase", ["backward", "body"])
def test_the_last_is_lost_in_a_step_while_another_waits(
    run: Launch, reference: Reference, phase: str
) -> None:
    """It makes the calls again that the lost one had made since that step began."""
    spec = replace(spec_of(1, "backward"), nproc=2, respawn=5, awaits=((4, 1),))
    survived = run(replace(spec, kills=(*spec.kills, f"0@4:{phase}")))
    check_equal(survived, reference(replace(VERBS, nproc=2)))
    assert entered(survived)[0] == (1, 1)


_RESUMES = """\
    tracker = Path(args.save) / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        dist_checkpointing.load(
            {"iteration": 0}, str(Path(args.save) / f"iter_{int(tracker.read_text()):07d}")
        )
"""
# The others begin no later step before the worker that came has left.
_HOLDS = """
import time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin_now = GuardedSteps.begin
def begin_once_it_has_left(self):
    begin_now(self)
    worker, deadline_s = self.worker, time.monotonic() + 60
    worker.member.announce("a slow batch")
    while worker.completed == 4 and open(worker.events.path).read().count('"worker_exited"') < 2:
        worker.member.check()
        assert time.monotonic() < deadline_s, "nobody has left"
        time.sleep(0.005)
    worker.member.announce(None)
GuardedSteps.begin = begin_once_it_has_left
"""
_FETCH = "    forward_backward = get_forward_backward_func()\n"
OTHERWISE: dict[str, tuple[tuple[Change, ...], str]] = {
    "it goes on from the newest checkpoint": (
        ((_FETCH, _RESUMES + _FETCH),),
        "this worker came later, and its script has loaded",
    ),
    "another order of calls": (
        (
            (
                _LOOP,
                '    begun = (Path(args.save) / "begun").exists()\n'
                "    torch.distributed.barrier()\n"
                "    os.makedirs(Path(args.save) / 'begun', exist_ok=True)\n" + _LOOP,
            ),
            (TRAINS, TRAINS + "        if begun:\n            torch.distributed.barrier()\n"),
        ),
        "its script calls barrier where those of the others called",
    ),
}


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize("what", OTHERWISE)
def test_one_that_does_otherwise_stays_away(
    run: Launch, reference: Reference, tmp_path: Path, what: str
) -> None:
    changes, sentence = OTHERWISE[what]
    script = own_loop.write(tmp_path, *changes)
    options = (*VERBS.options, SEED, f"--save={tmp_path / 'saves'}", "--save-interval=2")
    spec = replace(spec_of(1, "backward"), script=script, options=options, respawn=1, steps=8)
    is_let_in = "loaded" not in sentence
    spec = replace(spec, awaits=((4, 1),)) if is_let_in else replace(spec, sabotage=_HOLDS)
    survived: Outcome = run(replace(spec, failing=(1,)))
    check_survived(survived)
    assert survived.output.count(sentence) == 1
    assert (len(survived.events("view_committed")) > 2) == is_let_in
    assert "Traceback" not in survived.output
    assert len(validation_of(survived)) >= 8


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="3:save")
def test_a_stage_of_a_pipeline_that_is_lost_in_a_save(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    options = (*VERBS.options, SEED, *PP2, f"--save={tmp_path}", "--save-interval=2")
    spec = replace(coming_back(2), kills=(f"2@4:{SAVE_PHASE}",), changes=("+2@5",))
    survived = run(replace(spec, options=options))
    check_equal(survived, reference(replace(VERBS, options=(*VERBS.options, *PP2))))
    assert entered(survived) == [(2, 1)]
