"""Names of torchrun from those of other launchers; environments as Slurm 22.05 was seen to set."""

import pytest

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.launch.torchrun import torchrun_names

# The last of five tasks on three nodes.
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
TASK = {
    "RANK": "4",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "2",
    "LOCAL_WORLD_SIZE": "1",
}
BATCH = {name: text for name, text in STEP.items() if "STEP" not in name}
# Those of a job under mpirun, whose own daemons are the tasks of a step.
MPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_a_task_of_srun_has_torchruns_names_too() -> None:
    assert torchrun_names(STEP) == {**STEP, **TASK}
    of_allocation = {**STEP, "SLURM_TASKS_PER_NODE": "1(x5)"}
    assert torchrun_names(of_allocation) == {**of_allocation, **TASK}
    del of_allocation["SLURM_STEP_TASKS_PER_NODE"]
    assert torchrun_names({**of_allocation, "SLURM_TASKS_PER_NODE": "1,3,1"}) == {
        **of_allocation,
        **TASK,
        "SLURM_TASKS_PER_NODE": "1,3,1",
    }


@pytest.mark.parametrize(
    ("counts", "widths"),
    [("2(x3),1", "2221"), ("1,2(x2),3", "1223"), ("4", "4"), ("12(x2)", ("12", "12"))],
)
def test_each_node_has_its_own_number_of_tasks(counts: str, widths: str) -> None:
    for node, width in enumerate(widths):
        env = {**STEP, "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": counts}
        assert torchrun_names(env)["LOCAL_WORLD_SIZE"] == width


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH,
        {**BATCH, "SLURM_STEP_ID": "batch"},
        {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB)},  # a batch script
        {**STEP, "SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {name: text for name, text in STEP.items() if name != "SLURM_NODEID"},
    ],
)
def test_what_srun_has_not_started_is_no_task(env: dict[str, str]) -> None:
    assert torchrun_names(env) == env


def test_torchruns_own_names_come_first() -> None:
    own = {**TASK, "LOCAL_RANK": "1", "GROUP_RANK": "7", "LOCAL_WORLD_SIZE": "3"}
    assert torchrun_names({**STEP, **own}) == {**STEP, **own}
    # A script that exports some of them by itself.
    some = {"RANK": "4", "WORLD_SIZE": "5"}
    assert torchrun_names({**STEP, **some}) == {**STEP, **TASK}


@pytest.mark.parametrize("own", [{"RANK": "5"}, {"WORLD_SIZE": "40"}, MPI])
def test_ranks_of_a_launcher_within_a_step_are_not_mixed_with_slurms(own: dict[str, str]) -> None:
    names = torchrun_names({**STEP, **own})
    assert "GROUP_RANK" not in names
    assert names.get("LOCAL_WORLD_SIZE") == own.get("OMPI_COMM_WORLD_LOCAL_SIZE")


@pytest.mark.parametrize(
    ("node", "counts"), [("x", "2,1"), ("2", "2(x2)"), ("2", "2(x2),"), ("1", "two,1"), ("0", "")]
)
def test_numbers_that_are_none_are_a_sentence(node: str, counts: str) -> None:
    env = {**STEP, "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": counts}
    with pytest.raises(ConfigurationError, match=f"SLURM_NODEID '{node}', wanted numbers such as"):
        torchrun_names(env)
