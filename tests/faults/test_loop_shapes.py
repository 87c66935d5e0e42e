"""Loops in the shape of Megatron-Bridge's and of ms-swift's survive losses without a line of ours.

Where the packages are installed, their calls are compared with those of the shapes.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.config import SAVE_PHASE, STEP_PHASES
from tests.checkpoints.reader import differences, read_checkpoint
from tests.faults import bridge_loop, own_scripts, swift_loop
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.own_scripts import Change
from tests.faults.test_own_loop import PP2, SEED, TP2, validation_of
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

BRIDGE = JobSpec(nproc=4, script=bridge_loop.__file__, options=("--eval-interval=1", SEED))
SHAPES = {"bridge": BRIDGE, "swift": replace(BRIDGE, script=swift_loop.__file__)}
PHASES = (*STEP_PHASES, "evaluation")
CASES = [(shape, sizes, phase) for sizes in ((), TP2, PP2) for shape in SHAPES for phase in PHASES]


def spec_of(shape: str, sizes: tuple[str, ...], *kills: str) -> JobSpec:
    """The job of a shape, with these sizes, which loses workers."""
    spec = SHAPES[shape]
    return replace(spec, options=(*spec.options, *sizes), kills=kills)


def training_of(run: Outcome) -> list[str]:
    """The losses of steps that the script has printed: sums over all replicas."""
    return re.findall(r"training loss (.*)", run.output)


@proves(Kind.KILLS, Promise.EQUAL, victim="1, 2", moment="2, 4")
@pytest.mark.parametrize(("shape", "sizes", "phase"), sampled(CASES, most=2))
def test_two_losses_in_a_phase(
    run: Launch, reference: Reference, shape: str, sizes: tuple[str, ...], phase: str
) -> None:
    """ms-swift sums losses within its loss function, whose sums are those without a loss."""
    spec = spec_of(shape, sizes, f"1@2:{phase}", f"2@4:{phase}")
    survived, whole = run(spec), reference(spec.undisturbed())
    check_equal(survived, whole)
    if shape == "swift":
        assert training_of(survived) == training_of(whole) != []
        assert validation_of(survived) == validation_of(whole) != []


LOGGING = [(sizes, phase) for sizes in ((), TP2, PP2) for phase in PHASES]


@proves(Kind.KILLS, Promise.EQUAL, victim="1, 2", moment="2, 4")
@pytest.mark.parametrize(("sizes", "phase"), sampled(LOGGING, most=3))
def test_losses_that_are_summed_in_the_log(
    run: Launch, reference: Reference, tmp_path: Path, sizes: tuple[str, ...], phase: str
) -> None:
    """A worker without a part of the model is told of its place at the launch."""
    script = swift_loop.write(tmp_path, *swift_loop.SUMS_IN_LOG)
    spec = replace(spec_of("swift", sizes, f"1@2:{phase}", f"2@4:{phase}"), script=script)
    survived = run(spec)
    check_equal(survived, reference(spec.undisturbed()))
    assert len(survived.events("view_committed")) == 3


# A worker dies where its group meets behind an update; or one of the others is held there until it
# has not the sum that its neighbour has, and a worker of the first stage dies in the next step.
MEETS = """
import os, signal, time
from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.loops.loop_body import LoopBody
run, held = LoopBody.run, []
def meeting(self, group, call, args, start):
    worker = self._worker
    if (group.group_desc, worker.completed) != ("{group}", 3) or held:
        return run(self, group, call, args, start)
    held.append(None)
    if worker.slot == {dies}:
        worker.events.emit("met", slot=worker.slot)
        os.kill(os.getpid(), signal.SIGKILL)
    def starting(among):
        work = start(among)
        if worker.slot == {holds} and len(held) == 1:
            held.append(None)
            work.wait()
            worker.events.emit("met", slot=worker.slot)
            while worker.links.interrupted is None:
                time.sleep(0.01)
            raise EpochChanged(*worker.links.interrupted)
        return work
    work = run(self, group, call, args, starting)
    worker.events.emit("sum", slot=worker.slot, value=args[0][0].tolist())
    return work
LoopBody.run = meeting
"""
_REPLICAS, _PARTS = "DATA_PARALLEL_GROUP_WITH_CP", "MODEL_PARALLEL_GROUP"


@proves(Kind.KILL, Promise.EQUAL, victim="3", moment="2")
@pytest.mark.parametrize("group", [_REPLICAS, _PARTS])
def test_a_group_of_some_workers_meets_behind_an_update(
    run: Launch, reference: Reference, group: str
) -> None:
    """The others of the group have the call made again, and the rest go on to the next step."""
    spec = spec_of("bridge", PP2)
    sabotage = MEETS.format(group=group, dies=3, holds=-1)
    survived = run(replace(spec, sabotage=sabotage))
    assert [event["slot"] for event in survived.events("met")] == [3]
    check_equal(survived, reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:forward")
def test_who_has_left_a_group_tells_what_it_had_there(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    # Nothing of all workers is between the call and the next step.
    elapsed = 'timers("interval-time").elapsed(barrier='
    script = bridge_loop.write(tmp_path, (f"{elapsed}True", f"{elapsed}False"))
    spec = replace(BRIDGE, script=script, options=(SEED, *PP2))
    sabotage = MEETS.format(group=_REPLICAS, dies=-1, holds=2)
    survived = run(replace(spec, sabotage=sabotage, kills=("1@3:forward",)))
    assert [event["slot"] for event in survived.events("met")] == [2]
    check_equal(survived, reference(spec))
    sums = {event["slot"]: event["value"] for event in survived.events("sum")}
    assert sums.keys() == {2, 3}
    assert sums[2] == sums[3]


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE, victim="2", moment="4:save")
@pytest.mark.parametrize("shape", SHAPES)
def test_their_checkpoints_are_those_without_a_loss(
    run: Launch, tmp_path: Path, shape: str
) -> None:
    spec, kill, runs = spec_of(shape, TP2), f"2@4:{SAVE_PHASE}", []
    for kills in ((), (kill,)):
        saves = tmp_path / str(len(runs))
        options = (*spec.options, f"--save={saves}", "--save-interval=2")
        runs.append(run(replace(spec, options=options, kills=kills)))
        assert (saves / "latest_checkpointed_iteration.txt").read_text() == "6"
    check_survived(runs[1])
    for step in (2, 4, 6):
        first, second = (read_checkpoint(tmp_path / n / f"iter_{step:07d}") for n in ("0", "1"))
        assert differences(first, second) == []


_REPORTS = (
    '        return loss[0].clone(), loss[1].detach().clone().to(torch.int), {"loss": report}\n'
)
_SUMS = "        torch.distributed.all_reduce(\n            report, group=mpu.get_data_"
BAD: dict[str, tuple[Change, str]] = {
    "a sum that the loss function reads": (
        (_REPORTS, "        print(report / 2)\n" + _REPORTS),
        "the loss function reads what its all_reduce returned",
    ),
    "a sum that is the loss": (
        (_REPORTS, _REPORTS.replace("loss[0].clone()", "report[0]")),
        "returned as its loss, or as tokens",
    ),
    "keys of all": (
        (_REPORTS, "        torch.distributed.all_gather_object([0, 0], ['loss'])\n" + _REPORTS),
        "is called in loss_func",
    ),
    "sums of bits": (
        (_SUMS, _SUMS.replace("report, ", "report, torch.distributed.ReduceOp.BAND, ")),
        "the loss function's all_reduce is a BAND",
    ),
}


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize("what", BAD)
def test_what_a_loss_function_cannot_do_with_its_sum(
    run: Launch, tmp_path: Path, what: str
) -> None:
    change, sentence = BAD[what]
    spec = JobSpec(nproc=2, steps=3, script=swift_loop.write(tmp_path, change))
    refused = run(spec)
    assert (refused.returncode, refused.orphans) == (2, ())
    assert refused.output.count(sentence) == 1
    assert "Traceback" not in refused.output


# Of each: the file of upstream's function, its name, and the shape that has one of that name.
UPSTREAM = (
    ("megatron/bridge/training/train.py", "train_step", bridge_loop.changes),
    ("swift/megatron/trainers/base.py", "train_step", swift_loop.changes),
    ("swift/megatron/trainers/base.py", "evaluate", swift_loop.changes),
)
# The calls that are compared, as upstream names them and as the shapes do; with what they are given
# by name.
_CALLS = {
    **{name: name for name in ("should_run_forward_backward", "zero_grad_buffer", "zero_grad")},
    **{name: name for name in ("get_forward_backward_func", "should_checkpoint_and_exit", "step")},
    **dict.fromkeys(("forward_backward_func", "forward_backward", "run"), "forward_backward"),
    "logical_and_across_model_parallel_group": "of_all_parts",
    "reduce_max_stat_across_model_parallel_group": "of_all_parts",
    **{"of_all_parts": "of_all_parts", "all_reduce": "all_reduce", "reduced": "all_reduce"},
}
# What upstream's functions do where its configuration says so, and recipes do not.
_ELSEWHERE = re.compile(
    "log_num_zeros|use_decentralized|non_loss_data|is_multimodule|exit_duration|cuda_graph"
)


def calls_of(text: str, function: str) -> list[tuple[str, frozenset[str]]]:
    """The calls of a function of a file, in their order; one that comes twice in a row is one."""
    tree = ast.parse(text)
    found = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef))
    (body,) = (one.body for one in found if one.name == function)
    calls: list[tuple[str, frozenset[str]]] = []
    for node in _in_order(body):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        own = {one.arg for one in node.keywords if one.arg} - {"group", "op", "mp_group", "of"}
        call = _CALLS.get(name, ""), frozenset(own)
        if call[0] and calls[-1:] != [call]:
            calls.append(call)
    return calls


def _in_order(nodes: list[ast.stmt]) -> Iterator[ast.Call]:
    for node in nodes:
        if isinstance(node, ast.If) and _ELSEWHERE.search(ast.unparse(node.test)):
            yield from _in_order(node.orelse)
            continue
        for _, value in ast.iter_fields(node):
            inside = value if isinstance(value, list) else [value]
            yield from _in_order([one for one in inside if isinstance(one, ast.AST)])
        if isinstance(node, ast.Call):
            yield node


@pytest.mark.parametrize(("file", "function", "changes"), UPSTREAM)
def test_their_calls_are_upstreams(file: str, function: str, changes: object) -> None:
    """In their order, with the same arguments by name, wherever the package is installed."""
    assert callable(changes)
    ours = calls_of(own_scripts.script(*changes()), function)
    assert len(ours) > 1
    found = next((one for one in (Path(one) / file for one in sys.path) if one.is_file()), None)
    if found is None:
        pytest.skip(f"{file} is not installed")
    assert ours == calls_of(found.read_text("utf-8"), function)
