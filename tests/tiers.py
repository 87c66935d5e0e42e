"""The tiers of the tests: `make check`, `make test`, `make faults`, and `make matrix` for the rest.

Tests of the files of FAULTS are marked `fault`, and of its folders those with a fixture of STARTS,
but for the representatives. `make check` runs the folders of CHECK but for LONG, `make test` what
is not marked, `make faults` what is. Of large families and files one of twelve parts is run
(`tests/sample.py`); tests marked `slow` wait for `make matrix`.
"""

from collections.abc import Collection
from pathlib import PurePath

CHECK = ("tests/tidy", "tests/core", "tests/config")
# Simulations and searches that compute for seconds, and what imports the frameworks.
LONG = (
    "tests/core/test_agreement_cuts.py",
    "tests/core/test_agreement_mixed.py",
    "tests/core/test_agreement_random.py",
    "tests/core/test_docstrings.py",
    "tests/core/test_explore.py",
    "tests/core/test_founding_orders.py",
    "tests/core/test_long_jobs.py",
    "tests/core/test_naming.py",
    "tests/core/test_pipeline_flow.py",
    "tests/core/test_planner_joint.py",
    "tests/core/test_planner_microbatch_split.py",
    "tests/core/test_schedule.py",
    "tests/core/test_schedule_exhaustive.py",
    "tests/core/test_slow.py",
    "tests/core/test_state_bytes.py",
    "tests/tidy/test_docs.py",
)
FAULTS = (
    "tests/faults",
    "tests/deepspeed",
    "tests/rehearsal",
    "tests/schedulers",
    "tests/adapters/megatron_lm",
    # Tests that start interpreters by themselves.
    "tests/adapters/megatron_lm/test_inert.py",
    "tests/deepspeed/test_attach.py",
    "tests/deepspeed/test_detached.py",
    "tests/deepspeed/test_inert.py",
    "tests/deepspeed/test_read_ahead.py",
    "tests/faults/test_bad_input.py",
    "tests/rehearsal/test_bad_input.py",
    "tests/rehearsal/test_files.py",
    # Runs of the kit, each with processes of its own.
    "tests/gpu/test_kit.py",
    # Whole jobs whose workers, agents and launchers are killed.
    "tests/launch/test_detached.py",
    "tests/launch/test_join.py",
    "tests/launch/test_launch.py",
    "tests/launch/test_shared_names.py",
    "tests/launch/test_shared_signals.py",
    "tests/launch/test_standard_streams.py",
    "tests/launch/test_torchrun.py",
    "tests/agent/test_all_wait.py",
    "tests/agent/test_coordinator.py",
    "tests/agent/test_notice_file.py",
    "tests/agent/test_status.py",
    "tests/agent/test_supervision.py",
    "tests/agent/test_undead.py",
    "tests/tracking/test_wandb_sink.py",
    "tests/bench/test_communicator.py",
    "tests/bench/test_convergence.py",
    "tests/trainer/test_zygote.py",
    "tests/demo/test_demo.py",
    "tests/demo/test_real_demo.py",
    "tests/demo/test_real_hybrid.py",
)
# Fixtures that start processes; those that use them do too.
STARTS = ("zygotes", "nodes", "slurm")
# One fault of each adapter and mode.
REPRESENTATIVES = (
    # Megatron-Core: a killed worker in exact and in fast mode, a hang, a return, a torn save.
    "tests/faults/test_kill.py::test_kill_in_a_phase_of_a_step_changes_nothing[1-backward]",
    "tests/faults/test_fast_mode.py::test_kill_in_fast_mode_equals_the_planned_departure[mean-2]",
    "tests/faults/test_hang.py::test_a_hang_of_any_worker_changes_nothing[2-backward-gil]",
    "tests/faults/test_join.py::test_a_lost_worker_comes_back[0]",
    "tests/faults/test_saves.py::test_a_kill_in_a_save_without_a_return[dp4-1-named]",
    # The same with TP, PP and DP, and what the comparison has to see.
    "tests/faults/test_hybrid.py::test_any_worker_of_tp_pp_dp[6@3:backward]",
    "tests/faults/test_hybrid.py::test_fast_mode_is_its_twin",
    "tests/faults/test_hybrid.py::test_without_the_exchange_of_tied_embeddings_the_runs_differ",
    # DeepSpeed: ZeRO, Accelerate, pipelines.
    "tests/deepspeed/test_kill.py::test_kill_in_a_phase_of_a_step_equals_the_planned_departure"
    "[zero1-fp32-2at2-backward]",
    "tests/deepspeed/test_hf.py::test_a_kill_is_absorbed_and_the_script_counts_each_step_once"
    "[1-0@3:backward]",
    # The groups of processes themselves.
    "tests/agent/test_supervision.py::test_two_trainers_killed_at_once",
    # Megatron-LM, where a checkout is given.
    "tests/adapters/megatron_lm/test_kill.py::test_any_phase_of_a_data_parallel_job[2@3:backward]",
)


def is_long(nodeid: str) -> bool:
    """Tell whether `make check` leaves a test to `make test`."""
    return nodeid.partition("::")[0] in LONG


def waits_for_faults(nodeid: str, fixtures: Collection[str]) -> bool:
    """Tell whether a test that uses these fixtures is left to `make faults`."""
    file = nodeid.partition("::")[0]
    if nodeid in REPRESENTATIVES:
        return False
    if file in FAULTS:
        return True
    return any(map(PurePath(file).is_relative_to, FAULTS)) and not {*STARTS}.isdisjoint(fixtures)


def unknown_representatives(nodeids: Collection[str]) -> list[str]:
    """Return those that do not exist, of the files that these tests are all of."""
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    wanted = [one for one in REPRESENTATIVES if one.partition("::")[0] in files]
    return sorted({*wanted} - {*nodeids})
