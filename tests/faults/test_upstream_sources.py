"""Another source of what the adapters re-implement is said once, and the job goes on."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec
from tests.faults.hybrid_matrix import TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves

OTHER = (
    "from elaswave_plugin.adapters import reimplemented as r; "
    "r.{table} = tuple((*row[:2], (('0', '0.16.1'),)) for row in r.{table}[:1])"
)
SAID = "the source is that of no known release: "


@proves(Kind.NOTHING, Promise.EQUAL)
@pytest.mark.parametrize(
    ("spec", "table", "name"),
    [
        (JobSpec(steps=3), "MEGATRON", "DistributedDataParallel.__init__ (re-implemented in"),
        (
            replace(TP2_PP2_DP2, steps=3),
            "MEGATRON_STAGES",
            "forward_backward_pipelining_without_interleaving (re-implemented in",
        ),
    ],
    ids=["data parallel", "stages"],
)
def test_another_source_is_said_once(
    run: Launch, reference: Reference, spec: JobSpec, table: str, name: str
) -> None:
    known, other = reference(spec), run(replace(spec, sabotage=OTHER.format(table=table)))
    assert other.returncode == 0, other.output[-4000:]
    assert (known.output.count(SAID), other.output.count(SAID)) == (0, 1)
    (line,) = [line for line in other.output.splitlines() if SAID in line]
    assert name in line and "known: 0.16.1)" in line
    assert other.trace() == known.trace()
