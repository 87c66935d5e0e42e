"""The same loss with the model on a GPU; the workers share it and speak over CPU links."""

import pytest
import torch

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("phase", ["backward", "gather"])
def test_kill_on_a_gpu_changes_nothing(run: Launch, reference: Reference, phase: str) -> None:
    spec = JobSpec(kills=(f"2@3:{phase}",))
    check_equal(run(spec), reference(spec))
