"""The processes of a loader read ahead: the same samples, before a loss and after it."""

from types import SimpleNamespace

import pytest
import torch

from elaswave_plugin.adapters.deepspeed.engine.attached import AttachedEngine
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader, GlobalOrder
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import check_recovered
from tests.deepspeed.hf_runs import spec_of
from tests.faults.harness import max_relative_difference
from tests.proofs import Kind, Promise, proves


class Told(torch.utils.data.Dataset[tuple[int, bool, float]]):
    """Its samples say whether another process has read them, and draw a number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[int, bool, float]:
        elsewhere = torch.utils.data.get_worker_info() is not None
        return number, elsewhere, float(torch.rand(()))


Sample = tuple[int, bool, float]


def order_of_two() -> GlobalOrder:
    """The order of two replicas with two samples each."""
    return GlobalOrder(
        24, num_replicas=2, micro_batch_size=2, shuffle=True, seed=3, drop_last=False
    )


def loader_of(num_workers: int, *, seed: int = 0) -> ElasticLoader:
    """A loader of them, in a job of this seed."""
    like = torch.utils.data.DataLoader[Sample](Told(), num_workers=num_workers)
    return ElasticLoader(
        None,  # type: ignore[arg-type]
        Told(),
        order_of_two(),
        collate=list,
        like=like,
        seed=seed,
    )


def epoch_of(loader: ElasticLoader, share: tuple[int, int]) -> list[Sample]:
    """All samples of a worker's shares of an epoch."""
    iter(loader)
    found: list[Sample] = []
    for _ in range(len(loader)):
        found += loader.read(loader.items(), share)[1]
    return found


def drawn_by(samples: list[Sample]) -> dict[int, float]:
    """The draw of each sample."""
    return {number: drawn for number, _, drawn in samples}


def test_processes_read_the_shares_of_a_worker() -> None:
    ahead, here = loader_of(1), loader_of(0)
    for share in ((0, 2), (1, 4)):
        found, wanted = epoch_of(ahead, share), epoch_of(here, share)
        assert [number for number, _, _ in found] == [number for number, _, _ in wanted]
        assert any(elsewhere for _, elsewhere, _ in found)
        assert not any(elsewhere for _, elsewhere, _ in wanted)


def test_draws_go_by_the_seed_in_any_process_and_the_script_has_its_own() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(2)
    torch.manual_seed(7)
    found = [drawn_by(epoch_of(loader_of(number), (0, 2))) for number in (0, 1, 2)]
    assert found[0] == found[1] == found[2]
    assert torch.equal(torch.rand(2), wanted)
    of_another_seed = drawn_by(epoch_of(loader_of(1, seed=1), (0, 2)))
    assert not {*of_another_seed.values()} & {*found[0].values()}


def test_the_loader_of_a_job_draws_by_its_seed() -> None:
    worker = SimpleNamespace(detached=False)
    framework = SimpleNamespace(loader=None)
    job = SimpleNamespace(
        _worker=worker, _framework=framework, _reader=None, _took_loader=lambda _: None, _seed=5
    )
    taken = AttachedEngine.take_order(
        job,  # type: ignore[arg-type]
        Told(),
        order_of_two,
        collate=list,
    )
    assert drawn_by(epoch_of(taken, (0, 2))) == drawn_by(epoch_of(loader_of(0, seed=5), (0, 2)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_draws_the_same_in_a_share_of_another_size(num_workers: int) -> None:
    whole = drawn_by(epoch_of(loader_of(num_workers), (0, 4)))
    assert len(whole) == 24
    for share in ((0, 2), (1, 4))[num_workers:]:
        assert drawn_by(epoch_of(loader_of(num_workers), share)).items() < whole.items()


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_trainer_with_processes_survives(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    options = ("--num-workers=2",)
    killed = run(spec_of("1@3:backward", stage=stage, steps=6, options=options))
    undisturbed = reference(spec_of(stage=stage, steps=6, options=options))
    check_recovered(killed, twin=twin(killed), reference=undisturbed)
    assert max_relative_difference(undisturbed, reference(spec_of(stage=stage, steps=6))) == 0
