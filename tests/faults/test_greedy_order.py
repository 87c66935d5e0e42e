"""After a loss in the first stage operations go in greedy order: to the last bit alike."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import check_equal
from tests.faults.hybrid_matrix import PP4_DP2
from tests.proofs import Kind, Promise, proves

# Micro-batches of which the narrow first stage makes the others wait, by the window rule.
SPEC = replace(PP4_DP2, global_batch=10, options=(*PP4_DP2.options, "--elaswave-move-layers=never"))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("split_backward", ["never", "always"])
@pytest.mark.parametrize("kill", ["0@3:forward", "1@2:reduce"])
def test_a_greedy_order_changes_no_bit(
    run: Launch, reference: Reference, kill: str, split_backward: str
) -> None:
    option = f"--elaswave-split-backward={split_backward}"
    survived = run(replace(SPEC, options=(*SPEC.options, option), kills=(kill,)))
    check_equal(survived, reference(SPEC))
    recoveries = survived.events("recovered")
    assert len(recoveries) == SPEC.nproc - 1
    assert all(event["greedy_order"] for event in recoveries)
    assert all(event["split_backward"] == (split_backward == "always") for event in recoveries)
