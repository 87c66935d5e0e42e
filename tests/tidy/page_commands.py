"""The commands that pages and examples print, and the test that runs each, or why none does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    *("elaswave", "python", "python3", "pytest", "pip", "git", "make", "wandb", "kill", "tail"),
    "sh",
    *("torchrun", "deepspeed", "mpirun", "srun", "sbatch", "scancel", "bash"),
)
# Values that stand before a command, as in "NNODES=3 sbatch ...".
_SET = r"(?:[A-Z][A-Z0-9_]*=(?:\$\([^)]*\)|\S+) )*"
_PROGRAM = rf"(?:{'|'.join(PROGRAMS)}|examples/\S+\.sh)"
COMMAND = re.compile(rf"{_SET}{_PROGRAM} [^\s|].*")
INLINE = re.compile(rf"`({_SET}{_PROGRAM} [^`|]+)`")


class RunBy(NamedTuple):
    """``words``: a pattern of whole commands; ``test`` that runs them, or ``reason`` for none."""

    words: str
    test: str = ""
    reason: str = ""


_HF = "tests/deepspeed/test_page_commands.py::"
_LAUNCH = r"(?:train\.py|SCRIPT|pretrain_gpt\.py) .*"
RUN_BY = (
    # The examples, as they are printed.
    RunBy(
        r"(?:WANDB_MODE=offline )?elaswave run --dir out/(?:hf|trl|first) .* examples/\w+\.py .*",
        _HF + "test_the_page_s_command_trains",
    ),
    RunBy(
        r"MEGATRON_LM_PATH=\S+ examples/pretrain_gpt_elastic\.sh .*",
        "tests/adapters/megatron_lm/test_shell_script.py::test_the_line_of_the_page_survives_its_kill",
    ),
    RunBy(
        r"MEGATRON_LM_PATH=.* examples/pretrain_gpt_elastic_gpu\.sh .*",
        reason="needs eight GPUs",
    ),
    RunBy(
        r"elaswave demo(?: --kill 2@10 --respawn)?",
        "tests/demo/test_real_demo.py::"
        "test_real_demo_survives_and_its_summary_follows_from_its_files",
    ),
    RunBy(
        r"elaswave demo --tp 2 --pp 2 --dp 2 .*",
        "tests/demo/test_real_hybrid.py::test_summary_of_a_real_hybrid_run_follows_from_its_files",
    ),
    RunBy(
        r"python -m elaswave_plugin\.demo\.text .*",
        "tests/demo/test_text.py::test_dataset_holds_every_byte_and_an_end_for_each_document",
    ),
    # Launchers: the words are the reader's, the options those of the tests.
    RunBy(
        r"elaswave run (?:--dir \S+ )?--nproc-per-node 4 train\.py(?:| .*)",
        "tests/faults/test_kill.py::test_kill_in_a_phase_of_a_step_changes_nothing",
    ),
    RunBy(
        r"elaswave run --preload torch,megatron\.core \.\.\.",
        "tests/faults/test_join.py::test_a_lost_worker_comes_back",
    ),
    RunBy(
        r"torchrun .*-m elaswave_plugin\.run .*",
        "tests/faults/test_torchrun.py::test_torchrun_with_our_module_survives_a_kill",
    ),
    RunBy(
        r"PYTHON_EXEC=\$\(which elaswave-python\) torchrun .*",
        "tests/faults/test_torchrun.py::test_torchrun_with_python_exec_survives_a_kill",
    ),
    RunBy(
        r"deepspeed --num_gpus 4 --module elaswave_plugin\.run .*",
        "tests/deepspeed/test_launchers.py::"
        "test_the_deepspeed_launcher_with_our_module_survives_a_kill",
    ),
    RunBy(
        r"mpirun .*",
        reason="needs MPI; test_mpiruns_variables_are_read sets what it sets",
    ),
    RunBy(r"srun .*", "tests/schedulers/test_slurm.py::test_srun_with_one_task_a_worker"),
    RunBy(
        r"elaswave run .*--rdzv-dir .*",
        "tests/launch/test_shared_job.py::"
        "test_the_same_line_starts_the_job_joins_it_and_tells_its_end",
    ),
    RunBy(
        r"elaswave run .*--rdzv-endpoint .*,.*",
        "tests/launch/test_shared_names.py::"
        "test_the_same_line_starts_the_job_joins_it_and_tells_its_end",
    ),
    RunBy(
        r"elaswave run .*--rdzv-endpoint n1:29400 .*",
        "tests/launch/test_shared_names.py::test_without_the_one_name_it_waits_until_that_is_back",
    ),
    RunBy(
        r"(?:ELASWAVE_SECRET_FILE=/path )?elaswave run --nnodes 4 .*",
        "tests/faults/test_snapshots.py::test_a_lost_node_is_restored_from_the_copy",
    ),
    RunBy(r"elaswave run --join.*", "tests/faults/test_node_join.py::test_a_lost_node_comes_back"),
    RunBy(
        r"elaswave run --notice-file PATH",
        "tests/faults/test_notice.py::test_a_node_that_is_told_to_go_leaves_between_two_steps",
    ),
    RunBy(
        r"NNODES=\S+ NPROC_PER_NODE=\S+ sbatch --array=.*",
        "tests/schedulers/test_array.py::test_slurm_brings_a_lost_node_back_and_it_joins",
    ),
    RunBy(
        r"NNODES=\S+ NPROC_PER_NODE=\S+ sbatch --nodes=4 .*",
        "tests/schedulers/test_allocation.py::test_an_allocation_outlives_its_first_node",
    ),
    RunBy(
        r"sbatch --signal=TERM@300",
        "tests/schedulers/test_allocation.py::"
        "test_the_time_limit_leaves_a_checkpoint_from_which_the_next_life_goes_on",
    ),
    RunBy(
        r"scancel (?:17.*|JOB_TASK|JOB|--signal=TERM)",
        "tests/schedulers/test_array.py::test_scancel_of_a_task_takes_its_node_and_not_the_job",
    ),
    # What shows and changes a job.
    RunBy(
        r"elaswave status (?:DIR|run-17|out/(?:first|hf))",
        "tests/agent/test_status.py::test_the_command_draws_once_or_prints_json",
    ),
    RunBy(
        r"elaswave report (?:DIR|run-17|out/first)",
        "tests/observer/test_report.py::test_report_says_how_a_job_ended",
    ),
    RunBy(
        r"elaswave report DIR --reference DIR",
        "tests/observer/test_report.py::test_report_draws_a_recovered_run_and_its_reference",
    ),
    RunBy(
        r"elaswave checkpoint DIR",
        "tests/checkpoints/test_directory.py::test_the_command_lists_and_checks",
    ),
    RunBy(
        r"elaswave drain (?:SLOT|--node N) DIR",
        "tests/faults/test_drain.py::test_a_drained_worker_leaves_between_two_steps",
    ),
    RunBy(
        r"elaswave migrate --layers 4-5 --to 1 DIR",
        "tests/faults/test_migrate.py::test_layers_move_between_two_steps_and_come_back",
    ),
    RunBy(
        r"elaswave secret new FILE",
        "tests/ipc/test_secret.py::test_the_command_makes_a_file_once",
    ),
    RunBy(
        r"elaswave doctor",
        "tests/adapters/test_doctor.py::test_every_record_fits_what_is_installed",
    ),
    RunBy(
        r"elaswave doctor LAUNCH\.sh",
        "tests/cli/test_launch_doctor.py::test_a_launch_script_is_answered_setting_by_setting",
    ),
    RunBy(
        r"python -m benchmarks\.corpus FILE\.json",
        "tests/cli/test_launch_doctor.py::test_every_repository_of_a_corpus_counts_the_same",
    ),
    RunBy(
        r"elaswave patch apply",
        "tests/adapters/test_diffs.py::test_apply_and_revert_leave_the_bytes_that_were_there",
    ),
    RunBy(
        r"elaswave rehearse (?:COMMAND|elaswave run .*)",
        "tests/rehearsal/test_megatron.py::test_the_example_is_equal_and_every_kill_fires",
    ),
    RunBy(
        r"wandb sync(?: .*)?",
        reason="uploads to W&B's server, which no test has; its folders are compared by the test"
        " of trackers",
    ),
    RunBy(
        r"python -m deepspeed\.checkpoint\.ds_to_universal .*",
        "tests/deepspeed/test_save.py::"
        "test_a_checkpoint_of_three_workers_is_loaded_by_another_number",
    ),
    # Of the project itself.
    RunBy(
        r"python -m benchmarks\.gpu.*|sh (?:gpu|install)\.sh.*|make gpu.*",
        reason="needs a GPU; test_an_item_s_logic_on_a_stand_in runs each item's logic without",
    ),
    RunBy(
        r"python -m tests\.explore",
        "tests/core/test_explore.py::test_two_nodes_and_two_faults_in_any_order",
    ),
    RunBy(
        r"python -m tests\.adapters\.megatron_lm\.simple_loop CHECKOUT",
        "tests/adapters/megatron_lm/test_simple_loop.py::test_it_loses_a_worker_and_is_equal",
    ),
    RunBy(
        r"python -m tests\.(?:tidy\.documents|tidy\.collected|faults\.mutants_page)",
        "tests/faults/test_proofs.py::test_the_page_has_the_declarations",
    ),
    RunBy(
        r"python -m benchmarks\.weight(?: FOLDER)?",
        "tests/bench/test_weight.py::test_the_command_prints_each_room_and_all",
    ),
    RunBy(
        r"python -m (?:benchmarks|tests\.(?:matrix|parted|schedulers|tidy\.upstream_digests)).*",
        reason="takes minutes or hours: its result file in benchmarks/ has the command, the commit"
        " and the date of the run; one of digests needs another release",
    ),
    RunBy(
        r"(?:\S+=\S+ )?make .*",
        reason="runs tests, which a test cannot contain; CONTRIBUTING.md has the last runs",
    ),
    RunBy(r"(?:python -m )?pytest .*", reason="runs tests"),
    RunBy(
        r"(?:pip install|git clone|python3 -m venv) .*",
        reason="an installer's, which needs a package index; .ci/run installs the package so",
    ),
    RunBy(
        r"kill -9(?: PID)?|tail -f .*|kill NODES",
        reason="of the system; tests send the same signal",
    ),
    RunBy(r"bash findings/NAME\.sh.*", reason="is run by `make findings`, with a package index"),
    RunBy(
        r"elaswave (?:run|plan|demo|status|drain|report|rehearse)(?: \.\.\.)?",
        "tests/cli/test_words.py::test_every_verb_refuses_an_option_that_it_has_not",
    ),
)


def pages() -> list[Path]:
    """List the pages and examples of which each command counts."""
    named = ("README.md", "CONTRIBUTING.md", "tests/README.md", "findings/README.md")
    examples = sorted((ROOT / "examples").rglob("*.*"))
    return [
        *(ROOT / name for name in named),
        *sorted((ROOT / "docs").glob("*.md")),
        *(one for one in examples if one.suffix in {".sh", ".sbatch"}),
    ]


def commands_of(path: Path) -> Iterator[str]:
    """Yield the commands of a page, in blocks without a language and in its text; of an example,
    those of its comments.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        lines = [line[1:] for line in text.splitlines() if line.startswith("#")]
        yield from _in_lines("\n".join(lines))
        return
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if not language:
            yield from _in_lines(block)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", outside):
        yield from INLINE.findall(" ".join(paragraph.split()))


def _in_lines(block: str) -> Iterator[str]:
    """Yield the lines that are commands, without what explains them behind two spaces."""
    for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
        command = re.split(r"\s{2,}(?=\S)", line.strip())[0]
        if COMMAND.fullmatch(command):
            yield command.partition(" # ")[0]


def entry_of(command: str) -> RunBy | None:
    """Return the first entry that is for a command."""
    return next((one for one in RUN_BY if re.fullmatch(one.words, command)), None)
