"""Scripts whose remedy is switched off, or not used: what a rehearsal has to find by itself."""

from dataclasses import dataclass

from tests.faults import own_scripts
from tests.faults.own_scripts import Change

_RNG = "from elaswave_plugin.adapters.megatron import rng, sample_draws; "
# What refuses a second call of forward_backward in a step, and checks what it returned.
_ANY_CALLS = (
    "from elaswave_plugin.adapters.megatron.turns import Turns; "
    "Turns.forward_backward = lambda self, *, forward_only: self.returned.clear()"
)
_ATTACH = "from elaswave_plugin.adapters.megatron import step_parts; "
_KEEPS_NOT = "{part}.put_back = lambda self, kept: None"

# Reductions that begin in a backward pass are those of one call.
_NO_OVERLAP = ("--no-overlap-grad-reduce",)

_CALL = "        losses = forward_backward(data_iterator=per_chunk(train_batches), **schedule)\n"
_BUILT = "    optimizer, scheduler = build_optimizer(args, model)\n"
_STEP = "    def train_step():\n"
# A teacher's losses, and what follows from them.
DISTILLS = (
    (
        _CALL,
        "        with torch.no_grad():\n"
        "            forward_backward(data_iterator=per_chunk(train_batches), forward_only=True, "
        "**schedule)\n" + _CALL,
    ),
)
TWICE = ((_CALL, _CALL + _CALL),)
# A second model that the same step trains, with an optimizer of torch's own.
SECOND_MODEL = (
    (
        _BUILT,
        _BUILT + "    torch.manual_seed(5)\n"
        "    judge = torch.nn.Linear(4, 1)\n"
        "    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-2)\n",
    ),
    (
        _STEP,
        _STEP + "        of_judge.zero_grad()\n"
        "        judge(torch.ones(2, 4)).square().mean().backward()\n"
        "        of_judge.step()\n",
    ),
)
# Sequences that get longer, by a variable that the loop's body sets.
WARMS_UP_IN_BODY = (
    own_scripts.WARMS_UP[1],
    own_scripts.in_body("        length[0] = 16 if iteration < 2 else 24\n"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """One row of the table: the run that finds it, and words of what it names."""

    number: str
    changes: tuple[Change, ...]
    statement: str = ""
    run: str = "losses"
    names: str
    options: tuple[str, ...] = ()


TABLE = (
    Sabotage(
        number="H4 forward_step",
        changes=own_scripts.MASKS,
        statement=_RNG + "rng.seed_generators = lambda key: None",
        run="dealt-otherwise",
        names="torch.rand(",
    ),
    Sabotage(
        number="H4 dataset",
        changes=own_scripts.AUGMENTS,
        statement=_RNG + "rng.seed_generators = sample_draws.seed_generators = lambda key: None",
        run="dealt-otherwise",
        names="sample batch",
    ),
    Sabotage(
        number="H5 learning rate",
        changes=own_scripts.SETS_LR,
        statement=_ATTACH + _KEEPS_NOT.format(part="step_parts.Settings"),
        names="'lr'",
    ),
    Sabotage(
        number="H5 weights",
        changes=own_scripts.CLAMPS,
        statement=_ATTACH + _KEEPS_NOT.format(part="step_parts.Weights"),
        names="tensor weight",
    ),
    Sabotage(
        number="H6 average",
        changes=own_scripts.without_keep(own_scripts.AVERAGES),
        run="returns",
        names="average.update(model[0])",
    ),
    Sabotage(number="H6 warm-up", changes=WARMS_UP_IN_BODY, run="returns", names="length[0] = 16"),
    Sabotage(
        number="H8 forward only", changes=DISTILLS, statement=_ANY_CALLS, names="sample batch"
    ),
    Sabotage(
        number="H9 twice", changes=TWICE, statement=_ANY_CALLS, names="norm", options=_NO_OVERLAP
    ),
    Sabotage(number="H10 second model", changes=SECOND_MODEL, names="judge"),
)
