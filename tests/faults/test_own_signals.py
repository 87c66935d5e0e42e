"""A script that handles SIGTERM itself: its handler is called in all workers at the same step."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.harness import JobSpec, Outcome, Zygote, left_alive, pids_of, started
from tests.faults.test_last_checkpoint import SAVE_S, completed_once
from tests.faults.test_signals import wait_for_step
from tests.proofs import Kind, Promise, proves

MAIN = "    job = elaswave.attach(args)  # [elastic] 3\n"
# As many scripts have it: a flag that the loop looks at; and an end at once.
INSTALL = "    signal.signal(signal.SIGTERM, on_sigterm)\n"
FLAG = """TOLD = []


def on_sigterm(number, frame):
    TOLD.append(number)


"""
GOES_ON = """def on_sigterm(number, frame):
    print(f"process {os.getpid()} ends", flush=True)


"""
ENDS = """def on_sigterm(number, frame):
    print(f"process {os.getpid()} ends", flush=True)
    raise SystemExit(0)


"""
ENDED = re.compile(r"process \d+ ends")
LOOK = own_scripts.in_body(
    "        if TOLD:\n"
    '            print(f"told before step {iteration} ends", flush=True)\n'
    "            job.run(save, phase='save')\n"
    "            break\n"
)
END = '\n\nif __name__ == "__main__":\n'
LEAVE = (END, "    job.finish()\n" + END)
IMPORT = ("import torch\n", "import signal\n\nimport torch\n")


def told(spec: JobSpec, *, zygote: Zygote, data: Path, directory: Path, to_all: bool) -> Outcome:
    """The job, which is told to end in its middle, as the launcher or all processes hear it."""
    with started(spec, zygote=zygote, data=data, directory=directory) as (launcher,):
        wait_for_step(directory, 3)
        for pid in pids_of(directory) if to_all else ():
            os.kill(pid, signal.SIGTERM)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SAVE_S) == 128 + signal.SIGTERM
    output = (directory / "output").read_text()
    assert left_alive(pids_of(directory), limit_s=10.0) == ()
    assert "Traceback" not in output
    return Outcome(spec=spec, directory=directory, returncode=0, output=output, seconds=0)


LONG = JobSpec(steps=60, dump="never", launcher=(f"--notice-timeout-s={SAVE_S:g}",))


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_flag_of_the_scripts_own_is_set_at_one_step(
    zygote: Zygote, data: Path, tmp_path: Path, order: str
) -> None:
    """Installed before it joins, or after; all processes hear the signal, each at its moment."""
    install = INSTALL + MAIN if order == "before" else MAIN + INSTALL
    changes = (IMPORT, own_scripts.before_model(FLAG), (MAIN, install), LOOK, LEAVE)
    script = own_scripts.write(
        tmp_path, *changes, ("last = save if args.save else None", "last = None")
    )
    folder = tmp_path / "saved"
    spec = replace(LONG, script=script, options=(f"--save={folder}",))
    run = told(spec, zygote=zygote, data=data, directory=tmp_path / "run", to_all=True)
    done = completed_once(run)
    assert run.output.count(f"told before step {done - 1} ends") == 4
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(done)
    assert run.output.count("the script's own handler of SIGTERM, on_sigterm (") == 1


@proves(Kind.ALL_LEAVE, Promise.ENDS_WELL)
def test_one_that_ends_the_script_ends_all_at_one_step(
    zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    changes = (IMPORT, own_scripts.before_model(ENDS), (MAIN, MAIN + INSTALL))
    spec = replace(LONG, script=own_scripts.write(tmp_path, *changes))
    run = told(spec, zygote=zygote, data=data, directory=tmp_path / "run", to_all=True)
    completed_once(run)
    assert len(ENDED.findall(run.output)) == 4
    assert {one["status"] for one in run.events("worker_exited")} == {"exit code 0"}


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
def test_one_that_ends_nothing_is_ended_when_its_time_is_over(
    zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    changes = (IMPORT, own_scripts.before_model(GOES_ON), (MAIN, MAIN + INSTALL))
    script = own_scripts.write(tmp_path, *changes)
    spec = replace(LONG, steps=2000, script=script, launcher=("--notice-timeout-s=3",))
    run = told(spec, zygote=zygote, data=data, directory=tmp_path / "run", to_all=True)
    # Once where all are told, and once more where each has to end.
    assert len(ENDED.findall(run.output)) == 8
    assert {one["status"] for one in run.events("worker_exited")} == {"killed by SIGKILL"}


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
def test_the_jobs_last_checkpoint_takes_its_place(
    zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    changes = (IMPORT, own_scripts.before_model(ENDS), (MAIN, INSTALL + MAIN))
    spec = replace(
        LONG,
        script=own_scripts.write(tmp_path, *changes),
        options=(f"--save={tmp_path / 'saved'}",),
    )
    run = told(spec, zygote=zygote, data=data, directory=tmp_path / "run", to_all=True)
    done = completed_once(run)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == str(done)
    assert not ENDED.search(run.output)
    assert "own handler of it, on_sigterm (" in run.output
