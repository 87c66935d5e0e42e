"""Op lists on ragged layouts: Megatron's on whole ones, no deadlock, bounded in-flight samples."""

import random

import pytest

from elaswave_plugin.core.planner.greedy import (
    greedy_graph,
    greedy_lists,
    greedy_step,
    split_step,
    with_weights_in_bubbles,
)
from elaswave_plugin.core.planner.microbatch_split import (
    MicrobatchSplit,
    redeal,
    reroute,
    resize,
)
from elaswave_plugin.core.planner.slot_time import slot_flow
from elaswave_plugin.core.step.schedule import (
    BACKWARD,
    WEIGHTS,
    Op,
    OpLists,
    Piece,
    WorkerOps,
    fit_windows,
    interleaved_lists,
    peak_in_flight,
    show_ops,
    window_lists,
    window_ops,
    window_sizes,
)
from elaswave_plugin.core.step.simulate import LinkTime, StageTime, simulate
from elaswave_plugin.errors import ConfigurationError

LINK = LinkTime(latency_s=0.05, sample_s=0.1)


def with_weights_last(ops: WorkerOps) -> WorkerOps:
    """Split each backward in two, the weight gradients directly after the input gradients."""
    split: list[Op] = []
    for op in ops:
        split += [op, op._replace(kind=WEIGHTS)] if op.kind == BACKWARD else [op]
    return tuple(split)


def samples_of(op: Op) -> int:
    return op.stop - op.start


def random_split(dice: random.Random) -> MicrobatchSplit:
    """One to six stages of random live replicas under a random policy; also odd batch sizes."""
    stages, dp, size = dice.randint(1, 6), dice.randint(1, 6), dice.randint(1, 4)
    replicas = [sorted(dice.sample(range(dp), dice.randint(1, dp))) for _ in range(stages)]
    total = dp * dice.randint(1, 8) + dice.randrange(dp)
    widths = [len(live) for live in replicas]
    policy = dice.choice(["redeal", "reroute", "resize"])
    if policy == "redeal":
        return redeal(
            widths=widths,
            num_microbatches=total,
            microbatch_size=size,
            slot_width=dice.randint(1, 2 * dp),
        )
    if policy == "reroute":
        return reroute(
            replicas=replicas, launch_width=dp, num_microbatches=total, microbatch_size=size
        )
    return resize(widths=widths, launch_width=dp, num_microbatches=total, microbatch_size=size)


def random_times(dice: random.Random, count: int) -> list[StageTime]:
    return [
        StageTime(
            forward_s=dice.uniform(0.2, 3.0),
            backward_s=dice.uniform(0.2, 3.0),
            weights_s=dice.uniform(0.2, 3.0),
            fixed_s=dice.choice([0.0, 0.3]),
            reduce_s=dice.uniform(0.0, 2.0),
        )
        for _ in range(count)
    ]


def random_windows(dice: random.Random, stages: int) -> tuple[int, ...]:
    return tuple(sorted((dice.randint(1, stages + 2) for _ in range(stages)), reverse=True))


def megatrons_list(stage: int, stages: int, count: int) -> str:
    """1F1B as Megatron runs it: warm up P - s - 1 forwards, then pairs, then the backwards left."""
    warm = min(stages - stage - 1, count)
    words = [f"F{k}" for k in range(warm)]
    for k in range(count - warm):
        words += [f"F{k + warm}", f"B{k}"]
    return " ".join(words + [f"B{k}" for k in range(count - warm, count)])


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("count", range(1, 9))
def test_window_of_a_whole_layout_is_megatrons_1f1b(stages: int, count: int) -> None:
    split = redeal(widths=[2] * stages, num_microbatches=2 * count, microbatch_size=1, slot_width=2)
    lists = window_lists(split.assignment(), window_sizes(stages))
    for stage, workers in enumerate(lists):
        for seat, ops in enumerate(workers):
            own = " ".join(
                f"{op.kind}{(op.start - seat) // 2}" for op in ops if op.start % 2 == seat
            )
            assert len(ops) == 2 * count
            assert own == megatrons_list(stage, stages, count)


def test_lists_of_a_ragged_layout_as_text() -> None:
    split = redeal(widths=(2, 1), num_microbatches=4, microbatch_size=2, slot_width=2)
    lists = window_lists(split.assignment(), window_sizes(2, extra=1))
    assert [[show_ops(ops, microbatch_size=2) for ops in stage] for stage in lists] == [
        ["F0 F2 B0 B2", "F1 F3 B1 B3"],
        ["F0 F1 B0 B1 F2 F3 B2 B3"],
    ]
    cut = resize(widths=(2, 1), launch_width=2, num_microbatches=2, microbatch_size=1)
    assert [show_ops(ops) for ops in window_lists(cut.assignment(), (1, 1))[0]] == [
        "F0 B0",
        "F1 B1",
    ]
    odd = window_ops([Piece(0, 0, 3)], window=1)
    assert show_ops(odd, microbatch_size=2) == "F[0,3) B[0,3)"


def test_interleaved_lists_as_text() -> None:
    split = redeal(widths=(1, 1), num_microbatches=4, microbatch_size=1, slot_width=1)
    lists = interleaved_lists(split.assignment(), num_chunks=2)
    assert [show_ops(stage[0]) for stage in lists] == [
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
    ]


def test_thousands_of_random_ragged_layouts_do_not_deadlock() -> None:
    """Window rule with any non-increasing windows, and interleaved; the bound on memory holds."""
    dice = random.Random(20)
    for _ in range(1500):
        split = random_split(dice)
        stages = len(split.stages)
        windows = random_windows(dice, stages)
        lists = window_lists(split.assignment(), windows)
        assert not simulate(lists, random_times(dice, stages), LINK).blocked
        for stage, window in enumerate(windows):
            most = window * int(split.stages[stage].samples().max())
            assert all(peak_in_flight(ops, samples_of) <= most for ops in lists[stage])
        chunks = dice.choice([2, 3])
        chunked = interleaved_lists(split.assignment(), num_chunks=chunks)
        assert not simulate(chunked, random_times(dice, stages * chunks), LINK).blocked


def test_increasing_windows_deadlock_and_are_refused() -> None:
    split = redeal(widths=(1, 1), num_microbatches=6, microbatch_size=1, slot_width=1)
    with pytest.raises(ValueError, match=r"windows are \(1, 2\), wanted non-increasing ones"):
        window_lists(split.assignment(), (1, 2))
    forced: OpLists = tuple(
        tuple(window_ops(pieces, window=window) for pieces in stage)
        for stage, window in zip(split.assignment(), (1, 2), strict=True)
    )
    result = simulate(forced, [StageTime(forward_s=1, backward_s=1)] * 2, LINK)
    assert result.seconds == float("inf")
    assert str(result) == (
        "deadlock: worker 0 of stage 0 waits at B0; worker 0 of stage 1 waits at F1"
    )
    with pytest.raises(ValueError, match="deadlock"):
        slot_flow(split).seconds([StageTime(forward_s=1, backward_s=1)] * 2, LINK, (1, 2))
    with pytest.raises(ValueError, match="deadlock"):
        with_weights_in_bubbles(forced, [StageTime(forward_s=1, backward_s=1)] * 2, LINK)


def test_megatrons_fixed_warm_up_deadlocks_on_some_ragged_layouts() -> None:
    """The control of the whole rule: the schedule that it takes the place of is not safe."""
    dice = random.Random(5)
    blocked = 0
    for _ in range(400):
        split = random_split(dice)
        stages = len(split.stages)
        lists = tuple(
            tuple(fixed_warm_up(pieces, stages - stage - 1) for pieces in workers)
            for stage, workers in enumerate(split.assignment())
        )
        blocked += bool(simulate(lists, random_times(dice, stages), LINK).blocked)
    assert blocked >= 20


def fixed_warm_up(pieces: tuple[Piece, ...], warm: int) -> tuple[Op, ...]:
    forwards = [Op("F", 0, *piece) for piece in pieces]
    backwards = [Op("B", 0, *piece) for piece in pieces]
    order = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        order += [forward, backward]
    return tuple(order + backwards[max(len(forwards) - warm, 0) :])


def test_whole_slots_at_a_time_give_exactly_the_simulated_seconds() -> None:
    dice = random.Random(7)
    for _ in range(400):
        split = random_split(dice)
        windows = random_windows(dice, len(split.stages))
        times = random_times(dice, len(split.stages))
        lists = window_lists(split.assignment(), windows)
        flow = slot_flow(split)
        assert flow.seconds(times, LINK, windows) == pytest.approx(
            simulate(lists, times, LINK).seconds, rel=1e-12
        )
        for stage, window in enumerate(windows):
            peak = max(peak_in_flight(ops, samples_of) for ops in lists[stage])
            assert flow.peak(stage, window) == peak


def test_weights_in_bubbles_keep_the_order_and_fill_what_was_idle() -> None:
    """Against weights directly after their backward; in-flight samples stay under the limit."""
    dice = random.Random(8)
    ratios = []
    for _ in range(400):
        split = random_split(dice)
        times = random_times(dice, len(split.stages))
        windows = random_windows(dice, len(split.stages))
        lists = window_lists(split.assignment(), windows)
        limits = [
            1.5 * window * int(stage.samples().max())
            for window, stage in zip(windows, split.stages, strict=True)
        ]
        # The graph lists and times the operations in another way, which does not count.
        graph = greedy_graph(split.assignment(), random_times(dice, len(split.stages)), LINK)
        filled, seconds = split_step(lists, graph, times, limits=limits)
        assert simulate(filled, times, LINK).seconds == seconds
        at_once = tuple(tuple(map(with_weights_last, workers)) for workers in lists)
        ratios.append(
            simulate(filled, times, LINK).seconds / simulate(at_once, times, LINK).seconds
        )
        for stage, workers in enumerate(filled):
            for ops, before in zip(workers, lists[stage], strict=True):
                assert tuple(op for op in ops if op.kind != "W") == before
                assert peak_in_flight(ops, samples_of) <= limits[stage]
                done = set()
                for op in ops:
                    assert op.kind != "W" or op[1:] in done
                    done |= {op[1:]} if op.kind == "B" else set()
                assert sum(op.kind == "W" for op in ops) == len(before) // 2
    assert max(ratios) < 1.02
    assert sum(ratio < 0.999 for ratio in ratios) > len(ratios) / 2


@pytest.mark.parametrize(("slots", "at_most"), [(8, 0.91), (16, 0.95), (32, 0.97)])
def test_split_backward_shortens_a_balanced_pipeline(slots: int, at_most: float) -> None:
    split = redeal(widths=(1,) * 4, num_microbatches=slots, microbatch_size=1, slot_width=1)
    times = [StageTime(forward_s=6, backward_s=6, weights_s=6)] * 4
    lists = window_lists(split.assignment(), window_sizes(4))
    filled = with_weights_in_bubbles(lists, times, LINK, limits=[4.0] * 4)
    coupled_s = simulate(lists, times, LINK).seconds
    assert 0.75 * coupled_s < simulate(filled, times, LINK).seconds < at_most * coupled_s
    assert max(peak_in_flight(ops, samples_of) for stage in filled for ops in stage) == 4


def test_greedy_lists_never_block_and_hold_no_more_than_their_limit() -> None:
    dice = random.Random(9)
    for _ in range(300):
        split = random_split(dice)
        times = random_times(dice, len(split.stages))
        limits = [dice.randint(1, 4) * int(stage.samples().max()) for stage in split.stages]
        windows = [dice.randint(1, 6) for _ in split.stages]
        assignment = split.assignment()
        # Made with other times than it is run with: those do not count.
        graph = greedy_graph(assignment, random_times(dice, len(split.stages)), LINK)
        lists, seconds = greedy_step(graph, times, limits=limits, windows=windows)
        result = simulate(lists, times, LINK)
        assert not result.blocked and result.seconds == pytest.approx(seconds)
        for stage, workers in enumerate(lists):
            assert all(peak_in_flight(ops, samples_of) <= limits[stage] for ops in workers)
            for ops, pieces in zip(workers, assignment[stage], strict=True):
                for kind in "FB":
                    samples = [(op.slot, op.start) for op in ops if op.kind == kind]
                    assert samples == sorted((one.slot, one.start) for one in pieces)


def greedy_text(split: MicrobatchSplit, times: list[StageTime], **bounds: list[int]) -> list[str]:
    lists = greedy_lists(split.assignment(), times, LinkTime(), **bounds)
    return [show_ops(ops) for stage in lists for ops in stage]


def test_greedy_lists_as_text() -> None:
    """Stage 0 has one worker of two: stage 1 does not wait for its next forward, as windows do."""
    split = redeal(widths=(1, 2), num_microbatches=4, microbatch_size=1, slot_width=1)
    times = [StageTime(forward_s=3, backward_s=6), StageTime(forward_s=1, backward_s=1)]
    bounds = {"limits": [4, 2], "windows": [3, 2]}
    greedy = greedy_text(split, times, **bounds)
    assert greedy == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F2 B2", "F1 B1 F3 B3"]
    # Where both are ready it goes by the windows: smaller ones take backwards first.
    assert greedy_text(split, times, limits=[4, 2], windows=[1, 1])[0] == "F0 F1 B0 B1 F2 F3 B2 B3"
    # And where there is no room for a forward.
    assert greedy_text(split, times, limits=[1, 1], windows=[3, 2])[0] == "F0 B0 F1 B1 F2 B2 F3 B3"
    # A backward that arrives early waits for its turn.
    slow = [StageTime(forward_s=1, backward_s=3), StageTime(forward_s=5, backward_s=5)]
    wide = redeal(widths=(1, 3), num_microbatches=3, microbatch_size=1, slot_width=1)
    assert greedy_text(wide, slow, limits=[3, 1], windows=[3, 1])[0] == "F0 F1 F2 B0 B1 B2"
    with pytest.raises(ValueError, match="stage 1 holds 1 samples a slot, limit 0"):
        greedy_text(split, times, limits=[3, 0], windows=[1, 1])


def test_a_step_takes_what_one_can_count_by_hand() -> None:
    # Two stages, two micro-batches, forward 1, backward 2, no messages: 1F1B ends after 9.
    split = redeal(widths=(1, 1), num_microbatches=2, microbatch_size=1, slot_width=1)
    lists = window_lists(split.assignment(), (2, 1))
    times = [StageTime(forward_s=1, backward_s=2)] * 2
    assert simulate(lists, times, LinkTime()).seconds == 9
    assert simulate(lists, times, LinkTime()).busy == ((6,), (6,))
    # A message of 1 s is waited for twice: of the first forward and of the last backward.
    assert simulate(lists, times, LinkTime(latency_s=1)).seconds == 11
    slow = [times[0], StageTime(forward_s=1, backward_s=2, reduce_s=3)]
    assert simulate(lists, slow, LinkTime()).seconds == 10


def test_lists_that_miss_samples_are_refused() -> None:
    times = [StageTime(forward_s=1, backward_s=1)] * 2
    first = window_ops([Piece(0, 0, 1)], window=1)
    second = window_ops([Piece(0, 0, 2)], window=1)
    with pytest.raises(ValueError, match=r"no stage before computes samples \[1, 2\)"):
        simulate(((first,), (second,)), times, LINK)
    with pytest.raises(ValueError, match="forwards and backwards differ"):
        simulate(((first[:1],), (first,)), times, LINK)


def test_windows_shrink_to_memory_and_stay_non_increasing() -> None:
    assert window_sizes(4) == (4, 3, 2, 1)
    assert window_sizes(4, extra=1) == (5, 4, 3, 1)
    assert fit_windows((5, 4, 3, 1), (9, 2, 3, 1)) == (5, 2, 2, 1)
    with pytest.raises(ConfigurationError, match="stage 1 has memory for 0 micro-batch slots"):
        fit_windows((2, 1), (2, 0))
    with pytest.raises(ValueError, match="window is 0"):
        window_ops([], window=0)
    with pytest.raises(ValueError, match="1 windows for 2 stages"):
        window_lists((((),), ((),)), (1,))
