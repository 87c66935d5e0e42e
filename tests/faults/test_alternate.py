"""A job whose plugin is half on and half off in turn: the measuring wrapper does what it says."""

import re
from dataclasses import replace

import pytest

from benchmarks.overhead import cpu_times_s
from elaswave_plugin.observer.blocks import step_times_s
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_survived
from tests.proofs import Kind, Promise, proves

STEPS = 32
PLAIN = JobSpec(nproc=2, steps=STEPS, dump="last")
SAY_SEALS = """
from elaswave_plugin.trainer import member
from elaswave_plugin.snapshot import snapshot_pool
seal, wait = snapshot_pool.SnapshotPool.begin_seal, member.Member.wait_copied
def tell(word, step):
    import os
    os.write(1, f"<{word} {step}>\\n".encode())
def seal_and_tell(self, **options):
    tell("sealed", options["step"])
    return seal(self, **options)
def wait_and_tell(self, step, timeout_s):
    tell("awaited", step)
    return wait(self, step, timeout_s)
snapshot_pool.SnapshotPool.begin_seal, member.Member.wait_copied = seal_and_tell, wait_and_tell
"""
SAY_NORMS = """
from elaswave_plugin.adapters.megatron.compat import patches
from megatron.core.optimizer import optimizer
exact, native = patches.canonical_norm, optimizer.get_grad_norm_fp32
def tell(word):
    import os
    os.write(1, f"<{word} 0>\\n".encode())
def exact_and_tell(*options):
    tell("exact")
    return exact(*options)
def native_and_tell(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
    tell("native")
    return native(grads_for_norm, norm_type, grad_stats_parallel_group)
patches.canonical_norm, optimizer.get_grad_norm_fp32 = exact_and_tell, native_and_tell
"""


def told(output: str, word: str) -> list[int]:
    """The numbers behind a word, in order, of all workers; they may stand within others' lines."""
    return sorted(int(number) for number in re.findall(rf"<{word} (\d+)>", output))


@proves(Kind.NOTHING, Promise.EQUAL)
def test_snapshots_are_sealed_and_awaited_in_on_blocks_only(
    run: Launch, reference: Reference
) -> None:
    # On two nodes: within one the buffers are handed over only once.
    turned = run(replace(PLAIN, nodes=2, alternate="snapshots", sabotage=SAY_SEALS))
    check_survived(turned)
    # The state after step s is sealed as s + 1: steps 0 to 9, 20 to 29; and the initial one.
    assert told(turned.output, "sealed") == sorted([0, *range(1, 11), *range(21, 31)] * 2)
    assert told(turned.output, "awaited") == sorted([*range(0, 10), *range(21, 30)] * 2)
    assert turned.trace() == reference(PLAIN).trace()
    times, cpu = step_times_s(turned.files), cpu_times_s(turned.files, "trainer")
    assert (len(times.on), len(times.off)) == (len(cpu.on), len(cpu.off)) == (17, 10)
    agents = cpu_times_s(turned.files, "agent")
    assert sum(cpu.on) > 0 and sum(cpu.off) > 0 and sum(agents.on) > sum(agents.off) >= 0


@proves(Kind.NOTHING, Promise.EQUAL)
def test_the_norm_is_exact_in_on_blocks_only(run: Launch, reference: Reference) -> None:
    turned = run(replace(PLAIN, alternate="consistency", sabotage=SAY_NORMS))
    check_survived(turned)
    # Steps 0 to 9, 20 to 29 and 10 to 19, 30 to 31.
    assert len(told(turned.output, "exact")) == 2 * 20
    assert len(told(turned.output, "native")) == 2 * 12
    norms = [
        [record["grad_norm"] for record in sorted(one.files.steps, key=lambda r: r["step"])]
        for one in (turned, reference(PLAIN))
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_fast_mode_cannot_be_alternated(run: Launch) -> None:
    refused = run(JobSpec(nproc=2, consistency="fast", alternate="consistency"))
    assert refused.returncode == 2
    assert refused.output.count("\n") == 1
    assert "consistency is 'fast' in a job that alternates it" in refused.output
