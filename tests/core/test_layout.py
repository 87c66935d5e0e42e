"""Layouts as text (golden/layout/*.txt), and what no sequence of losses and joins may break.

To write the golden texts anew, and then review the difference: ELASWAVE_REGENERATE_GOLDEN=1
"""

import json
import os
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.layout.layout import (
    FreeWorker,
    ParallelLayout,
    launch_layout,
    sizes_of,
    why_needed,
)
from elaswave_plugin.errors import ConfigurationError, ElasWaveError, JobStopped

GOLDEN = Path(__file__).parent / "golden" / "layout"
QUICK = settings(derandomize=True, max_examples=300, deadline=None)


def joined(layout: ParallelLayout, slots: Iterable[int]) -> ParallelLayout:
    """The layout with more free workers, which have no modules yet."""
    return layout.returned(map(FreeWorker, slots))


def play(script: str) -> str:
    """Run the commands of a golden script ("> ...") and show the layout after each."""
    layout: ParallelLayout | None = None
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith("#"):
            lines.append(line)
        if not line.startswith("> "):
            continue
        lines.append(line)
        try:
            layout = run(line[2:].split(), layout)
            lines.append(str(layout))
        except ElasWaveError as error:
            lines.append(f"{type(error).__name__}: {error}")
    return "\n".join(lines) + "\n"


def run(words: list[str], layout: ParallelLayout | None) -> ParallelLayout:
    if words[0] == "launch":
        sizes = dict(word.split("=") for word in words[1:])
        return launch_layout(**{name: int(size) for name, size in sizes.items()})
    assert layout is not None
    numbers = [int(word) for word in words[1:]]
    match words[0]:
        case "lose":
            return layout.without(numbers)
        case "join":
            return joined(layout, numbers)
        case "reform":
            return layout.reformed(numbers or None)
        case "staff":
            return layout.staffed()
        case "move":
            return layout.moved(source=numbers[0], target=numbers[1])
        case "recut":
            return layout.recut(numbers)
    raise ValueError(words[0])


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_layout(path: Path) -> None:
    script = path.read_text()
    played = play(script)
    if os.environ.get("ELASWAVE_REGENERATE_GOLDEN"):
        path.write_text(played)
    assert played == script


def test_there_are_golden_layouts() -> None:
    assert len(list(GOLDEN.glob("*.txt"))) >= 4


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_slots_are_in_megatrons_order(tp: int, pp: int, dp: int) -> None:
    layout = launch_layout(tp=tp, pp=pp, dp=dp, num_layers=6)
    order = [
        layout.stages[stage][replica].slots[position]
        for stage in range(pp)
        for replica in range(dp)
        for position in range(tp)
    ]
    assert order == list(range(tp * pp * dp)) == list(layout.workers)
    assert layout.is_rectangular


@pytest.mark.parametrize("lost", range(8))
def test_each_single_loss_frees_exactly_the_other_member_of_its_group(lost: int) -> None:
    layout = launch_layout(tp=2, pp=2, dp=2, num_layers=4)
    after = layout.without([lost])
    stage, position = lost // 4, lost % 2
    assert after.free == (FreeWorker(lost ^ 1, stage, 1 - position),)
    assert after.widths == tuple(1 if s == stage else 2 for s in range(2))
    assert after.reformed() == after, "one free worker is no TP group of two"
    assert not after.is_rectangular


@pytest.mark.parametrize("lost", list(combinations(range(8), 2)), ids=str)
def test_every_pair_of_losses_leaves_as_many_groups_as_workers_allow(lost: tuple[int, int]) -> None:
    layout = launch_layout(tp=2, pp=2, dp=2, num_layers=4)
    after = layout.without(lost).reformed().staffed()
    assert len(after.workers) == 6
    assert sum(after.widths) == 3 and min(after.widths) >= 1
    for stage, groups in enumerate(after.stages):
        untouched = [g for g in layout.stages[stage] if not set(g.slots) & set(lost)]
        if len(untouched) <= len(groups):
            assert set(untouched) <= set(groups), "a whole group keeps its number"


def test_a_new_group_prefers_who_has_its_weights() -> None:
    layout = launch_layout(tp=2, pp=2, dp=3, num_layers=2)
    # Free: slot 0 (stage 0, tp 0), 3 (stage 0, tp 1), 6 and 9 of stage 1; stage 0 is as narrow.
    after = layout.without([1, 2, 7, 8]).reformed()
    assert after.stages[0][0].slots == (0, 3)
    assert after.stages[1][0].slots == (6, 9)


@st.composite
def histories(draw: st.DrawFn) -> tuple[ParallelLayout, list[tuple[str, int]]]:
    tp, pp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    reserve = draw(st.integers(0, 2))
    layout = launch_layout(tp=tp, pp=pp, dp=dp, num_layers=2 * pp, reserve=reserve)
    events = draw(
        st.lists(
            st.tuples(st.sampled_from(["lose", "join", "reform", "move"]), st.integers(0, 10**6)),
            max_size=20,
        )
    )
    return layout, events


@QUICK
@given(histories())
def test_no_sequence_of_losses_and_joins_breaks_a_layout(
    history: tuple[ParallelLayout, list[tuple[str, int]]],
) -> None:
    layout, events = history
    alive = set(layout.workers)
    newest = max(alive)
    for kind, number in events:
        before = layout
        if kind == "lose" and alive:
            victim = sorted(alive)[number % len(alive)]
            alive.remove(victim)
            layout = layout.without([victim])
            check_groups_kept(before, layout, victim)
        elif kind == "join":
            newest += 1
            alive.add(newest)
            layout = joined(layout, [newest])
        elif kind == "reform":
            layout = layout.reformed()
            assert len(layout.free) < layout.tp or all(w == layout.max_width for w in layout.widths)
            assert layout.reformed() == layout
            assert all(
                set(old) <= set(new) for old, new in zip(before.stages, layout.stages, strict=True)
            )
        elif kind == "move":
            source, target = number % len(layout.stages), number // 7 % len(layout.stages)
            if (
                source != target
                and layout.stages[source]
                and layout.widths[target] < layout.max_width
            ):
                layout = layout.moved(source=source, target=target)
        check_whole(layout, alive)


def check_groups_kept(before: ParallelLayout, after: ParallelLayout, victim: int) -> None:
    for old, new in zip(before.stages, after.stages, strict=True):
        assert new == tuple(group for group in old if victim not in group.slots)


def check_whole(layout: ParallelLayout, alive: set[int]) -> None:
    """Every live worker once, whole groups only, one replica each, the same as JSON."""
    assert layout.workers == tuple(sorted(alive))
    for groups in layout.stages:
        numbers = [group.replica for group in groups]
        assert numbers == sorted(set(numbers))
        assert all(0 <= number < layout.max_width for number in numbers)
        assert all(len(group.slots) == layout.tp for group in groups)
    assert ParallelLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@QUICK
@given(histories(), st.data())
def test_losses_at_once_are_losses_one_by_one(
    history: tuple[ParallelLayout, list[tuple[str, int]]], data: st.DataObject
) -> None:
    layout, _ = history
    dead = data.draw(st.lists(st.sampled_from(layout.workers), unique=True))
    one_by_one = layout
    for slot in dead:
        one_by_one = one_by_one.without([slot])
    assert one_by_one == layout.without(dead)


@QUICK
@given(histories(), st.data())
def test_a_layout_is_staffed_as_long_as_there_are_groups_for_all_stages(
    history: tuple[ParallelLayout, list[tuple[str, int]]], data: st.DataObject
) -> None:
    layout, _ = history
    dead = data.draw(st.lists(st.sampled_from(layout.workers), unique=True))
    after = layout.without(dead).reformed()
    if sum(after.widths) >= len(after.stages):
        staffed = after.staffed()
        assert min(staffed.widths) >= 1 and sum(staffed.widths) == sum(after.widths)
        assert staffed.workers == after.workers
    else:
        with pytest.raises(JobStopped, match=f"{after.groups_text(sum(after.widths))} left"):
            after.staffed()


def test_survivors_of_a_stage_without_weights_form_groups_elsewhere() -> None:
    layout = joined(launch_layout(tp=1, pp=2, dp=2, num_layers=2).without([0, 2]), [4, 5])
    assert layout.reformed().widths == (2, 2)
    only = layout.reformed([1])
    assert only.widths == (1, 2) and len(only.free) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: launch_layout(tp=0, pp=1, dp=1, num_layers=1), "tp is 0, wanted 1 or more"),
        (lambda: launch_layout(tp=1, pp=4, dp=1, num_layers=3), "3 layers for 4 stages"),
        (lambda: launch_layout(tp=1, pp=2, vpp=2, dp=1, num_layers=3), r"4 stages \(pp x vpp\)"),
        (lambda: launch_layout(tp=1, pp=2, dp=1, num_layers=5), "5 layers do not divide by 2"),
        (lambda: sizes_of(10, tp=2, pp=2), "10 workers do not factor into tp 2 x pp 2 x dp"),
        (lambda: sizes_of(8, tp=0, pp=2), "8 workers do not factor"),
        (lambda: launch_layout(tp=1, pp=1, dp=2, num_layers=1).without([5]), "worker 5 is not in"),
        (lambda: joined(launch_layout(tp=1, pp=1, dp=2, num_layers=1), [1]), "worker 1 joins"),
        (lambda: joined(launch_layout(tp=1, pp=1, dp=2, num_layers=1), [7, 7]), "worker 7 joins"),
        (
            lambda: launch_layout(tp=1, pp=2, dp=2, num_layers=4).recut([0, 4, 4]),
            "cuts are 0 4 4, wanted 3 rising numbers from 0 to 4",
        ),
        (
            lambda: launch_layout(tp=1, pp=2, dp=2, num_layers=4).moved(source=0, target=1),
            r"no replica can move from stage 0 \(2 replicas\) to stage 1 \(2 of at most 2\)",
        ),
        (
            lambda: launch_layout(tp=1, pp=2, dp=2, num_layers=4).moved(source=2, target=1),
            "stage 2 does not exist, wanted 0 to 1",
        ),
    ],
)
def test_bad_input_is_one_sentence_with_the_numbers(call: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        call()  # type: ignore[operator]


def test_sizes_factor() -> None:
    assert sizes_of(96, tp=2, pp=4) == 12


def test_summary_names_no_worker() -> None:
    layout = launch_layout(tp=1, pp=2, dp=1000, num_layers=4).without(range(10))
    assert layout.summary().splitlines() == [
        "TP1 x PP2 x DP1000, 4 layers, widths 990 1000",
        "stage 0, layers 0-1: 990 of 1000 replicas",
        "stage 1, layers 2-3: 1000 of 1000 replicas",
        "free: 0 workers",
    ]
    wide = joined(launch_layout(tp=1, pp=1, dp=2, num_layers=4, reserve=1), [2]).reformed()
    assert "layers 0-3: 3 replicas, 2 at launch" in wide.summary()


@pytest.mark.parametrize(
    ("tp", "dead", "stays", "slot", "words"),
    [
        (1, [], None, 3, None),
        (1, [0], None, 1, None),  # the stage takes a replica of the other one
        (1, [0], "tied", 1, "stage 0 would have no worker, and workers keep theirs: tied"),
        (1, [0], "tied", 2, None),
        (1, [0, 2], None, 1, "1 worker would be left for 2 stages"),
        (2, [0, 1, 6, 7], None, 2, "1 whole TP group of 2 would be left for 2 stages"),
        (2, [0], None, 1, None),  # it is free
    ],
)
def test_a_worker_is_needed_where_the_job_would_end_without_it(
    tp: int, dead: list[int], stays: str | None, slot: int, words: str | None
) -> None:
    layout = launch_layout(tp=tp, pp=2, dp=2, num_layers=4).without(dead)
    others = set(range(2 * 2 * tp)) - {slot}
    assert why_needed({**layout.to_json(), "why_workers_stay": stays}, others) == words


@pytest.mark.parametrize(
    ("move", "cuts"),
    [
        ((4, 4, 0), (0, 5, 8, 12)),
        ((2, 3, 1), (0, 2, 8, 12)),
        ((5, 7, 2), (0, 4, 5, 12)),
        ((4, 7, 1), (0, 4, 8, 12)),
    ],
)
def test_layers_go_to_a_neighbour(move: tuple[int, int, int], cuts: tuple[int, ...]) -> None:
    layout = launch_layout(tp=1, pp=3, dp=2, num_layers=12)
    moved = layout.with_layers_at(*move)
    assert moved.cuts == cuts and moved.stages == layout.stages


@pytest.mark.parametrize(
    ("move", "complaint"),
    [
        ((0, 0, 3), "there is no stage 3, wanted one of 0 to 2"),
        ((5, 4, 0), "layers are 5-4, wanted some of 0-11"),
        ((0, 12, 0), "layers are 0-12"),
        ((4, 7, 0), "would leave a stage without layers"),
        ((6, 6, 0), "contiguous (stage 0: 0-3, stage 1: 4-7, stage 2: 8-11)"),
        ((0, 0, 2), "move layers between neighbours"),
    ],
)
def test_layers_that_cannot_be_there_are_refused(
    move: tuple[int, int, int], complaint: str
) -> None:
    layout = launch_layout(tp=1, pp=3, dp=2, num_layers=12)
    with pytest.raises(ConfigurationError) as caught:
        layout.with_layers_at(*move)
    assert complaint in str(caught.value)
    with pytest.raises(ConfigurationError, match="interleaved"):
        launch_layout(tp=1, pp=2, dp=1, num_layers=4, vpp=2).with_layers_at(0, 0, 0)
