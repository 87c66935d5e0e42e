"""The canonical norm: one value, to the bit, for any cut, order and number of ranks."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.adapters import grad_norm
from elaswave_plugin.adapters.grad_norm import canonical_norm
from tests.communicator.forked import Peer, Workers

NUMEL = 50_021
WIDTHS = (1, 2, 3, 4)
Cut = list[list[torch.Tensor]]
Norm = Callable[[Iterable[torch.Tensor], dist.ProcessGroup], float]


def gradients(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over twelve orders of magnitude, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 4, (NUMEL,), generator=generator)
    values = torch.randn(NUMEL, generator=generator, dtype=torch.float64) * 10.0**exponents
    values[::97], values[1::97] = 0.0, -0.0
    return values.to(dtype)


def cut(whole: torch.Tensor, seed: int, width: int, *, shuffled: bool = True) -> Cut:
    """The elements in another order, cut into tensors of any sizes, dealt to `width` ranks."""
    generator = torch.Generator().manual_seed(seed)
    if shuffled:
        whole = whole[torch.randperm(NUMEL, generator=generator)]
    count = int(torch.randint(1, 12, (1,), generator=generator))
    # Bounds may meet, so that some tensors, and some ranks, have no element at all.
    inner = torch.randint(0, NUMEL, (count,), generator=generator).sort().values.tolist()
    bounds = [0, *inner, inner[-1], NUMEL]
    ranks: Cut = [[] for _ in range(width)]
    for index, (start, stop) in enumerate(pairwise(bounds)):
        piece = whole[start:stop]
        if piece.numel() % 2 == 0:
            piece = piece.reshape(2, -1).t()  # another shape, not contiguous
        ranks[(index + seed) % width].append(piece)
    return ranks


def norms(
    folder: Path,
    width: int,
    cuts: Sequence[Cut],
    *,
    chunks: Sequence[int] = (grad_norm._CHUNK_CPU,),
    norm: Norm = canonical_norm,
    engine: str = "gloo",
) -> set[float]:
    """The values that `norm` takes for the cuts, on `width` ranks that all have to agree."""

    def body(peer: Peer) -> None:
        if engine == "gloo":
            store = dist.FileStore(str(folder / f"store-{width}"), width)
            limit = timedelta(seconds=30)
            dist.init_process_group(
                "gloo", store=store, rank=peer.slot, world_size=width, timeout=limit
            )
        else:
            peer.install()
        assert dist.group.WORLD is not None
        found = []
        for one in cuts:
            for chunk in chunks:
                grad_norm._CHUNK_CPU = chunk  # type: ignore[misc]
                found.append(norm(one[peer.slot], dist.group.WORLD))
        peer.tell(found)
        dist.barrier()

    with Workers(width, body) as workers:
        if engine != "gloo":
            workers.commit(1, range(width))
        said = workers.hear_all()
        workers.join()
    assert len(said) == width
    assert len({tuple(map(float.hex, found)) for found in said.values()}) == 1
    return set(said[0])


def summed_norm(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> float:
    """The control: a sum of norms of pieces, as frameworks compute it."""
    square = sum((torch.norm(one.reshape(-1)) ** 2 for one in tensors), torch.zeros(()))
    dist.all_reduce(square, group=group)
    return float(square.sqrt())


def double_norm(whole: torch.Tensor) -> float:
    """The exact sum of the squares, rounded once, and its root."""
    return math.sqrt(math.fsum(value * value for value in whole.double().tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_is_one_value_for_every_cut_order_chunk_and_width(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    whole = gradients(1, dtype)
    found: set[float] = set()
    for width in WIDTHS:
        cuts = [cut(whole, seed, width) for seed in range(5)]
        found |= norms(tmp_path, width, cuts, chunks=(grad_norm._CHUNK_CPU, 1000, 4097))
    assert len(found) == 1
    assert found.pop() == pytest.approx(double_norm(whole), rel=1e-12, abs=0.0)


def test_norm_control_a_sum_of_norms_depends_on_the_cut(tmp_path: Path) -> None:
    cuts = [cut(gradients(1), seed, 3) for seed in range(5)]
    assert len(norms(tmp_path, 3, cuts, norm=summed_norm)) > 1


@contextmanager
def single_rank() -> Iterator[dist.ProcessGroup]:
    """One rank in this process: what is reduced over it stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_norm.dist, "all_reduce", lambda tensor, **options: None)
        yield dist.ProcessGroup(0, 1)


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.data())
def test_norm_of_any_numbers_in_any_order_is_close_to_the_double_norm(
    values: list[float], data: st.DataObject
) -> None:
    other = torch.tensor(data.draw(st.permutations(values)))
    place = data.draw(st.integers(0, len(values)))
    with single_rank() as group:
        found = canonical_norm([torch.tensor(values)], group)
        again = canonical_norm([other[:place], other[place:]], group)
    assert found.hex() == again.hex()
    assert found == pytest.approx(double_norm(other), rel=1e-12, abs=0.0)


@pytest.mark.parametrize("engine", ["gloo", "ours"])
def test_norm_of_special_values(tmp_path: Path, engine: str) -> None:
    table: dict[str, tuple[dict[int, float], float]] = {
        "zero": ({}, 0.0),
        "inf": ({0: math.inf}, math.inf),
        "minus inf": ({7: -math.inf, 3: 1.0}, math.inf),
        "smallest": ({5: 2.0**-149}, 2.0**-149),
        "largest power": ({5: 2.0**127}, 2.0**127),
        "over two ranks": ({0: 3.0, 7: -4.0}, 5.0),
    }
    for name, (special, wanted) in table.items():
        whole = torch.zeros(8)
        for index, value in special.items():
            whole[index] = value
        ranks: Cut = [[whole[:4]], [], [whole[4:], whole[:0]]]
        (tmp_path / name).mkdir()
        assert norms(tmp_path / name, 3, [ranks], engine=engine) == {wanted}, name


@pytest.mark.parametrize("others", [0.0, 1.0, math.inf])
def test_norm_with_a_nan_anywhere_is_nan_everywhere(tmp_path: Path, others: float) -> None:
    """On our communicator, whose MAX keeps a nan; gloo's drops it or not, by order of ranks."""
    cuts: list[Cut] = []
    for place in range(3):
        pieces = [torch.tensor([others, others]) for _ in range(3)]
        pieces[place][1] = math.nan
        cuts.append([[piece] for piece in pieces])
    found = norms(tmp_path, 3, cuts, engine="ours")
    assert all(map(math.isnan, found)), found
