"""Draws of samples that are cut from micro-batches, in one process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elaswave_plugin.adapters.cut_draws import CutDraws, Interval, parts_of
from elaswave_plugin.adapters.drawing_kernels import DrawingKernels
from elaswave_plugin.adapters.host_draws import undone_draws
from elaswave_plugin.core.step.rng import draw_key

SIZE, PLACES, WIDTH = 4, 10, 8
WHOLES = [(first, first + SIZE) for first in range(0, 3 * SIZE, SIZE)]
SAMPLES = torch.randn(3 * SIZE, PLACES, WIDTH, generator=torch.Generator().manual_seed(0))
Draw = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    with undone_draws():
        yield


def key(first: int) -> int:
    return draw_key(7, first)


def weights(x: torch.Tensor) -> torch.Tensor:
    """Of attention to all places alike, without an error of rounding."""
    alike = torch.zeros(len(x), 2, PLACES, WIDTH)
    each = torch.eye(PLACES).expand(len(x), 2, -1, -1)
    return functional.scaled_dot_product_attention(alike, alike, each, dropout_p=0.3)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x.clone(), 0.3, inplace=True)


def as_sequence(x: torch.Tensor) -> torch.Tensor:
    """Samples in the second dimension."""
    turned = torch.empty(PLACES, len(x), WIDTH).copy_(x.transpose(0, 1))
    return functional.dropout(turned, 0.3).transpose(0, 1)


def turned(x: torch.Tensor) -> torch.Tensor:
    """In another order of the memory."""
    return functional.dropout(x.transpose(1, 2), 0.3)


DRAWS: dict[str, Draw] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "in place": in_place,
    "of channels": lambda x: functional.dropout1d(x, 0.3),
    "alpha": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "fused": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "attention": weights,
    "sequence first": as_sequence,
    "flat": lambda x: functional.dropout(x.view(-1, WIDTH), 0.3).view_as(x),
    "turned": turned,
    "rand": lambda x: torch.rand(len(x), 3),
    "rand of bfloat16": lambda x: torch.rand(len(x), 3, dtype=torch.bfloat16),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(len(x), PLACES, WIDTH),
    "randint": lambda x: torch.randint(1000, (len(x),)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x[:, 0].exp(), 3),
    "replaced": lambda x: torch.multinomial(x[:, 0].exp(), 3, replacement=True),
    "normal": lambda x: torch.normal(x, 1.0),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
}


class Passes:
    """Passes of samples, each of which draws several times."""

    def __init__(self, *draws: Draw) -> None:
        self.told: list[tuple[int, ...] | None] = []
        self.cut = CutDraws(self.told.append)
        self.draws = draws

    def of(self, share: Interval) -> list[torch.Tensor]:
        self.cut.begin(parts_of(share, WHOLES, key))
        return self.drawn(share)

    def drawn(self, share: Interval) -> list[torch.Tensor]:
        return [draw(SAMPLES[slice(*share)]) for draw in (*self.draws, *self.draws)]

    def whole(self) -> list[torch.Tensor]:
        """Return what all workers draw while they are healthy."""
        return [torch.cat(one) for one in zip(*map(self.of, WHOLES), strict=True)]


@pytest.fixture
def passes() -> Iterator[Callable[..., Passes]]:
    made: list[Passes] = []

    def make(*draws: Draw) -> Passes:
        made.append(Passes(*draws))
        return made[-1]

    yield make
    for one in made:
        one.cut.close()


def check_rows(passes: Passes, share: Interval) -> None:
    whole = passes.whole()
    for one, drawn in zip(whole, passes.of(share), strict=True):
        assert torch.equal(one[slice(*share)], drawn)
    assert passes.told == []


@pytest.mark.parametrize("share", [(0, 6), (3, 6), (1, 3), (7, 8), (2, 11), (0, 12)], ids=str)
@pytest.mark.parametrize("kind", DRAWS)
def test_rows_of_any_share_are_those_of_whole_micro_batches(
    passes: Callable[..., Passes], kind: str, share: Interval
) -> None:
    check_rows(passes(DRAWS[kind], DRAWS["dropout"]), share)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda share: share[0] < share[1]),
    st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=4),
)
def test_so_are_those_of_any_draws_in_a_row(share: Interval, kinds: list[str]) -> None:
    one = Passes(*(DRAWS[kind] for kind in kinds))
    try:
        check_rows(one, share)
    finally:
        one.cut.close()


def masks(passes: Passes, share: Interval) -> torch.Tensor:
    """Of equal samples."""
    passes.cut.begin(parts_of(share, WHOLES, key))
    return functional.dropout(torch.ones(share[1] - share[0], 4000), 0.3) > 0


def check_masks(drawn: torch.Tensor) -> None:
    """Equal samples have different masks, of the rate that was asked for."""
    assert len({bytes(one.tolist()) for one in drawn}) == len(drawn)
    # Of 4000 numbers, four standard deviations.
    assert (drawn.float().mean(1) - 0.7).abs().max() < 4 * (0.3 * 0.7 / 4000) ** 0.5
    # Samples agree where both are dropped or kept.
    same = (drawn[:, None] == drawn[None]).float().mean(2)[~torch.eye(len(drawn), dtype=bool)]
    assert (same - 0.58).abs().max() < 5 * (0.58 * 0.42 / 4000) ** 0.5


@pytest.mark.parametrize("share", [(0, 4), (3, 6), (2, 11)], ids=str)
def test_equal_samples_have_different_masks_of_the_rate(
    passes: Callable[..., Passes], share: Interval
) -> None:
    check_masks(masks(passes(), share))


@pytest.mark.parametrize("of", ["one key for all micro-batches", "one mask", "a rate of a half"])
def test_constant_masks_are_seen(passes: Callable[..., Passes], of: str) -> None:
    """Negative control."""
    if of == "one key for all micro-batches":
        one = passes()
        one.cut.begin(parts_of((2, 11), WHOLES, lambda first: 3))
        drawn = functional.dropout(torch.ones(9, 4000), 0.3) > 0
    elif of == "one mask":
        drawn = masks(passes(), (3, 6))[:1].expand(3, -1)
    else:
        drawn = torch.rand(3, 4000) > 0.5
    with pytest.raises(AssertionError):
        check_masks(drawn)


# ---- recomputation ------------------------------------------------------------------------------


def layer(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x * x, 0.5) * torch.rand(len(x), 1, 1)


@pytest.mark.parametrize("reentrant", [False, True], ids=["as one graph", "reentrant"])
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "apart"])
def test_recomputation_meets_the_same_draws(
    passes: Callable[..., Passes], reentrant: bool, apart: bool
) -> None:
    """The gradient is that of whole micro-batches; ``apart``: of each in a pass of its own."""
    one, share = passes(), (2, 7)

    def gradient(share: Interval, recomputes: bool) -> torch.Tensor:
        x = SAMPLES[slice(*share)].clone().requires_grad_()
        one.cut.begin(parts_of(share, WHOLES, key))
        losses, pieces = [], [(2, 4), (4, 7)] if apart and share == (2, 7) else [share]
        for start, stop in pieces:
            with one.cut.narrowed(start, stop):
                y = x[start - share[0] : stop - share[0]]
                for _ in range(3):
                    y = checkpoint(layer, y, use_reentrant=reentrant) if recomputes else layer(y)
                losses.append(y)
        y = torch.cat(losses)
        (functional.dropout(y, 0.5) ** 2).sum().backward()
        assert x.grad is not None
        return x.grad

    whole = torch.cat([gradient(one, False) for one in WHOLES])
    assert torch.equal(gradient(share, True), whole[slice(*share)])


def test_draws_that_are_undone_come_again(passes: Callable[..., Passes]) -> None:
    one = passes(DRAWS["dropout"], DRAWS["rand"])
    whole = one.whole()
    one.of((3, 6))
    with undone_draws():
        one.drawn((3, 6))
    again = one.of((3, 6))
    with undone_draws():
        later = one.drawn((3, 6))
    assert all(map(torch.equal, again, (each[3:6] for each in whole)))
    assert all(map(torch.equal, later, one.drawn((3, 6))))
    assert not torch.equal(again[0], later[0])


# ---- what has no samples ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "shape"),
    [
        (lambda x: torch.rand(()), ()),
        (lambda x: torch.rand(PLACES + 1), (PLACES + 1,)),
        (lambda x: torch.randperm(3), (3,)),
        (lambda x: functional.rrelu(x, training=True), None),
    ],
)
def test_numbers_of_no_sample_are_told_and_are_those_of_the_first_micro_batch(
    passes: Callable[..., Passes], draw: Draw, shape: tuple[int, ...] | None
) -> None:
    one = passes(draw)
    first = one.of(WHOLES[0])
    drawn = one.of((1, 7))
    if shape is None:
        assert one.told == 2 * [(6, PLACES, WIDTH)]
        return
    assert all(map(torch.equal, first, drawn))
    assert one.told == 2 * [shape]


def test_others_stay_in_line_behind_numbers_of_no_sample(passes: Callable[..., Passes]) -> None:
    one = passes(lambda x: torch.rand(PLACES + 1), DRAWS["dropout"])
    whole, drawn = [each[1] for each in map(one.of, WHOLES)], one.of((1, 7))[1]
    assert torch.equal(torch.cat(whole)[1:7], drawn)


def test_it_tells_before_a_loss_where_it_is_asked_to(passes: Callable[..., Passes]) -> None:
    one = passes(lambda x: torch.rand(PLACES + 1))
    unwatched = one.of(WHOLES[1])
    assert one.told == []
    one.cut.begin(parts_of(WHOLES[1], WHOLES, key), watched=True)
    watched = one.drawn(WHOLES[1])
    assert one.told == 2 * [(PLACES + 1,)]
    assert all(map(torch.equal, unwatched, watched))


@pytest.mark.parametrize(("kind", "told"), [("other", True), ("seeded", False), ("dropout", False)])
def test_draws_of_other_kernels_are_told_before_a_loss(
    passes: Callable[..., Passes], kind: str, told: bool
) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        """As kernels that keep to torch's generator, and are no torch's."""
        return torch.rand(len(x), generator=torch.default_generator)

    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return other(x)

    one = passes({"other": other, "seeded": seeded, **DRAWS}[kind], DRAWS["dropout"])
    ends: list[Callable[[], Any]] = [one.cut.end, lambda: one.of(WHOLES[1])]
    for end in ends:
        one.told.clear()
        one.cut.begin(parts_of(WHOLES[0], WHOLES, key), watched=True)
        one.drawn(WHOLES[0])
        with undone_draws():
            DRAWS["rand"](SAMPLES)
        end()
        assert one.told == ([None] if told else [])


def test_a_script_that_seeds_its_passes_draws_as_each_micro_batch_does(
    passes: Callable[..., Passes],
) -> None:
    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return functional.dropout(x, 0.5)

    check_rows(passes(seeded, DRAWS["rand"]), (2, 7))


def test_a_generator_of_the_scripts_own_is_left_alone(passes: Callable[..., Passes]) -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x), generator=torch.Generator().manual_seed(5))

    one = passes(own)
    assert torch.equal(one.of((2, 7))[0], own(SAMPLES[2:7]))


def test_torch_has_its_own_kernels_while_micro_batches_are_whole(
    passes: Callable[..., Passes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    native = CutDraws._draw
    monkeypatch.setattr(CutDraws, "_draw", lambda self, call: calls.append(1) or native(self, call))
    one = passes(DRAWS["dropout"])
    one.of((2, 7))
    assert len(calls) == 2
    one.of(WHOLES[1])
    assert len(calls) == 2
    one.of((2, 7))
    one.cut.close()
    one.drawn((2, 7))
    assert len(calls) == 4


# ---- kernels whose backward passes draw again ---------------------------------------------------


def test_attention_that_draws_again_backward_has_its_whole_micro_batch(
    passes: Callable[..., Passes],
) -> None:
    """As fused kernels of a GPU do: they keep a seed in place of the mask."""

    @torch.library.custom_op("elaswave_test::attend", mutates_args=())
    def attend(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
        seed = torch.randint(2**31, ())
        return x * kept(x, seed), seed

    def kept(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(int(seed)))

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seed, ctx.shape = output[1], inputs[0].shape

    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        return gradient * kept(torch.empty(ctx.shape), ctx.seed), None

    attend.register_autograd(backward, setup_context=keep)

    def gradient(share: Interval) -> torch.Tensor:
        one.cut.begin(parts_of(share, WHOLES, key))
        x = SAMPLES[slice(*share)].clone().requires_grad_()
        y = attend(x, 0.1)[0] + attend(x * x, 0.1)[0]
        functional.dropout(y * y, 0.5).sum().backward()
        assert x.grad is not None
        return x.grad

    one = passes()
    whole = torch.cat([gradient(share) for share in WHOLES])
    library = torch.library.Library("elaswave_test", "IMPL")
    try:
        kernels: DrawingKernels = one.cut._kernels
        kernels.replace(library, "elaswave_test::attend", "AutogradCPU")
        assert torch.equal(gradient((2, 7)), whole[2:7])
        assert one.told == []
    finally:
        library._destroy()


def test_so_has_a_kernel_of_torch_above_autograd(passes: Callable[..., Passes]) -> None:
    def gradient(share: Interval) -> torch.Tensor:
        one.cut.begin(parts_of(share, WHOLES, key))
        x = SAMPLES[slice(*share)].clone().requires_grad_()
        (
            torch.native_dropout(x * x, 0.3, True)[0] * torch.native_dropout(x, 0.5, True)[0]
        ).sum().backward()
        assert x.grad is not None
        return x.grad

    one = passes()
    whole = torch.cat([gradient(share) for share in WHOLES])
    one.cut._kernels._library = library = torch.library.Library("aten", "IMPL")
    one.cut._kernels.replace(library, "aten::native_dropout", "AutogradCPU")
    assert torch.equal(gradient((2, 7)), whole[2:7])
