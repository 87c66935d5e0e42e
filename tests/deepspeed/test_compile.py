"""Passes that torch.compile compiles go on after a loss, with the bits of the planned departure."""

import re
from dataclasses import replace

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.hf_runs import check_tapes, spec_of
from tests.deepspeed.test_join import BACK, STEPS, entered
from tests.deepspeed.test_pipeline import PP2_DP2, check_pipeline
from tests.faults import harness
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SCRIPT = str(SCRIPTS / "compiled.py")
AOT, INDUCTOR = "--backend=aot_eager", "--backend=inductor"
# A C++ compiler builds each kernel anew where nothing is cached: up to a minute a launch here.
COMPILERS_LIMIT_S = 400
# ZeRO stage, backend, who compiles, kill.
CASES = [
    (0, INDUCTOR, "engine", "1@2:backward"),
    (1, INDUCTOR, "engine", "0@3:reduce"),
    (2, INDUCTOR, "engine", "2@2:forward"),
    (3, AOT, "engine", "0@1:forward"),
    (2, AOT, "module", "3@2:gather"),
    (1, AOT, "blocks", "0@2:forward"),
    (2, AOT, "wrapped", "1@3:backward"),
]


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launch take as long as a cold cache needs.

    All launches share the machine's cache, so that the first one builds for all. Were it ended
    before, half a kernel would stay there, which torch 2.13 takes for a whole one ever after.
    """
    monkeypatch.setattr(harness, "RUN_LIMIT_S", float(COMPILERS_LIMIT_S))


def check_compiled(run: Outcome) -> None:
    """All that ended have compiled."""
    told = re.findall(r"compiled frames: (\d+)", run.output)
    assert told and all(map(int, told)), run.output[-4000:]


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.usefixtures("compilers")
@pytest.mark.timeout(COMPILERS_LIMIT_S)
@pytest.mark.parametrize(("stage", "backend", "how", "kill"), sampled(CASES))
def test_a_kill_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, stage: int, backend: str, how: str, kill: str
) -> None:
    options = (backend, f"--how={how}")
    spec = EngineSpec(script=SCRIPT, stage=stage, kills=(kill,), options=options, steps=5)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_compiled(killed)


@pytest.mark.slow  # 40 kernels, each of them built by a C++ compiler
@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:backward")
@pytest.mark.usefixtures("compilers")
@pytest.mark.timeout(3 * COMPILERS_LIMIT_S)
def test_kernels_of_a_cut_model_go_on(run: Launch, twin: Twin, reference: Launch) -> None:
    options = (INDUCTOR, "--how=engine")
    spec = EngineSpec(script=SCRIPT, stage=3, kills=("1@2:backward",), options=options, steps=5)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_compiled(killed)


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_who_comes_back_compiles_its_own(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    spec = EngineSpec(
        script=SCRIPT,
        stage=stage,
        steps=STEPS,
        respawn=5,
        kills=("1@2:backward",),
        changes=(f"+1@{BACK}",),
        options=(AOT,),
    )
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(1, 1, BACK)]
    check_compiled(killed)


@proves(Kind.KILL, Promise.PLANNED)
def test_a_pipeline_of_compiled_stages(run: Launch, twin: Twin, reference: Launch) -> None:
    options = (AOT, f"--script={PP2_DP2.script}")
    spec = replace(PP2_DP2, script=SCRIPT, options=options, kills=("1@3:forward",))
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    check_compiled(killed)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("stage", sampled([2, 3]))
def test_a_trainer_with_torch_compile(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    spec = spec_of("1@3:backward", stage=stage, options=("--compile=aot_eager",))
    killed = run(spec)
    undisturbed = reference(spec)
    check_recovered(killed, twin=twin(killed), reference=undisturbed)
    check_tapes(killed, undisturbed, survivors=3)
