"""A script without a line of ours sums over its workers: the share of a lost one is there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_loop
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import Outcome, check_equal, check_survived
from tests.faults.own_scripts import Change
from tests.faults.test_loop_shapes import MEETS
from tests.faults.test_own_loop import PP2, SEED, TP2, TRAINS, spec_of
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Of fp32 sums in another order.
ROUNDING = 1e-6
_SHOWS = """\
        group = parallel_state.get_data_parallel_group()
        pairs = torch.stack([one["loss and tokens"] for one in losses]).sum(0)
        torch.distributed.all_reduce(pairs, group=group)
"""
# As ms-swift does it from its logging_steps on.
_SHOWS_SECONDS = """\
        added = added if iteration and iteration % 2 == 0 else torch.zeros(2)
        if parallel_state.is_pipeline_last_stage():
            added += torch.stack([one["loss and tokens"] for one in losses]).sum(0)
        if iteration % 2 == 0 and parallel_state.is_pipeline_last_stage():
            group = parallel_state.get_data_parallel_group()
            torch.distributed.all_reduce(added, group=group)
            shown = " ".join(f"{float(one):.9g}" for one in added)
            print(f"shown {iteration} {shown}\\n", end="")
"""
_SHOWS_LOSSES = """\
        group = parallel_state.get_data_parallel_group()
        mine = torch.stack([one["lm loss"] for one in losses]).mean()
        torch.distributed.all_reduce(mean := mine.clone(), group=group)
        mean = mean / parallel_state.get_data_parallel_world_size()
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.AVG, group=group)
        seen = torch.stack([one["lm loss"] for batch in evaluate() for one in batch]).sum()
        torch.distributed.all_reduce(seen, group=group)
        pairs = mean, mine, seen
"""
_PRINTS = """\
        shown = " ".join(f"{float(one):.9g}" for one in pairs)
        print(f"shown {iteration} {shown}\\n", end="")
"""
_REPORTED = "    reported = (float(total), float(tokens))\n"
_LOSS = '    reported = {"lm loss": (total / tokens).detach().clone()}\n'
_PAIR = '    reported = {"loss and tokens": torch.stack([total.detach(), tokens.float()])}\n'
# The script's own sum of losses, by the keys of its reports.
_SUMS = "        loss = sum(total / tokens for total, tokens in losses) / max(len(losses), 1)\n"
_SUMS_VALID = (
    "            loss = sum(total / tokens for batch in evaluate() for total, tokens in batch)\n"
)


LOST = [((1,), ()), ((0, 3), ()), ((3,), TP2)]


def reporting(report: str, lines: str, prints: str = _PRINTS) -> tuple[Change, ...]:
    """Other reports, and lines that show sums of them."""
    none = "        loss = 0.0\n"
    return (
        (_REPORTED, report),
        (_SUMS, none),
        (_SUMS_VALID, "    " + none),
        (TRAINS, TRAINS + lines + prints),
    )


_SAVES = """\
        print(f"norm {iteration} {float(grad_norm)!r}\\n", end="")
        slot = os.environ["ELASWAVE_SLOT"]
        torch.save(model[0].state_dict(), Path(args.save) / f"{iteration}-{slot}.pt")
"""
# What each worker has of the last stage, as scripts with stages show it.
_LAST_STAGE = """\
        group = parallel_state.get_data_parallel_group()
        mean = torch.zeros(())
        if parallel_state.is_pipeline_last_stage():
            mean = torch.stack([one["lm loss"] for one in losses]).mean()
            torch.distributed.all_reduce(mean, group=group)
            mean = mean / parallel_state.get_data_parallel_world_size()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(
            mean, src=last, group=parallel_state.get_pipeline_model_parallel_group()
        )
        shown, slot = f"{iteration} {float(mean):.9g}", os.environ["ELASWAVE_SLOT"]
        print(f"shown {shown}\\nof {slot} {shown}\\n", end="")
"""
_ASKS = """\
        mine = sum(float(total / tokens) for total, tokens in losses)
        mean = torch.tensor(mine)
        torch.distributed.all_reduce(mean)
        mean = float(mean) / torch.distributed.get_world_size()
        replica = parallel_state.get_data_parallel_rank()
        print(f"own {iteration} {replica} {mine:.9g}\\nshown {iteration} {mean:.9g}\\n", end="")
"""


def shown(run: Outcome) -> dict[int, list[list[float]]]:
    """The numbers that each worker has shown, by step."""
    steps: dict[int, list[list[float]]] = {}
    for step, numbers in re.findall(r"shown (\d+) (.+)", run.output):
        steps.setdefault(int(step), []).append([*map(float, numbers.split())])
    return steps


@proves(Kind.KILL, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize(
    ("kind", "slots", "sizes"),
    sampled([(kind, *lost) for kind in ("losses", "pairs") for lost in LOST]),
)
def test_sums_over_replicas_are_those_of_the_launch(
    run: Launch,
    reference: Reference,
    tmp_path: Path,
    kind: str,
    slots: tuple[int, ...],
    sizes: tuple[str, ...],
) -> None:
    lines = {"losses": (_LOSS, _SHOWS_LOSSES), "pairs": (_PAIR, _SHOWS)}[kind]
    spec = replace(spec_of(1, "backward"), script=own_loop.write(tmp_path, *reporting(*lines)))
    kills = tuple(f"{slot}@{2 + number}:backward" for number, slot in enumerate(slots))
    spec = replace(spec, options=(*spec.options, *sizes), kills=kills)
    survived, undisturbed = run(spec), reference(spec.undisturbed())
    check_equal(survived, undisturbed)
    wanted = shown(undisturbed)
    assert [*wanted] == [*range(spec.steps)]
    for step, found in shown(survived).items():
        # A worker that is lost in a step has not shown it.
        assert len(found) == spec.nproc - sum(step >= 2 + one for one in range(len(slots)))
        for numbers in found:
            assert numbers == pytest.approx(wanted[step][0], rel=ROUNDING), step
    assert "lacks that share" not in survived.output
    # Of a pair nobody knows whether the script divides before it sums.
    assert ("may show the loss" in survived.output) == (kind == "pairs")


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="2:optimizer")
def test_a_sum_behind_a_loss_that_met_the_update_lacks_a_share_once(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    script = own_loop.write(tmp_path, *reporting(_PAIR, _SHOWS))
    spec = replace(spec_of(1, "optimizer"), script=script)
    survived, undisturbed = run(spec), reference(spec.undisturbed())
    check_equal(survived, undisturbed)
    wanted = shown(undisturbed)
    for step, found in shown(survived).items():
        share = 0.75 if step == 2 else 1.0
        # Tokens of each worker are as many, and its losses are alike.
        for numbers in found:
            assert numbers == pytest.approx([share * one for one in wanted[step][0]], rel=0.02)
    said = "worker 1 was lost behind forward_backward, and what the script sums"
    assert survived.output.count(said) == 1


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="2:backward")
@pytest.mark.parametrize(("sizes", "slot"), [((), 1), (TP2, 3), (PP2, 3)])
def test_a_sum_over_several_steps_lacks_the_earlier_ones_of_a_lost_worker(
    run: Launch, tmp_path: Path, sizes: tuple[str, ...], slot: int
) -> None:
    """It is told, as a mean of every second step's log is of fewer tokens than the steps had."""
    script = own_loop.write(tmp_path, *reporting(_PAIR, _SHOWS_SECONDS, prints=""))
    # Steps 1 and 2 are shown together.
    spec = replace(spec_of(slot, "backward"), script=script, options=(SEED, *sizes))
    survived = run(spec)
    check_survived(survived)
    replicas = 2 if sizes else 4
    # With tensor parallelism the other half of each worker is not lost, nor what it has summed.
    tokens = {step: min(one[1] for one in numbers) for step, numbers in shown(survived).items()}
    assert tokens[2] == tokens[4] * (2 * replicas - 1) / (2 * replicas)
    said = f"worker {slot} was lost since the script has summed over its replicas"
    assert survived.output.count(said) == 1
    assert survived.output.count("that share, once") == 1
    assert len(survived.events("view_committed")) == 2


# The fraction of tokens that a policy's update has clipped, say: of a micro-batch, of a replica's
# sums, and of its samples.
_CLIPPED = "    clipped = (output.detach() > 5.5).float()\n"
RATIOS = {
    "of micro-batches": (
        '    reported = {"ratio": clipped.mean()}\n',
        'torch.stack([one["ratio"] for one in losses]).mean()',
    ),
    "of sums": (
        '    reported = {"pair": torch.stack([clipped.sum(), tokens.float()])}\n',
        'torch.stack([one["pair"] for one in losses]).sum(0)',
    ),
    "of samples": (
        '    reported = {"all": clipped.flatten()}\n',
        'torch.cat([one["all"] for one in losses]).mean()',
    ),
}
_MEAN = """\
        mine = {value}
        mine = mine[0] / mine[1] if mine.ndim else mine
        group = parallel_state.get_data_parallel_group()
        torch.distributed.all_reduce(pairs := mine.clone(), group=group)
        pairs = [pairs / parallel_state.get_data_parallel_world_size()]
"""


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="2:backward")
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_mean_of_ratios_is_the_launchs_or_its_line_is_named(
    run: Launch, reference: Reference, tmp_path: Path, ratio: str
) -> None:
    report, value = RATIOS[ratio]
    changes = reporting(_CLIPPED + report, _MEAN.format(value=value))
    spec = replace(spec_of(1, "backward"), script=own_loop.write(tmp_path, *changes))
    survived, undisturbed = run(spec), reference(spec.undisturbed())
    check_equal(survived, undisturbed)
    wanted = shown(undisturbed)
    is_linear = ratio == "of micro-batches"
    for step, found in shown(survived).items():
        for numbers in found if step < 2 or is_linear else ():
            assert numbers == pytest.approx(wanted[step][0], rel=ROUNDING), step
    assert ("may show the loss" in survived.output) == (not is_linear)


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="2:backward")
def test_a_sum_by_the_number_of_workers_is_of_those_who_are_left(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """The line that asks for it is named."""
    spec = replace(
        spec_of(1, "backward"), script=own_loop.write(tmp_path, (TRAINS, TRAINS + _ASKS))
    )
    survived, undisturbed = run(spec), reference(spec.undisturbed())
    check_equal(survived, undisturbed)
    own = {
        (int(step), int(replica)): float(number)
        for step, replica, number in re.findall(r"own (\d+) (\d+) (.+)", undisturbed.output)
    }
    for step, found in shown(survived).items():
        replicas = range(4) if step < 2 else (0, 2, 3)
        mean = sum(own[step, one] for one in replicas) / len(replicas)
        assert len(found) == len(replicas)
        assert all(numbers == pytest.approx([mean], rel=ROUNDING) for numbers in found), step
    assert re.search(r"\(get_world_size\).* may show the loss", survived.output)


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
def test_a_worker_without_a_part_of_the_model(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Rank 0 has lost its TP group: it is told the norm, and saves no weights that it has not."""
    saves = tmp_path / "saves"
    saves.mkdir()
    spec = replace(
        spec_of(1, "backward"), script=own_loop.write(tmp_path, (TRAINS, TRAINS + _SAVES))
    )
    survived = run(replace(spec, options=(*spec.options, *TP2, f"--save={saves}")))
    check_survived(survived)
    norms: dict[str, set[str]] = {}
    for step, norm in re.findall(r"norm (\d) (\S+)", survived.output):
        norms.setdefault(step, set()).add(norm)
    assert len(norms) == spec.steps and all(len(one) == 1 for one in norms.values())
    kept = {path.name for path in saves.glob("*.pt")}
    assert kept == {f"{step}-{slot}.pt" for step in range(6) for slot in range(4)} - {
        f"{step}-{slot}.pt" for step in range(2, 6) for slot in (0, 1)
    }
    assert survived.output.count("torch.save of its script is left out") == 1


@proves(Kind.KILL, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", sampled([2, 3]))
def test_what_the_last_stage_tells_its_pipeline(
    run: Launch, reference: Reference, tmp_path: Path, slot: int
) -> None:
    """Without it, a worker of the first stage keeps what it was told last, and nobody waits."""
    changes = reporting(_LOSS, _LAST_STAGE, "")
    spec = replace(spec_of(slot, "backward"), script=own_loop.write(tmp_path, *changes))
    spec = replace(spec, options=(*spec.options, *PP2))
    survived, undisturbed = run(spec), reference(spec.undisturbed())
    check_equal(survived, undisturbed)
    assert next(event["slot"] for event in survived.events("worker_exited")) == slot
    assert len(survived.events("view_committed")) == 2
    wanted = {step: numbers[0][0] for step, numbers in shown(undisturbed).items()}
    alone = slot - 2
    for one, step, number in re.findall(r"of (\d) (\d) (\S+)", survived.output):
        told = 1 if int(one) == alone and int(step) >= 2 else int(step)
        assert float(number) == pytest.approx(wanted[told], rel=ROUNDING), (one, step)
    assert survived.output.count(f"worker {alone}: a broadcast of the script has its source") == 1


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:forward")
def test_a_source_that_has_left_tells_what_it_gave(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Worker 0 is held where it has been given that, and worker 2 is in the next step by then."""
    changes = reporting(_LOSS, _LAST_STAGE, "")
    spec = replace(spec_of(1, "forward"), script=own_loop.write(tmp_path, *changes))
    spec = replace(spec, options=(SEED, *PP2), kills=("1@3:forward",))
    meets = MEETS.format(group="PIPELINE_MODEL_PARALLEL_GROUP", dies=-1, holds=0)
    survived, undisturbed = run(replace(spec, sabotage=meets)), reference(spec.undisturbed())
    assert [event["slot"] for event in survived.events("met")] == [0]
    check_equal(survived, undisturbed)
    wanted = {step: numbers[0][0] for step, numbers in shown(undisturbed).items()}
    for one, step, number in re.findall(r"of (\d) (\d) (\S+)", survived.output):
        assert float(number) == pytest.approx(wanted[int(step)], rel=ROUNDING), (one, step)
