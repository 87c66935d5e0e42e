"""Losses with the model on GPUs: a shared one over CPU links, and one for each worker over NCCL."""

from dataclasses import replace

import pytest
import torch

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.proofs import Kind, Promise, proves

pytestmark = [
    pytest.mark.gpu,
    # device_count() asks NVML and leaves CUDA uninitialised: other tests fork from this process.
    pytest.mark.skipif(not torch.cuda.device_count(), reason="no CUDA device on this machine"),
]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("phase", ["backward", "gather"])
def test_kill_on_a_gpu_changes_nothing(run: Launch, reference: Reference, phase: str) -> None:
    spec = JobSpec(kills=(f"2@3:{phase}",))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA devices")
def test_a_pipeline_over_nccl(run: Launch, reference: Reference) -> None:
    """Two stages of two replicas: no sum has more than two terms, so that their order is none."""
    survived = run(replace(PP2_DP2, kills=("1@3:backward",)))
    check_equal(survived, reference(PP2_DP2))
    assert "GPU tensors go through NCCL" in survived.output
