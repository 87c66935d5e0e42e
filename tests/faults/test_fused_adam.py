"""FusedAdam of Transformer Engine and of Apex: its state survives a loss as that of torch's Adam.

Both need a GPU. On a CPU stand-ins take their place (tests/stand_ins), which compute with torch's
own AdamW: a job that loses workers has to be, bit for bit, the undisturbed one with torch's. With
the stand-in of Transformer Engine its RNG tracker is used as well, which keeps generators.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import ROOT, JobSpec, check_equal
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled
from tests.session import Run, Zygotes

STAND_INS = ROOT / "tests" / "stand_ins"
PACKAGES = {"te": "transformer_engine", "apex": "apex"}
# Before the script: what its optimizer and its tracker are, and that they are these.
USES = """
import torch
from megatron.core import optimizer, tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
native, seed = optimizer.get_megatron_optimizer, tensor_parallel.model_parallel_cuda_manual_seed
def made(*args, **kwargs):
    found = native(*args, **kwargs)
    inner = found.chained_optimizers[0].optimizer
    assert type(inner).__module__.startswith({package!r}), type(inner)
    return found
def seeded(*args):
    seed(*args, te_rng_tracker={tracker})
    kinds = set(map(type, get_cuda_rng_tracker().states_.values()))
    assert kinds == {{torch.Generator if {tracker} else torch.Tensor}}, kinds
optimizer.get_megatron_optimizer = made
tensor_parallel.model_parallel_cuda_manual_seed = seeded
"""
# Whoever has counted the update when it is undone has to count it again.
DP4 = JobSpec(kills=("2@3:gather",))
# Three layers where there were two at launch, in groups that had as many parameters as two have.
MOVED = replace(PP2_DP2, options=(*PP2_DP2.options, "--num-layers=4"), kills=("0@3:backward",))
BF16 = JobSpec(options=("--bf16",), kills=("0@2:forward", "3@4:gather"))
TP2 = replace(TP2_PP2_DP2, kills=("5@3:backward",))


def uses(kind: str) -> str:
    """The statement that has a job use the package and assert it."""
    return USES.format(package=PACKAGES[kind], tracker=kind == "te")


@pytest.fixture(scope="module")
def with_stand_in(zygotes: Zygotes, run: Run) -> Callable[[str], Launch]:
    """Launch jobs that find a stand-in."""

    def of_kind(kind: str) -> Launch:
        zygote = zygotes(path=(STAND_INS / f"with_{kind}", STAND_INS))
        return lambda spec: run(replace(spec, sabotage=uses(kind)), zygote)

    return of_kind


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("kind", "spec"),
    sampled(
        [(kind, spec) for spec in (DP4, MOVED, BF16, TP2) for kind in PACKAGES],
        # Each kind needs a zygote of its own, which takes as long as two jobs.
    ),
)
def test_kill_with_a_stand_in_changes_nothing(
    with_stand_in: Callable[[str], Launch], reference: Reference, kind: str, spec: JobSpec
) -> None:
    check_equal(with_stand_in(kind)(spec), reference(spec))


def why_not(kind: str) -> str:
    """Why the real package of this kind cannot be used here; empty where it can."""
    if not torch.cuda.device_count():
        return "no CUDA device on this machine"
    if find_spec(PACKAGES[kind]) is None:
        return f"{PACKAGES[kind]} is not installed"
    if kind == "apex" and find_spec("transformer_engine"):
        return "Megatron-Core prefers transformer_engine, which is installed too"
    return ""


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.gpu
@pytest.mark.parametrize("kind", PACKAGES)
def test_kill_with_the_real_package_changes_nothing(
    run: Launch, reference: Reference, kind: str
) -> None:
    if reason := why_not(kind):
        pytest.skip(reason)
    spec = replace(DP4, sabotage=uses(kind))
    check_equal(run(spec), reference(spec))
