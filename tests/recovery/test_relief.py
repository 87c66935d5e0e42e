"""The answer to an allocator's error: less work, the end of the job, or none of ours."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from elaswave_plugin.core.layout.worker_facts import OutOfMemory, WorkerFacts
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement
from elaswave_plugin.core.step.dataflow import deal, share
from elaswave_plugin.errors import ConfigurationError, EpochChanged, TooLittleMemoryError
from elaswave_plugin.recovery.relief import Relief, words_of

# More than any machine can address.
TOO_MUCH = 1 << 50
OF_CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of"
    " which 1.25 GiB is free. Including non-PyTorch memory, this process has 77.9 GiB in use."
)


class Job:
    """One worker of a job of three at its launch, and what it has said."""

    def __init__(self, live: tuple[int, ...], *, deal_by: Any = share, **work: int) -> None:
        self.said: list[str] = []
        launch = (0, 1, 2)
        placement = FlatPlacement(launch_slots=launch, ranks=live)
        self.worker: Any = SimpleNamespace(
            slot=1,
            completed=3,
            detached=False,
            launch_slots=launch,
            view=SimpleNamespace(ranks=live, epoch=2),
            placement=placement,
            deal=lambda **over: deal_by(**work, **over),
            events=SimpleNamespace(emit=lambda kind, **_: self.said.append(kind)),
            config=SimpleNamespace(transfer_timeout_s=1.0),
            member=SimpleNamespace(
                severed=lambda epoch, evidence: self.said.append(evidence),
                await_proposal=self._proposed,
                progress_page=SimpleNamespace(waiting=lambda what: nullcontext()),
            ),
        )
        self.relief = Relief(self.worker)
        self.worker.dataflow = self.relief.deal()

    @staticmethod
    def _proposed(timeout_s: float) -> NoReturn:
        raise EpochChanged(3)

    def run_out(self) -> None:
        self.relief.step(_too_much)

    def renew(self, live: tuple[int, ...]) -> None:
        """Have a view of these members, in which this worker has told what it knows."""
        facts = {slot: WorkerFacts(address="") for slot in live}
        facts[1] = WorkerFacts(address="", out_of_memory=self.relief.told)
        self.worker.view = SimpleNamespace(ranks=live, epoch=self.worker.view.epoch + 1)
        limits = self.relief.learn(facts, live)
        self.worker.placement = FlatPlacement(launch_slots=(0, 1, 2), ranks=live).within(limits)
        self.worker.dataflow = self.relief.deal()

    @property
    def size(self) -> int:
        start, stop = self.worker.dataflow.interval(1)
        return stop - start


def _too_much() -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def test_allocators_are_understood() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        _too_much()
    assert str(words_of(of_torch.value)).startswith(f"{TOO_MUCH} bytes wanted, ")
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(TOO_MUCH, dtype=np.uint8)
    assert str(words_of(of_numpy.value)).startswith("1.00 PiB wanted, ")
    of_cuda = torch.OutOfMemoryError(OF_CUDA)
    assert words_of(of_cuda) == "2.00 GiB wanted, 1.25 GiB free on its device"
    assert words_of(RuntimeError("shape '[2, 3]' is invalid")) is None
    assert words_of(ValueError("cannot allocate 3 seats")) is None


def test_a_share_beyond_that_of_the_launch_gets_smaller_until_it_is_no_larger() -> None:
    job = Job((0, 1), num_samples=24)
    found = [job.size]
    for _ in range(3):
        with pytest.raises(EpochChanged):
            job.run_out()
        job.renew((0, 1))
        found.append(job.size)
    assert found == [12, 10, 9, 8]
    evidence = job.said[1]
    assert job.said[0] == "out_of_memory" and len(job.said) == 6
    assert evidence.startswith(f"worker 1 ran out of memory ({TOO_MUCH} bytes wanted, ")
    # It runs out all the same: what is left beside its share is no work that could be dealt.
    with pytest.raises(TooLittleMemoryError, match=r"step 3, in a job of 2 workers \(\d+ bytes "):
        job.run_out()


def test_a_limit_counts_until_there_are_more_workers_and_again_after_them() -> None:
    job = Job((0, 1), num_samples=24)
    with pytest.raises(EpochChanged):
        job.run_out()
    job.renew((0, 1))
    assert job.size == 10
    job.renew((0, 1, 2))
    assert job.size == 8 and "most" not in job.worker.placement.dealt_over
    job.renew((1, 2))
    assert job.size == 10


def test_where_all_together_have_too_little_the_job_ends() -> None:
    job = Job((0, 1), num_samples=24)
    told = OutOfMemory(most=1.25, width=2, words="2.00 GiB wanted, 1.25 GiB free on its device")
    facts = {slot: WorkerFacts(address="", out_of_memory=told) for slot in (0, 1)}
    limits = job.relief.learn(facts, (0, 1))
    job.worker.placement = job.worker.placement.within(limits)
    ends = r"24 samples, and the 2 workers .* for 20 \(worker 0: 2.00 GiB wanted, .*; restart from"
    with pytest.raises(TooLittleMemoryError, match=ends):
        job.relief.deal()


def test_what_no_deal_makes_less_ends_the_job() -> None:
    job = Job((0, 1), deal_by=deal, num_microbatches=6)
    with pytest.raises(TooLittleMemoryError, match="no more samples in flight than at the launch"):
        job.run_out()
    with pytest.raises(TooLittleMemoryError, match=r"\d+ bytes wanted, .* free on its node"):
        job.relief.recovery(_too_much)
    assert not job.said and job.relief.told is None


@pytest.mark.parametrize("kind", [share, deal])
def test_at_the_launchs_share_the_error_is_the_scripts_own(kind: Any) -> None:
    work = {"num_samples": 24} if kind is share else {"num_microbatches": 6}
    job = Job((0, 1, 2), deal_by=kind, **work)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        job.run_out()
    # So it is on a worker that has not entered yet, whose loss the others do not feel.
    job.worker.view.ranks, job.worker.detached = (0, 1), True
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        job.run_out()
    assert not job.said


def test_other_errors_pass() -> None:
    job = Job((0, 1), num_samples=24)

    def fail() -> None:
        raise RuntimeError("shape '[2, 3]' is invalid")

    for verb in (job.relief.step, job.relief.recovery):
        with pytest.raises(RuntimeError, match="shape"):
            verb(fail)

    def refuse() -> None:
        raise ConfigurationError("DefaultCPUAllocator: no")

    with pytest.raises(ConfigurationError):
        job.relief.step(refuse)
