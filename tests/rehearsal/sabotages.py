"""Scripts whose remedy is switched off, or not used: what a rehearsal has to find by itself."""

import json
from dataclasses import dataclass, replace

from tests.deepspeed.harness import EngineSpec
from tests.deepspeed.test_own_calls import OWN_CALLS
from tests.deepspeed.test_own_state import OWN as OWN_STATE
from tests.faults import own_scripts
from tests.faults.own_scripts import Change

_RNG = (
    "from elaswave_plugin.adapters.megatron.compat import rng; "
    "from elaswave_plugin.adapters.megatron.step import sample_draws; "
)
# What refuses a second call that trains on gradients that are reduced already.
_ANY_CALLS = (
    "from elaswave_plugin.adapters.megatron.sums.step_gradients import StepGradients; "
    "StepGradients.zero = lambda self, model: self._reduced.clear()"
)
# What refuses an optimizer that is not bound.
_ANY_OPTIMIZER = (
    "from elaswave_plugin.adapters.unbound import Unbound; "
    "Unbound.__init__ = Unbound.stop = lambda self, *args, **named: None"
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
        number="H7 buffers",
        changes=own_scripts.NORMALIZES,
        statement="from elaswave_plugin.adapters.megatron.state.model_buffers import ModelBuffers; "
        + _KEEPS_NOT.format(part="ModelBuffers"),
        names="tensor buffer normalized",
    ),
    Sabotage(number="H7 counter", changes=own_scripts.COUNTS_PASSES, names="PASSES[0]"),
    Sabotage(
        number="H8 forward only",
        changes=DISTILLS,
        statement="from elaswave_plugin.adapters.megatron.step.positions import Positions; "
        + _KEEPS_NOT.format(part="Positions"),
        names="sample batch",
    ),
    Sabotage(
        number="H9 twice", changes=TWICE, statement=_ANY_CALLS, names="norm", options=_NO_OVERLAP
    ),
    Sabotage(
        number="H10 second model",
        changes=SECOND_MODEL,
        statement=_ANY_OPTIMIZER,
        names="judge",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSabotage:
    """A row of DeepSpeed's, whose remedy is switched off by the statement of ``spec``."""

    number: str
    spec: EngineSpec
    run: str = "losses"
    names: str


_ADAPTER, _PARTS = "elaswave_plugin.adapters.deepspeed", "elaswave_plugin.step_state.engine_parts"
_UNSCHEDULED = json.dumps({"scheduler": None})
ENGINE_TABLE = (
    EngineSabotage(
        number="G1 second engine",
        spec=replace(
            OWN_CALLS,
            stage=0,
            options=("--what=gan",),
            sabotage=_ANY_OPTIMIZER
            + f"; from {_ADAPTER} import attach; attach.refuse_second = lambda jobs: None",
        ),
        # Interrupted in a call of that engine.
        names="a call that is not made again",
    ),
    EngineSabotage(
        number="G2 no_sync",
        spec=replace(
            OWN_CALLS,
            options=("--what=no_sync",),
            sabotage=f"from {_ADAPTER}.engine.job import EngineJob; "
            "EngineJob._no_sync = lambda job, native: native()",
        ),
        run="returns",
        # Interrupted in the first batch of a pair, even as planned: ZeRO 1 misses its gradients.
        names="KeyError: 0 (stage_1_and_2.py",
    ),
    EngineSabotage(
        number="G3 running statistics",
        spec=replace(
            OWN_STATE,
            options=("--mode=statistics",),
            sabotage=f"from {_PARTS} import Buffers; " + _KEEPS_NOT.format(part="Buffers"),
        ),
        names="buffer norm.running_mean",
    ),
    EngineSabotage(
        number="G4 teacher",
        spec=replace(
            OWN_STATE,
            options=("--mode=teacher",),
            settings=_UNSCHEDULED,
            sabotage=f"from {_PARTS} import Frozen; Frozen.keep = lambda self: None",
        ),
        run="returns-2",
        # The teacher itself differs in a step that was made again by fewer, which is not compared.
        names="loss of samples",
    ),
)
