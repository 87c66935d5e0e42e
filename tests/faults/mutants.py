"""Mutants of `examples/train_gpt.py`: one of its ten marked lines is wrong; how each one ends."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.harness import SCRIPT

TRAINS = "trains right"
REFUSED = "refused"
RAISES = "its own error, once"
EVALUATES = ("--eval-interval=1", "--eval-iters=1")
SAVES = ("--save=SAVED", "--save-interval=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`change` made of the marked line `line`; `words`: what the user has to read at its `end`.

    ``options``: of the script, without which the line would not be reached.
    """

    line: int
    change: str
    script: str
    end: str
    words: str = ""
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.line} {self.change}"


def mutants() -> Iterator[Mutant]:
    """All of them, by line."""
    text = SCRIPT.read_text()
    yield from _left_out(text)
    yield from _moved(text)
    yield from _replaced(text)


# what: (how it ends, the words)
_LEFT_OUT = {
    1: (RAISES, "NameError: name 'elaswave' is not defined"),
    2: (REFUSED, "write elaswave.add_arguments(parser)"),
    # On the CPU, where the records that attach applies stand in for torch.cuda.
    3: (RAISES, "Error: "),
    4: (RAISES, "AssertionError"),
    5: (REFUSED, "job.train is called before job.bind: write job.bind("),
    6: (RAISES, "name 'train_batches' is not defined"),
    7: (RAISES, "name 'forward_backward' is not defined"),
    8: (RAISES, "IndentationError"),
    9: (RAISES, "NameError: name 'loss' is not defined"),
    10: (RAISES, "IndentationError"),
}


def _left_out(text: str) -> Iterator[Mutant]:
    for line, (end, words) in _LEFT_OUT.items():
        kept = [one for one in text.splitlines() if not one.endswith(f"# [elastic] {line}")]
        yield Mutant(
            line=line,
            change="left out",
            script="\n".join(kept),
            end=end,
            words=words,
            options=EVALUATES if line == 9 else (),
        )


_UP = {
    1: (TRAINS, ""),
    2: (TRAINS, ""),
    3: (RAISES, "cannot access local variable 'args'"),
    4: (TRAINS, ""),
    5: (TRAINS, ""),
    6: (TRAINS, ""),
    7: (TRAINS, ""),
    8: (RAISES, "cannot access local variable 'last'"),
}
_DOWN = {
    1: (TRAINS, ""),
    2: (REFUSED, "write elaswave.add_arguments(parser)"),
    3: (RAISES, "Error: "),
    4: (RAISES, "AssertionError"),
    5: (TRAINS, ""),
    6: (TRAINS, ""),
    7: (TRAINS, ""),
    9: (RAISES, "cannot access local variable 'loss'"),
}


def _moved(text: str) -> Iterator[Mutant]:
    for how, step, ends in (("up", -1, _UP), ("down", 1, _DOWN)):
        for line, (end, words) in ends.items():
            yield Mutant(
                line=line,
                change=f"moved {how} by one statement",
                script=_swapped(text, line, step),
                end=end,
                words=words,
                options=EVALUATES if line == 9 else (),
            )


def _swapped(text: str, line: int, step: int) -> str:
    """The marked statement and its neighbour in the same block in each other's place."""
    lines = text.splitlines()
    (marked,) = (n for n, one in enumerate(lines, 1) if one.endswith(f"# [elastic] {line}"))
    for node in ast.walk(ast.parse(text)):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for place, statement in enumerate(block if isinstance(block, list) else ()):
                if statement.lineno == marked:
                    first, second = sorted((place, place + step))
                    return "\n".join(_swap(lines, _span(block[first]), _span(block[second])))
    raise ValueError(f"no statement begins in the line marked {line}")


def _span(statement: ast.stmt) -> tuple[int, int]:
    decorators = getattr(statement, "decorator_list", [])
    first = min(one.lineno for one in (statement, *decorators))
    assert statement.end_lineno is not None
    return first - 1, statement.end_lineno


def _swap(lines: list[str], one: tuple[int, int], two: tuple[int, int]) -> list[str]:
    between = lines[one[1] : two[0]]
    return [*lines[: one[0]], *lines[slice(*two)], *between, *lines[slice(*one)], *lines[two[1] :]]


_FB = "job.forward_backward(get_forward_backward_func())"
_CALL = "forward_backward(data_iterator=per_chunk(train_batches), **schedule)"
_LOADER = "torch.utils.data.DataLoader(train, batch_size=args.micro_batch_size)"
_DP = "parallel_state.get_data_parallel_world_size()"
_COUNT = f"args.global_batch_size // args.micro_batch_size // {_DP}"
_REDUCED = """\
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    reported = (float(total), float(tokens))"""
_LOOP = "for iteration, report in job.train(train_step, last_checkpoint=last):"
_PLAIN_LOOP = """for iteration in range(args.train_iters):
        train_step()
        continue"""

# (line, change, what is replaced, by what, how it ends, the words, options)
Replacement = tuple[int, str, str, str, str, str]
_REPLACED: tuple[Replacement, ...] = (
    (
        1,
        "the package itself",
        "from elaswave_plugin.adapters import megatron as elaswave",
        "import elaswave_plugin as elaswave",
        RAISES,
        "has no attribute 'add_arguments'",
    ),
    (
        1,
        "the other framework",
        "from elaswave_plugin.adapters import megatron as elaswave",
        "from elaswave_plugin.adapters import deepspeed as elaswave",
        RAISES,
        "has no attribute 'add_arguments'",
    ),
    (
        2,
        "without the parser",
        "elaswave.add_arguments(parser)",
        "elaswave.add_arguments()",
        RAISES,
        "missing 1 required positional argument: 'parser'",
    ),
    (
        2,
        "on a group of arguments",
        "elaswave.add_arguments(parser)",
        "elaswave.add_arguments(experts)",
        TRAINS,
        "",
    ),
    (
        3,
        "without the arguments",
        "elaswave.attach(args)",
        "elaswave.attach()",
        RAISES,
        "missing 1 required positional argument: 'args'",
    ),
    (
        3,
        "a dict of arguments",
        "elaswave.attach(args)",
        "elaswave.attach(vars(args))",
        REFUSED,
        "attach got a dict",
    ),
    (
        3,
        "the parser's names are others",
        "elaswave.attach(args)",
        "elaswave.attach((args.__dict__.pop('global_batch_size'), args)[1])",
        REFUSED,
        "write args.global_batch_size = ... before attach(args)",
    ),
    (
        3,
        "a text for a number",
        "elaswave.attach(args)",
        "elaswave.attach((setattr(args, 'micro_batch_size', '1'), args)[1])",
        REFUSED,
        "args.micro_batch_size is '1', wanted a whole number",
    ),
    (
        4,
        "gloo",
        "init_process_group(**job.process_group())",
        "init_process_group('gloo')",
        REFUSED,
        "write torch.distributed.init_process_group(**job.process_group())",
    ),
    (
        4,
        "gloo before attach",
        "job = elaswave.attach(args)",
        "torch.distributed.init_process_group('gloo'); job = elaswave.attach(args)",
        REFUSED,
        "torch.distributed is initialized already, on 'gloo'",
    ),
    (
        4,
        "one more group of gloo",
        "model = build_model(args)",
        "torch.distributed.new_group(backend='gloo'); model = build_model(args)",
        REFUSED,
        "leave out its backend, as in torch.distributed.new_group(ranks)",
    ),
    (4, "no double asterisk", "(**job.process_group())", "(job.process_group())", RAISES, ""),
    (
        5,
        "the bare model",
        "job.bind(model,",
        "job.bind(model[0].module,",
        REFUSED,
        "the model is GPTModel",
    ),
    (
        5,
        "optimizer and model exchanged",
        "job.bind(model, optimizer,",
        "job.bind(optimizer, model,",
        REFUSED,
        "carries one Megatron-Core DDP model",
    ),
    (
        5,
        "torch's own optimizer",
        "job.bind(model, optimizer,",
        "job.bind(model, optimizer.optimizer,",
        REFUSED,
        "wanted one DistributedOptimizer",
    ),
    (5, "without train_iters", ", train_iters=args.train_iters)", ")", RAISES, "'train_iters'"),
    (5, "no steps", "train_iters=args.train_iters)", "train_iters=0)", REFUSED, "train_iters=0"),
    (
        5,
        "the learning rate for the schedule",
        "job.bind(model, optimizer, scheduler,",
        "job.bind(model, optimizer, args.lr,",
        REFUSED,
        "float as scheduler",
    ),
    (
        5,
        "twice",
        "job.bind(model, optimizer, scheduler, train_iters=args.train_iters)",
        "[job.bind(model, optimizer, scheduler, train_iters=args.train_iters) for _ in 'ab']",
        REFUSED,
        "job.bind is called twice",
    ),
    (
        6,
        "a loader of one's own",
        "= job.batches(train), job.batches(valid)",
        f"= iter({_LOADER}), None",
        REFUSED,
        "write train_batches = job.batches(dataset)",
    ),
    (
        6,
        "a loader in it",
        "= job.batches(train),",
        f"= job.batches({_LOADER}),",
        REFUSED,
        "write job.batches(loader.dataset)",
    ),
    (
        6,
        "an iterator in it",
        "= job.batches(train),",
        "= job.batches(iter([train[0]])),",
        REFUSED,
        "wanted a dataset with dataset[i]",
    ),
    (
        6,
        "nothing in it",
        "= job.batches(train),",
        "= job.batches(None),",
        REFUSED,
        "wanted a dataset with dataset[i]",
    ),
    (
        6,
        "a list of samples",
        "= job.batches(train),",
        "= job.batches([train[i] for i in range(len(train))]),",
        TRAINS,
        "",
    ),
    (7, "Megatron-Core's own", _FB, "get_forward_backward_func()", RAISES, "'num_microbatches'"),
    (
        7,
        "Megatron-Core's own, with its count",
        _CALL,
        f"get_forward_backward_func()(data_iterator=train_batches, num_microbatches={_COUNT}, "
        "**schedule)",
        REFUSED,
        "write forward_backward = job.forward_backward(",
    ),
    (
        7,
        "not called",
        _FB,
        "job.forward_backward(get_forward_backward_func)",
        REFUSED,
        "job.forward_backward got get_forward_backward_func",
    ),
    (
        7,
        "the forward step in it",
        _FB,
        "job.forward_backward(forward_step)",
        REFUSED,
        "job.forward_backward got forward_step",
    ),
    (
        7,
        "with Megatron's num_microbatches",
        _CALL,
        _CALL.replace("**", f"num_microbatches={_COUNT}, **"),
        TRAINS,
        "",
    ),
    (
        7,
        "num_microbatches of the whole batch",
        _CALL,
        _CALL.replace("**", "num_microbatches=args.global_batch_size, **"),
        REFUSED,
        "num_microbatches=4, wanted 2",
    ),
    (
        7,
        "num_microbatches of a smaller batch",
        _CALL,
        _CALL.replace("**", "num_microbatches=1, **"),
        REFUSED,
        "num_microbatches=1, wanted 2",
    ),
    (
        7,
        "another micro-batch size",
        '"micro_batch_size": args.micro_batch_size',
        '"micro_batch_size": 2',
        REFUSED,
        "micro_batch_size=2, and args.micro_batch_size is 1",
    ),
    (7, "called twice a step", _CALL, f"{_CALL}; {_CALL}", REFUSED, "twice in one training step"),
    (
        7,
        "an all_reduce of the reported loss",
        "    reported = (float(total), float(tokens))",
        _REDUCED,
        REFUSED,
        "all_reduce is called in loss_func (train_gpt.py:",
    ),
    (
        7,
        "losses as a dict",
        "(float(total), float(tokens))",
        "{'lm loss': torch.stack([total.detach(), tokens.detach()])}",
        TRAINS,
        "",
    ),
    (
        7,
        "losses as a tensor",
        "(float(total), float(tokens))",
        "torch.stack([total.detach(), tokens.detach()])",
        TRAINS,
        "",
    ),
    (
        7,
        "two losses",
        "(float(total), float(tokens))",
        "{'lm loss': total.detach(), 'mtp loss': total.detach()}",
        REFUSED,
        "reports 2 losses (lm loss, mtp loss)",
    ),
    (
        7,
        "losses as a text",
        "(float(total), float(tokens))",
        "str(float(total))",
        REFUSED,
        "loss_func reports a str",
    ),
    (
        8,
        "a loop of one's own",
        _LOOP,
        _PLAIN_LOOP,
        REFUSED,
        "write `for iteration, report in job.train(train_step):`",
    ),
    (
        8,
        "train_step called",
        "job.train(train_step,",
        "job.train(train_step(),",
        REFUSED,
        "write `for iteration, report in job.train(train_step):`",
    ),
    (
        8,
        "the result called",
        "job.train(train_step, last_checkpoint=last)",
        "job.train(None)",
        REFUSED,
        "job.train got NoneType None, wanted a function",
    ),
    (
        8,
        "a folder for the last checkpoint",
        "last_checkpoint=last)",
        "last_checkpoint='saved')",
        REFUSED,
        "job.train got str 'saved', wanted a function",
    ),
    (
        8,
        "twice",
        f"    {_LOOP}",
        f"    next(job.train(train_step))\n    {_LOOP}",
        REFUSED,
        "job.train is called twice",
    ),
    (8, "left early", _LOOP, f"{_LOOP}\n        break", RAISES, "job.finish()"),
    (
        8,
        "losses alone",
        "return losses, grad_norm",
        "return losses",
        REFUSED,
        "write `return losses, grad_norm`",
    ),
    (
        8,
        "the mean loss",
        "return losses, grad_norm",
        "return sum(a for a, _ in losses), grad_norm",
        REFUSED,
        "train_step returned a float as losses",
    ),
    (
        8,
        "one loss of several",
        "return losses, grad_norm",
        "return losses[:1], grad_norm",
        REFUSED,
        "train_step returned a list of 1 as losses",
    ),
    (
        8,
        "all that the optimizer returned",
        "return losses, grad_norm",
        "return losses, (True, 1, 2)",
        REFUSED,
        "as gradient norm",
    ),
    (
        9,
        "the function itself",
        "job.evaluate(evaluate)",
        "evaluate()",
        REFUSED,
        "write loss = job.evaluate(evaluate)",
    ),
    (
        9,
        "evaluate called",
        "job.evaluate(evaluate)",
        "job.evaluate(evaluate())",
        REFUSED,
        "write loss = job.evaluate(evaluate)",
    ),
    (
        9,
        "a training step in it",
        "job.evaluate(evaluate)",
        "job.evaluate(train_step)",
        REFUSED,
        "forward_backward trains inside of job.evaluate",
    ),
    (
        9,
        "one batch, not in a list",
        "for _ in range(args.eval_iters)\n            ]",
        "for _ in range(args.eval_iters)\n            ][0]",
        REFUSED,
        "evaluate returned",
    ),
    (10, "the function itself", 'job.run(save, phase="save")', "save()", TRAINS, ""),
    (
        10,
        "save called",
        "job.run(save,",
        "job.run(save(),",
        REFUSED,
        "job.run got NoneType None, wanted a function",
    ),
    (10, "without a phase", ', phase="save")', ")", RAISES, "'phase'"),
    (10, "a number for the phase", 'phase="save")', "phase=3)", REFUSED, "phase=3, wanted a name"),
)


def _replaced(text: str) -> Iterator[Mutant]:
    for line, change, old, new, end, words in _REPLACED:
        assert old in text, old
        yield Mutant(
            line=line,
            change=change,
            script=text.replace(old, new),
            end=end,
            words=words,
            options={9: EVALUATES, 10: SAVES}.get(line, ()),
        )
