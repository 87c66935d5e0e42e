"""Bad input to a real job: exit code 2, one sentence, nothing left running or in memory."""

import os
import re
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Launch
from tests.faults.harness import ROOT, JobSpec, Outcome, pids_of
from tests.proofs import Kind, Promise, proves

# Not only at the start of a line: a traceback of another worker may be under way.
SENTENCE = re.compile(r"elaswave(?: run)?: .*")
LITTLE_MEMORY = """
from elaswave_plugin.recovery import state_keeper
pool = state_keeper.SnapshotPool
state_keeper.SnapshotPool = lambda fds, **more: pool(fds, **{**more, "available_bytes": 1000})
"""
FILE_LIMIT = """
import resource
from elaswave_plugin.recovery import state_keeper
pool, limit = state_keeper.SnapshotPool, resource.getrlimit(resource.RLIMIT_FSIZE)
def limited(fds, **more):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        return pool(fds, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
state_keeper.SnapshotPool = limited
"""
CP_OF_TWO = """
from functools import partial
from megatron.core import parallel_state as state
state.initialize_model_parallel = partial(state.initialize_model_parallel, context_parallel_size=2)
"""
DDP_SETTING = """
from functools import partial
from megatron.core import distributed
distributed.DistributedDataParallelConfig = partial(
    distributed.DistributedDataParallelConfig, reduce_scatter_with_fp32_accumulation=True
)
"""
OTHER_SETTINGS = """
import os
from elaswave_plugin.config import ElasticConfig
given = ElasticConfig.of_the_job
if os.environ["RANK"] == "2":
    ElasticConfig.of_the_job = lambda self: {**given(self), "dataflow": "reroute"}
"""

# what is wrong: (the job, the value seen, what to do)
BAD: dict[str, tuple[JobSpec, str, str]] = {
    "value of a key": (
        JobSpec(options=("--elaswave-snapshot-copies=many",)),
        "'snapshot_copies' is 'many'",
        "wanted a valid integer",
    ),
    "choice of a key": (
        JobSpec(consistency="sure"),
        "'consistency' is 'sure'",
        "wanted 'exact' or 'fast'",
    ),
    "phase of a kill": (
        JobSpec(options=("--elaswave-kill=1@1:lunch",)),
        "'1@1:lunch'",
        "wanted one of data, forward",
    ),
    "uneven micro-batches": (
        JobSpec(options=("--micro-batch-size=3",)),
        "global batch size 8 is not a multiple of the micro-batch size 3",
        "change one of them",
    ),
    "more workers than micro-batches": (
        JobSpec(global_batch=2),
        "4 workers for 2 micro-batches",
        "use at most 2 workers",
    ),
    "micro-batches that cannot be dealt evenly": (
        JobSpec(global_batch=6),
        "6 micro-batches a step cannot be dealt evenly to 4 workers",
        "make the global batch a multiple of 4",
    ),
    "layers of one stage": (
        JobSpec(options=("--tensor-model-parallel-size=2", "--elaswave-move-layers=always")),
        "move_layers is always",
        "cannot change stage here: there is one pipeline stage; leave it out",
    ),
    "kill of no worker": (JobSpec(kills=("4@2",)), "kill 4@2:backward", "wanted 0 to 3"),
    "change of no worker": (JobSpec(changes=("7@2",)), "change 7@2", "wanted 0 to 3"),
    "little memory": (
        JobSpec(sabotage=LITTLE_MEMORY),
        "1000 are available",
        "turn snapshots off with --elaswave-snapshots",
    ),
    "a limit below a snapshot": (
        JobSpec(sabotage=FILE_LIMIT),
        "and may have 100000 (File too large)",
        "raise `ulimit -f`",
    ),
    "context parallel": (
        JobSpec(sabotage=CP_OF_TWO),
        "context_parallel_size is 2",
        "carries 1: sequences",
    ),
    "settings of one worker": (
        JobSpec(sabotage=OTHER_SETTINGS),
        "dataflow is 'auto' for worker 0 and 'reroute' for worker 2",
        "give every worker of a job the same settings",
    ),
    "setting of the DDP": (
        JobSpec(sabotage=DDP_SETTING),
        "reduce_scatter_with_fp32_accumulation is True",
        "carries False: it sums by an all-to-all of its own",
    ),
}


@pytest.fixture(autouse=True)
def shared_memory_stays_clean() -> object:
    """Nothing that a job made is left where POSIX shared memory lives."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert not set(os.listdir("/dev/shm")) - before


def check_refused(run: Outcome, *wanted: str, code: int = 2) -> None:
    """Assert the exit code, one sentence of ours that holds the words, and that nothing is left."""
    assert run.returncode == code, run.output[-4000:]
    sentences = [match[0] for match in SENTENCE.finditer(run.output)]
    assert len(sentences) == 1, run.output[-4000:]
    missing = [words for words in wanted if words not in sentences[0]]
    assert not missing, sentences[0]
    assert not run.orphans


def check_silent_otherwise(run: Outcome) -> None:
    """Assert that the sentence is all there is."""
    assert len(run.output.strip().splitlines()) == 1, run.output[-4000:]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(("spec", "seen", "wanted"), BAD.values(), ids=BAD.keys())
def test_bad_setting_costs_one_sentence(run: Launch, spec: JobSpec, seen: str, wanted: str) -> None:
    refused = run(replace(spec, dump="never"))
    check_refused(refused, seen, wanted)
    check_silent_otherwise(refused)
    # The workers did run; otherwise that none of them is left would mean little.
    assert len(pids_of(refused.directory)) > 0


# As a checkpoint is loaded into a model whose state has been sealed for an evaluation.
LOADED_LATE = """
import torch
from elaswave_plugin.adapters.megatron.job import ElasticJob
bind = ElasticJob.bind
def then_load(self, model, *args, **kwargs):
    bind(self, model, *args, **kwargs)
    self.run(lambda: None, phase="a look at the model")
    with torch.no_grad():
        next(model[0].parameters()).add_(1.0)
ElasticJob.bind = then_load
"""


@proves(Kind.WRONG_SCRIPT, Promise.NAMED, victim="1", moment="1:backward")
def test_weights_that_are_loaded_after_the_first_work_are_refused(run: Launch) -> None:
    refused = run(JobSpec(sabotage=LOADED_LATE, kills=("1@1:backward",)))
    assert refused.returncode == 2, refused.output[-3000:]
    (sentence,) = re.findall(SENTENCE, refused.output)[-1:]
    assert "load a checkpoint before that call" in sentence
    assert "Traceback" not in refused.output and not refused.orphans


@proves(Kind.NOTHING, Promise.SAME)
def test_control_a_good_job_is_not_refused(run: Launch) -> None:
    good = run(JobSpec(steps=3, dump="never"))
    with pytest.raises(AssertionError):
        check_refused(good)
    assert good.returncode == 0 and len(pids_of(good.directory)) == 8 and not good.orphans


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_unknown_option_is_named_by_the_scripts_own_parser(run: Launch) -> None:
    refused = run(JobSpec(options=("--frobnicate=7",)))
    check_refused(refused, "exit code 2")
    assert "unrecognized arguments: --frobnicate=7" in refused.output
    assert "Traceback" not in refused.output


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("text", "seen", "wanted"),
    [
        ("[elaswave]\nfrobnicate = 7\n", "unknown key 'frobnicate' (value 7)", "wanted one of"),
        ("frobnicate =\n", "is no TOML", ""),
        (None, "cannot be read", "give a readable TOML file"),
    ],
    ids=["unknown key", "no TOML", "no file"],
)
def test_bad_file_costs_one_sentence(
    run: Launch, tmp_path: Path, text: str | None, seen: str, wanted: str
) -> None:
    path = tmp_path / "job.toml"
    if text is not None:
        path.write_text(text)
    refused = run(JobSpec(options=(f"--elaswave-config={path}",)))
    check_refused(refused, str(path), seen, wanted)
    check_silent_otherwise(refused)


@proves(Kind.WRONG_SCRIPT, Promise.NAMED)
def test_missing_data_is_the_scripts_own_error(run: Launch, tmp_path: Path) -> None:
    failed = run(JobSpec(options=(f"--data-path={tmp_path / 'nowhere'}",)))
    assert failed.returncode == 1 and not failed.orphans, failed.output[-4000:]
    said = f"cannot be found at the path prefix {tmp_path / 'nowhere'}"
    last = failed.output.splitlines()[-1]
    assert re.match(
        f"elaswave: the job stops: worker . failed before the first step: .*{said}", last
    )
    # In the traceback, and in the sentence.
    assert failed.output.count(said) == 2


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_taken_port_costs_one_sentence(run: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run(JobSpec(launcher=(f"--master-port={port}",)))
    check_refused(refused, f"127.0.0.1:{port} (Address already in use)", "a free port")
    check_silent_otherwise(refused)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("content", "seen", "wanted"),
    [
        ("", "holds no text", "name a fuller one"),
        ("short", "has 6 tokens", "wanted at least 1025: one step takes 8 samples of 128"),
        (None, "does not exist", "name a file or folder"),
    ],
    ids=["empty", "less than a step", "absent"],
)
def test_bad_text_of_the_demo_costs_one_sentence(
    tmp_path: Path, content: str | None, seen: str, wanted: str
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_text(content)
    demo_refuses(path, tmp_path / "out", seen, wanted)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_unreadable_text_of_the_demo_costs_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "text"
    os.mknod(path, stat.S_IFSOCK | 0o600)  # nobody can open one, not even root
    demo_refuses(path, tmp_path / "out", "cannot be read", "name one that can")


def demo_refuses(text: Path, out: Path, *wanted: str) -> None:
    """Run `elaswave demo` on a text that it has to refuse."""
    command = [sys.executable, "-m", "elaswave_plugin.cli.main", "demo"]
    command += ["--text", str(text), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("elaswave: ") and str(text) in done.stderr
    assert all(words in done.stderr for words in wanted), done.stderr
    assert not out.exists()
