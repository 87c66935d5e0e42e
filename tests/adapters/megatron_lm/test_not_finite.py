"""A loss that is not finite: the rerun machine decides as without the plugin, and the job ends so.

Megatron-LM's machine runs the step again, saves, and leaves with exit code 16 where the result came
again, 17 where it did not (megatron/core/rerun_state_machine.py).
"""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.rerun_state_machine import (
    Call,
    Caller,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    RerunStateMachine,
)

from elaswave_plugin.adapters.megatron_lm.side_state import SideState
from elaswave_plugin.checkpoints.directory import check_loadable, read_directory
from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
    printed_in,
)
from tests.adapters.megatron_lm.test_without_plugin import (
    NO_DROPOUT,
    check_close,
    run_without_plugin,
)
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves

# ---- the machine itself, without a checkout -----------------------------------------------------


@pytest.mark.parametrize("fatal", [True, False])
def test_a_result_with_its_graph_is_kept_and_put_back(
    args: argparse.Namespace, machine: RerunStateMachine, fatal: bool
) -> None:
    """The machine has it until the job's end, also where the job goes on."""
    loss = (torch.ones(3, requires_grad=True) * float("nan")).sum()
    machine.state, machine.first_iteration_complete = RerunState.INITIAL_RUN, True
    machine.validate_result(loss, torch.isnan, "found NaN", fatal=fatal)
    assert machine.initial_result is loss and machine.rerun_requested
    state = SideState()
    kept = state.keep()
    machine.state, machine.initial_result = RerunState.NOT_RUNNING_YET, None
    for _ in range(2):
        state.put_back(kept)
        assert machine.state == RerunState.INITIAL_RUN
        assert torch.isnan(machine.initial_result) and not machine.initial_result.requires_grad


def test_who_is_given_the_state_of_another_inside_an_evaluation_validates_its_step(
    args: argparse.Namespace, machine: RerunStateMachine
) -> None:
    """An evaluation disables the machine: all redo the step before it, and meet in a reduction."""
    machine.mode = RerunMode.VALIDATE_RESULTS
    state = SideState()
    given = state.shared(state.keep())
    assert state.is_still(given)
    machine.set_mode(RerunMode.DISABLED)
    state.put_back(given)
    assert machine.get_mode() == RerunMode.VALIDATE_RESULTS


def test_a_step_that_has_a_result_rejected_keeps_no_sums(
    args: argparse.Namespace, machine: RerunStateMachine
) -> None:
    state = SideState()
    before = state.keep()
    machine.state, machine.current_iteration = RerunState.INITIAL_RUN, 7
    assert state.is_still(before)
    machine.rerun_requested = True
    assert not state.is_still(before)


def test_what_a_step_saves_of_its_results_and_injected_errors_is_put_back(
    args: argparse.Namespace, machine: RerunStateMachine
) -> None:
    loss, call = (torch.ones(3, requires_grad=True) * 2).sum(), Call(Caller("found NaN", 0), 1)
    state = SideState()
    before = state.keep()
    machine.saved_results[call] = [loss]
    machine.validation_counts[call.caller] += 1
    machine.error_injector.injected_error_type = RerunDiagnostic.TRANSIENT_ERROR
    during = state.keep()
    state.put_back(before)
    assert not machine.saved_results and machine.error_injector.injected_error_type is None
    assert machine.validation_counts[call.caller] == 0
    state.put_back(during)
    assert machine.saved_results[call][0].item() == 6.0
    assert machine.error_injector.injected_error_type == RerunDiagnostic.TRANSIENT_ERROR
    assert machine.validation_counts[call.caller] == 1


# ---- whole jobs ---------------------------------------------------------------------------------

# These ranks find FIRST times the loss of each micro-batch in the third step, and LATER times it in
# its second run.
FOUND = """
from megatron.core import rerun_state_machine as reruns
import torch.distributed
validate = reruns.RerunStateMachine.validate_result
def found(self, result, rejection_func, message, **more):
    runs_again = self.state != reruns.RerunState.INITIAL_RUN
    here = self.current_iteration == 3 and torch.distributed.get_rank() in RANKS
    if here and "loss" in message:
        result = result * (LATER if runs_again else FIRST)
    return validate(self, result, rejection_func, message, **more)
reruns.RerunStateMachine.validate_result = found
"""
INF, NAN, NO = 'float("inf")', 'float("nan")', "1.0"
SPEC = ScriptSpec(
    nproc=3, steps=5, global_batch=6, dump="never", options=(*NO_EVALUATION, "--save-interval", "9")
)
AGAIN, NOT_AGAIN = 16, 17


def found(ranks: str, first: str, later: str) -> str:
    """The statements by which these ranks find such losses."""
    return FOUND.replace("RANKS", ranks).replace("FIRST", first).replace("LATER", later)


def saving(spec: ScriptSpec, name: str) -> tuple[str, ...]:
    """The options of a specification that saves to a folder of the runs' data."""
    return (*spec.options, "--save", "{data}/" + name)


def check_ended(run: Outcome, folder: Path, code: int) -> None:
    """As the script ends alone: two steps, its checkpoint of them, its exit code."""
    assert run.returncode == code, run.output[-4000:]
    assert "Traceback" not in run.output and not run.orphans
    assert [line.split("|")[0].split("/")[0].split()[-1] for line in printed(run)] == ["1", "2"]
    found = read_directory(folder)
    assert found is not None and found.text == "2"
    assert [(one.number, one.flaw) for one in found.checkpoints] == [(2, None)]
    check_loadable(folder)


CASES = [("(0, 1)", INF, INF, AGAIN), ("(0, 1, 2)", NAN, NAN, AGAIN), ("(1,)", NAN, NO, NOT_AGAIN)]


@needs_repository
@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "first", "later", "code"), CASES, ids=["inf", "nan", "once"])
def test_a_job_ends_as_its_script_does(
    run: Launch, data: Path, ranks: str, first: str, later: str, code: int
) -> None:
    name = f"found-{ranks}-{code}"
    sabotage = found(ranks, first, later)
    check_ended(
        run(replace(SPEC, sabotage=sabotage, options=saving(SPEC, name))), data / name, code
    )


@needs_repository
@proves(Kind.KILL, Promise.SAME)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kill", "layout"),
    [("1@2:backward", ()), ("2@2:reduce", ()), ("1@2:save", ()), ("5@2:backward", TP2_PP2)],
    ids=["backward", "reduce", "save", "stages"],
)
def test_a_loss_in_that_step_or_in_its_save_changes_nothing_of_it(
    run: Launch, data: Path, kill: str, layout: tuple[str, ...]
) -> None:
    """The checkpoint of those who are left is loaded by the number of the launch."""
    name = f"killed-{kill}"
    more = {"nproc": 8, "global_batch": 4} if layout else {}
    spec = replace(SPEC, options=(*SPEC.options, *layout), **more)  # type: ignore[arg-type]
    killed = run(
        replace(
            spec, sabotage=found("range(8)", NAN, NAN), kills=(kill,), options=saving(spec, name)
        )
    )
    assert len(killed.events("fault_fired")) == 1
    check_ended(killed, data / name, AGAIN)
    loading = (*spec.options, "--load", "{data}/" + name)
    went_on = run(replace(spec, options=loading))
    assert went_on.returncode == 0, went_on.output[-4000:]
    assert sorted(went_on.trace()) == [2, 3, 4]


# Outside of a step the machine is off, and such a result is an error.
IN_EVALUATION = """
from megatron.core import rerun_state_machine as reruns
validate = reruns.RerunStateMachine.validate_result
def found(self, result, *args, **more):
    is_off = self.mode == reruns.RerunMode.DISABLED
    return validate(self, result * float("nan") if is_off else result, *args, **more)
reruns.RerunStateMachine.validate_result = found
"""


@needs_repository
@proves(Kind.NOTHING, Promise.SAME)
def test_a_validation_loss_that_is_not_finite_ends_the_job_by_its_name(run: Launch) -> None:
    """As the script alone: exit code 1 in the first evaluation."""
    ended = run(replace(SPEC, sabotage=IN_EVALUATION, options=EVALUATION))
    assert ended.returncode == 1 and not ended.orphans
    last = ended.output.rstrip().splitlines()[-1]
    assert "all workers failed alike in step 3" in last and "Unexpected result nan" in last
    assert len(printed(ended)) == 3


# The largest loss is known after four micro-batches; in a later step one is 30 times as large.
SPIKE = """
import os, runpy
import torch.distributed
from megatron.core import rerun_state_machine as reruns
from megatron.core.models.common.language_module.language_module import LanguageModule
machine, native = reruns.RerunStateMachine, LanguageModule.compute_language_model_loss
is_large = machine.is_unexpectedly_large
machine.is_unexpectedly_large = lambda *args, **more: is_large(*args, **more, num_samples=4)
def loss(self, *args, **more):
    here = reruns.get_rerun_state_machine()
    first = here.state == reruns.RerunState.INITIAL_RUN and torch.distributed.get_rank() == 1
    return native(self, *args, **more) * (30 if first and here.current_iteration == 4 else 1)
LanguageModule.compute_language_model_loss = loss
runpy.run_path(os.path.join(os.path.dirname(__file__), "pretrain_gpt.py"), run_name="__main__")
"""


@needs_repository
@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_spiky_loss_is_checked_as_without_the_plugin(
    run: Launch, script: Path, data: Path, tmp_path: Path
) -> None:
    spiky = script.with_name("spiky.py")
    spiky.write_text(SPIKE)
    options = (*NO_EVALUATION, *NO_DROPOUT, "--check-for-spiky-loss")
    spec = replace(SPEC, script=spiky.name, steps=6, options=options)
    ours = run(spec)
    plain = run_without_plugin(spec, script=spiky, data=data, folder=tmp_path / "plain")
    theirs = plain.stdout + plain.stderr
    assert ours.returncode == plain.returncode == 0, ours.output[-4000:]
    for said in ("message='Spiky loss'", "Possible transient error", "validation was not fatal"):
        assert ours.output.count(said) == theirs.count(said) > 0, said
    check_close(printed(ours), printed_in(theirs))


@needs_repository
@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("code", [AGAIN, NOT_AGAIN])
def test_exit_code_and_files_are_those_without_the_plugin(
    run: Launch, script: Path, data: Path, tmp_path: Path, code: int
) -> None:
    """A learning rate that no weight survives, and an error that the machine itself injects."""
    diverges = ("--lr", "1e25", "--min-lr", "1e25")
    injected = ("--error-injection-rate", "1", "--error-injection-type", "transient_error")
    spec = replace(SPEC, options=(*SPEC.options, *(diverges if code == AGAIN else injected)))
    ours = run(replace(spec, options=saving(spec, f"ours-{code}")))
    theirs = replace(spec, options=saving(spec, f"theirs-{code}"))
    plain = run_without_plugin(theirs, script=script, data=data, folder=tmp_path / "plain")
    assert ours.returncode == code, ours.output[-4000:]
    assert re.search(rf"exitcode +: {code} ", plain.stderr), plain.stderr[-4000:]
    assert len(printed(ours)) == len(printed_in(plain.stdout + plain.stderr)) == 1
    files = [
        sorted(str(one.relative_to(data / which)) for one in (data / which).rglob("*"))
        for which in (f"ours-{code}", f"theirs-{code}")
    ]
    assert files[0] == files[1] and "iter_0000001/common.pt" in files[0]
