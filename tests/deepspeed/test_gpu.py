"""DeepSpeed workers that share a GPU: compiled passes go on after a loss, slow passes are seen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EXAMPLE, FP32_BOUND, EngineSpec, check_recovered
from tests.deepspeed.test_compile import INDUCTOR, SCRIPT, check_compiled
from tests.deepspeed.test_slow import SLOW, SLOWED, SPEC
from tests.faults.harness import check_survived, max_relative_difference
from tests.gpu import first_gpu
from tests.proofs import Kind, Promise, proves

pytestmark = [
    pytest.mark.gpu,
    # device_count() asks NVML and leaves CUDA uninitialised: other tests fork from this process.
    pytest.mark.skipif(not torch.cuda.device_count(), reason="no CUDA device on this machine"),
]


def on_the_first(spec: EngineSpec, script: str) -> EngineSpec:
    """The launch with all its workers on one GPU."""
    options = (f"--script={script}", *spec.options)
    return replace(spec, script=str(Path(first_gpu.__file__)), options=options)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_kernels_go_on(run: Launch, twin: Twin, reference: Launch, stage: int) -> None:
    spec = EngineSpec(stage=stage, kills=("1@2:backward",), options=(INDUCTOR,), steps=5)
    spec = on_the_first(spec, SCRIPT)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_compiled(killed)


@proves(Kind.SLOW, Promise.CLOSE)
def test_slow_passes_are_seen_and_get_less(run: Launch) -> None:
    spec = on_the_first(SPEC, str(EXAMPLE))
    slowed = run(replace(spec, slow_workers="act", sabotage=SLOWED))
    check_survived(slowed)
    assert max_relative_difference(slowed, run(spec)) < FP32_BOUND
    assert {event["slot"] for event in slowed.events("slow_worker")} == {SLOW}
    assert slowed.events("view_committed")[1]["reason"].startswith("less work for what is slow")
