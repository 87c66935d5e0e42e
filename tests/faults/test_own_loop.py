"""A script without a line of ours: its loop survives losses, by the calls that it makes anyway."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.config import SAVE_PHASE, STEP_PHASES
from tests.checkpoints.reader import differences, read_checkpoint
from tests.convoys import Convoy, convoys
from tests.faults import own_loop
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived, check_went_on
from tests.faults.own_scripts import Change, before_model
from tests.proofs import Kind, Promise, proves

SEED = "--elaswave-seed=1234"
VERBS = JobSpec(nproc=4, steps=6, options=("--eval-interval=1",))
PHASES = (*STEP_PHASES, "evaluation")


def spec_of(slot: int, phase: str) -> JobSpec:
    """The job that loses a worker once it has made two steps."""
    options = (*VERBS.options, SEED)
    return replace(VERBS, script=own_loop.__file__, options=options, kills=(f"{slot}@2:{phase}",))


PP2 = ("--pipeline-model-parallel-size=2",)
TP2 = ("--tensor-model-parallel-size=2", "--sequence-parallel")
# The loss scaler begins so high that it skips steps.
FP16 = ("--fp16", f"--initial-loss-scale={2**20}", "--loss-scale-window=2")
FORMS = (PP2, TP2, FP16)
_PASSES = "        losses = forward_backward(data_iterator=per_chunk(train_batches)"
_UPDATE = "        _, grad_norm, _ = optimizer.step()\n"
TRAINS = "        losses, grad_norm = train_step()\n"
_ITERATOR = "iter(loader(train)), loader(valid)"
LINES: dict[str, tuple[tuple[Change, ...], str]] = {
    "another iterator for each two steps": (
        (
            (
                TRAINS,
                "        if iteration % 2 == 0:\n            train_batches = iter(loader(train))\n"
                + TRAINS,
            ),
        ),
        "1@2:snapshot",
    ),
    "autocast": (
        (
            (
                _PASSES,
                "        with torch.autocast('cpu', torch.bfloat16):\n    " + _PASSES,
            ),
        ),
        "1@2:optimizer",
    ),
    "a sum of its own before the update": (
        (
            (
                _UPDATE,
                "        own = torch.tensor(losses)\n        torch.distributed.all_reduce(own)\n"
                + _UPDATE,
            ),
        ),
        "1@2:reduce",
    ),
    "timers that wait for all": (
        (
            (
                "    for iteration in range(args.train_iters):\n",
                "    timers = __import__('megatron.core.timers').core.timers.Timers(2, 'minmax')\n"
                "    for config in (model[0].config, optimizer.config):\n"
                "        config.timers, config.barrier_with_L1_time = timers, True\n"
                "    for iteration in range(args.train_iters):\n",
            ),
        ),
        "1@2:backward",
    ),
}


_FUNCTIONS = """\
def by_epoch(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def moved(batches):
    for batch in batches:
        yield {name: tensor.cuda() for name, tensor in batch.items()}


"""
# Of each: what makes the iterator, over a loader whose second epoch begins with the third step.
MADE = {
    "a generator": "by_epoch(few)",
    "a generator that moves its batches": "moved(by_epoch(few))",
    "itertools.cycle": "__import__('itertools').cycle(few)",
}


def reading(made: str, *, num_workers: int) -> tuple[Change, ...]:
    """An iterator in place of one pass over a loader, in an order that is another each epoch."""
    dataset = "torch.utils.data.Subset(train, range(16))"
    return (
        before_model(_FUNCTIONS),
        (_ITERATOR, f"{made.replace('few', f'loader({dataset})')}, loader(valid)"),
        ("shuffle=False", "shuffle=True"),
        ("sampler=sampler)", f"sampler=sampler, num_workers={num_workers})"),
    )


def validation_of(run: Outcome) -> list[str]:
    """The losses of evaluations that the script has printed."""
    return re.findall(r"validation loss (\S+)", run.output)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("slot", "phase"), convoys([(s, p) for s in range(4) for p in PHASES], spec_of)
)
def test_it_is_equal_to_the_loop_of_the_job(
    convoy: Convoy, reference: Reference, slot: int, phase: str
) -> None:
    """Its data come in the same order, and so do its draws: the verbs' run is the reference."""
    verbs = reference(VERBS)
    convoy.check(verbs.trace(), lambda: check_equal(convoy.run, verbs))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize("sizes", FORMS, ids=" ".join)
def test_with_stages_and_tensor_parallelism(
    run: Launch, reference: Reference, sizes: tuple[str, ...]
) -> None:
    verbs = replace(VERBS, options=(*VERBS.options, *sizes))
    spec = spec_of(1, "backward")
    survived = run(replace(spec, options=(*spec.options, *sizes)))
    check_equal(survived, reference(verbs))
    # Rank 0 is of the first stage, which reports nothing, also where it runs the last one's.
    assert sizes != PP2 or {*validation_of(survived)} == {"0x0.0p+0"}


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="2:backward")
def test_micro_batches_stay_whole_in_fast_mode(run: Launch) -> None:
    """Its iterator gives no parts of them, and as many of two samples as of one."""
    spec = replace(spec_of(1, "backward"), consistency="fast")
    cut = ("--micro-batch-size=2", "--calculate-per-token-loss", SEED, *TP2)
    check_went_on(run(replace(spec, options=cut)))
    refused = run(replace(spec, options=(*cut, "--elaswave-dataflow=resize")))
    assert refused.returncode == 2
    assert refused.output.count("the script's iterator gives whole micro-batches") == 1


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize("line", LINES)
def test_lines_that_stand_between_the_calls(
    run: Launch, reference: Reference, tmp_path: Path, line: str
) -> None:
    changes, kill = LINES[line]
    spec = replace(spec_of(1, "backward"), script=own_loop.write(tmp_path, *changes))
    survived = run(replace(spec, kills=(kill,)))
    check_equal(survived, reference(spec.undisturbed()))
    said = survived.output.count("barrier_with_L1_time is switched off")
    assert said == line.startswith("timers")


@proves(Kind.KILL, Promise.EQUAL, victim="1, 3", moment="2:backward, 4:data")
@pytest.mark.parametrize(
    ("made", "num_workers"),
    [
        *((one, 0) for one in MADE),
        ("a generator that moves its batches", 2),
        pytest.param("a generator", 2, marks=pytest.mark.slow),
        pytest.param("itertools.cycle", 2, marks=pytest.mark.slow),
    ],
)
def test_iterators_that_go_on_over_a_loader(
    run: Launch, reference: Reference, tmp_path: Path, made: str, num_workers: int
) -> None:
    """Two losses in a later epoch, whose order the generator sets."""
    changes = reading(MADE[made], num_workers=num_workers)
    spec = replace(spec_of(1, "backward"), script=own_loop.write(tmp_path, *changes))
    survived = run(replace(spec, kills=("1@2:backward", "3@4:data")))
    check_equal(survived, reference(spec.undisturbed()))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:evaluation")
@pytest.mark.parametrize("sizes", [(), PP2, TP2], ids=" ".join)
def test_a_generator_for_each_evaluation(
    run: Launch, reference: Reference, tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    evaluates = ("= iter(valid_loader)", "= moved(valid_loader)")
    changes = (*reading(MADE["a generator"], num_workers=0), evaluates)
    spec = replace(spec_of(1, "evaluation"), script=own_loop.write(tmp_path, *changes))
    spec = replace(spec, options=(*spec.options, *sizes))
    survived, undisturbed = run(spec), reference(spec.undisturbed())
    check_equal(survived, undisturbed)
    if not sizes:
        assert validation_of(survived) == validation_of(undisturbed) != []


_SAVES = "    dist_checkpointing.save(state, str(path))"
COPIES: dict[str, tuple[Change, ...]] = {
    "the states themselves": (),
    "copies of them": (
        (_SAVES, "    state = {name: {**one} for name, one in state.items()}\n" + _SAVES),
    ),
}


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE, victim="2", moment="4:save")
@pytest.mark.parametrize("what", COPIES)
def test_its_checkpoints_are_those_without_a_loss(run: Launch, tmp_path: Path, what: str) -> None:
    """Its validation losses, too, which it sums up itself."""
    script, runs = own_loop.write(tmp_path, *COPIES[what]), []
    for kills in ((), (f"2@4:{SAVE_PHASE}",)):
        saves = tmp_path / str(len(runs))
        options = (*VERBS.options, SEED, f"--save={saves}", "--save-interval=2")
        spec = replace(spec_of(0, "data"), script=script, options=options, kills=kills)
        runs.append(run(spec))
        assert (saves / "latest_checkpointed_iteration.txt").read_text() == "6"
    check_survived(runs[1])
    assert validation_of(runs[0]) == validation_of(runs[1])
    for step in (2, 4, 6):
        first, second = (read_checkpoint(tmp_path / n / f"iter_{step:07d}") for n in ("0", "1"))
        assert differences(first, second) == []


_WRITES = "        if torch.distributed.get_rank() == 0:\n            written.append(iteration)\n"
_STEPS = "    for iteration in range(args.train_iters):\n"


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
def test_a_list_of_rank_0_that_the_next_one_does_not_have(run: Launch, tmp_path: Path) -> None:
    """The job ends where no worker is left, and each says once what to write."""
    script = own_loop.write(
        tmp_path,
        (_STEPS, "    written = None if torch.distributed.get_rank() else []\n" + _STEPS),
        (TRAINS, TRAINS + _WRITES),
    )
    ended = run(replace(spec_of(0, "backward"), nproc=2, script=script))
    assert (ended.returncode, ended.orphans) == (1, ())
    assert ended.output.count("worker 1 is rank 0 because another was lost") == 1
    assert "'NoneType' object has no attribute 'append'" in ended.output


@proves(Kind.RAISE, Promise.STOPS)
def test_a_last_save_that_fails_on_rank_0_fails_the_job(run: Launch, tmp_path: Path) -> None:
    """No other worker does again what it does alone behind the last step."""
    fails = "    if torch.distributed.get_rank() == 0:\n        raise OSError('no space is left')\n"
    loop = own_loop.LOOP.rstrip()
    script = own_loop.write(tmp_path, (loop, f"{loop}\n{fails}"))
    ended = run(replace(spec_of(0, "data").undisturbed(), script=script))
    assert (ended.returncode, ended.orphans) == (1, ())
    assert "worker 0 failed after step 5: OSError: no space is left" in ended.output


_FETCH = "    forward_backward = get_forward_backward_func()\n"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
BAD: dict[str, tuple[Change, str]] = {
    "gradients changed by hand": (
        (_UPDATE, "        model[0].buffers[0].grad_data.mul_(0.5)\n" + _UPDATE),
        "the script changes gradients or weights between forward_backward and optimizer.step()",
    ),
    "a list of batches": (
        (_ITERATOR, "[*loader(train)], loader(valid)"),
        "data_iterator is a list, which is no iterator",
    ),
    "a generator that knows its rank": (
        (
            "train_batches, valid_loader = iter(loader(train))",
            "rank = torch.distributed.get_rank()\n    train_batches, valid_loader ="
            " (one for one in loader(train) if rank >= 0)",
        ),
        "data_iterator is a generator that is made of other things on rank 1 than on rank 0 (rank)",
    ),
    "an optimizer of torch's": (
        (
            "    optimizer, scheduler = build_optimizer(args, model)\n",
            "    optimizer = torch.optim.Adam(model[0].parameters(), lr=args.lr)\n"
            "    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)\n",
        ),
        "torch's own change no weight of such a model",
    ),
    "two updates of one pass": (
        (_UPDATE, _UPDATE + "        optimizer.step()\n"),
        "optimizer.step() is called, and forward_backward has trained nothing since",
    ),
    "the schedule imported by its name": (
        (
            f"from {_SCHEDULES} import get_forward_backward_func\n",
            f"from {_SCHEDULES} import forward_backward_no_pipelining\n\n"
            "def get_forward_backward_func():\n    return forward_backward_no_pipelining\n\n",
        ),
        "have each step call what get_forward_backward_func() returns",
    ),
    "a second loop, of another model": (
        (
            own_loop.LOOP,
            own_loop.LOOP.rstrip("\n")
            + "\n    schedule['model'] = build_model(args)[0]\n"
            + "    train_step()\n\n\n",
        ),
        "forward_backward trains a second model",
    ),
    "a second model that is never stepped": (
        (
            TRAINS,
            TRAINS
            + "        other = {**schedule, 'model': build_model(args)[0]}\n"
            + "        forward_backward(data_iterator=train_batches, **other)\n",
        ),
        "forward_backward trains a second model",
    ),
    "the schedule by a name from before": (
        (
            _FETCH,
            "    import inspect\n"
            + _FETCH
            + "    forward_backward = inspect.unwrap(forward_backward)\n",
        ),
        "an optimizer that is not bound",
    ),
}


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize("what", BAD)
def test_what_it_cannot_do_is_one_sentence(run: Launch, tmp_path: Path, what: str) -> None:
    change, sentence = BAD[what]
    spec = JobSpec(nproc=2, steps=3, script=own_loop.write(tmp_path, change))
    refused = run(spec)
    assert (refused.returncode, refused.orphans) == (2, ())
    assert refused.output.count(sentence) == 1
    assert "Traceback" not in refused.output
