"""A buffer that passes change is not carried in Megatron-LM's scripts: it is refused by name."""

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import NO_EVALUATION, ScriptSpec, needs_repository
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]


@proves(Kind.NOTHING, Promise.REFUSED)
def test_a_buffer_that_passes_change_is_refused_by_name(run_changed: Launch) -> None:
    counts = run_changed(ScriptSpec(options=(*NO_EVALUATION, "--count", "passes")))
    assert counts.returncode == 2, counts.output[-4000:]
    said = [line for line in counts.output.splitlines() if "changes the model's buffer" in line]
    assert said and all("passes'" in line and "Megatron-LM's scripts" in line for line in said)
    assert "Traceback" not in counts.output
