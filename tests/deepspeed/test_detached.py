"""A DeepSpeed script in which nothing attaches: its launcher says so once, and what it lacks."""

import json
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.deepspeed.test_launchers import DEEPSPEED, launched
from tests.faults.foreign_launchers import TORCHRUN, run_under
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SAYS = "trains without elaswave, and no loss will be survived"
OFF = json.dumps({"elaswave": {"enabled": False}})
OFF_SAYS = '"enabled" is false in the section "elaswave" of the DeepSpeed configuration'


def spec_of(settings: str = OFF, **changes: object) -> EngineSpec:
    return EngineSpec(nproc=2, steps=2, global_batch=4, settings=settings, **changes)


@proves(Kind.NOT_ATTACHED, Promise.NAMED)
@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (spec_of(), f"{OFF_SAYS}; set it to true"),
        (
            spec_of('{"elaswave": null}'),
            'the DeepSpeed configuration has no section "elaswave"; add "elaswave": {"enabled":',
        ),
        (
            spec_of(
                json.dumps({"optimizer": None, "scheduler": None}),
                script=str(SCRIPTS / "hf_trainer.py"),
                options=("--use-cpu", "--without-deepspeed"),
            ),
            "deepspeed.initialize was not called; have the script train with DeepSpeed",
        ),
    ],
    ids=["not enabled", "no section", "the Trainer without DeepSpeed"],
)
def test_what_is_missing_is_told_once(run: Launch, spec: EngineSpec, missing: str) -> None:
    trained = run(spec)
    assert trained.returncode == 0, trained.output[-3000:]
    assert trained.output.count(SAYS) == 1 and trained.output.count(missing) == 1
    assert not trained.orphans


@proves(Kind.NOT_ATTACHED, Promise.NAMED)
@pytest.mark.parametrize("launcher", sampled(["deepspeed", "torchrun"]))
def test_other_launchers_say_it_too(tmp_path: Path, launcher: str) -> None:
    port = free_port()
    command = {
        "deepspeed": (DEEPSPEED, "--num_gpus=2", f"--master_port={port}", "--module"),
        "torchrun": (*TORCHRUN, "--nproc-per-node=2", f"--master-port={port}", "-m"),
    }[launcher]
    trained = launched((*command, "elaswave_plugin.run"), spec_of(), tmp_path / "run")
    assert trained.returncode == 0, trained.output[-3000:]
    assert trained.output.count(f"{SAYS}: {OFF_SAYS}") == 1


@proves(Kind.NOT_ATTACHED, Promise.NAMED)
def test_a_launcher_that_knows_nothing_of_us_has_the_script_say_it(tmp_path: Path) -> None:
    command = (*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}")
    spec = spec_of()
    trained = run_under(
        (*command, str(SCRIPTS / "no_compiler.py")), spec, data=tmp_path, directory=tmp_path / "run"
    )
    assert trained.returncode == 0, trained.output[-3000:]
    assert trained.output.count(f"elaswave: nothing attaches: {OFF_SAYS}") == 1
