"""The state of a step, entry by entry: how it comes back, from which worker, how it is compared.

`step_state/step_state.py` keeps what is in no shard, part by part; each part names its entry here,
and docs/step_state.md is written from this list.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """One kind of state; ``part``: the name of what keeps it, where that is no shard."""

    what: str
    where: str
    redo: str
    newcomer: str
    compared: str
    part: str | None = None


_BOTH, _MEGATRON, _LM, _DEEPSPEED = "all", "Megatron-Core", "Megatron-LM", "DeepSpeed"
_SEALED = "from the newest complete seal"
_GIVEN = "from a peer"
_AT_ENTRY = "digest at its entry"

_ROWS: tuple[tuple[str, ...], ...] = (
    (
        "trained weights, float32 masters, moments",
        _BOTH,
        _SEALED,
        "from the seals of the others",
        "digest of the weights in every recovery; checksum of every chunk read",
    ),
    (
        "scheduler, loss scaler, counts of steps, biases of experts",
        _BOTH,
        f"{_SEALED} (the capsule)",
        "the capsule of the others",
        "checksum",
    ),
    (
        "what the loop's body changed in trained weights",
        "all",
        "copied before the step and its first pass, installed on top of the seal; refused for "
        "float32 masters and moments, in ZeRO-3, and after layers have moved",
        _GIVEN,
        _AT_ENTRY,
        "the trained weights",
    ),
    (
        "all that is set in the optimizer's groups",
        "all",
        "put back",
        _GIVEN,
        _AT_ENTRY,
        "the settings of the optimizer's groups",
    ),
    (
        "weights that are not trained; names, shapes and kinds of all weights",
        "Megatron-Core, Megatron-LM",
        "put back if they differ; layers that move take theirs along",
        _GIVEN,
        "digest at the start (refused if replicas differ), at an entry and after a move",
        "weights that are not trained, or the names and shapes of weights",
    ),
    (
        "weights that are not trained",
        _DEEPSPEED,
        "constant: refused if they change between two steps, unless kept",
        "from a survivor",
        "digest before every step",
        "weights that are not trained",
    ),
    (
        "buffers that passes change, exact mode",
        "Megatron-Core, data parallel",
        "put back, each replica's own; the worker that hosts a lost replica has its values for its "
        "passes",
        "all replicas' values",
        _AT_ENTRY,
        "the model's buffers",
    ),
    (
        "buffers that passes change, fast mode",
        "Megatron-Core, data parallel; DeepSpeed, not its pipelines",
        "put back; running means and variances are averaged over the workers after each step; "
        "others are refused in the first step",
        _GIVEN,
        _AT_ENTRY,
        "the model's buffers",
    ),
    (
        "buffers that passes change",
        "with TP, PP or --reserve; Megatron-LM; DeepSpeed's pipelines",
        "refused in the first step, before the update",
        "-",
        "value before and after the passes",
        "the model's buffers",
    ),
    ("other buffers", _BOTH, "put back", _GIVEN, _AT_ENTRY, "the model's buffers"),
    (
        "how far each iterator of job.batches is",
        _MEGATRON,
        "put back",
        _GIVEN,
        "-",
        "how far the data iterators are",
    ),
    (
        "draws of layers, of forward_step and of __getitem__, by torch, NumPy and Python",
        "Megatron-Core, Megatron-LM",
        "keyed by seed, step, micro-batch or sample, layer and TP rank",
        "the same keys",
        "-",
    ),
    (
        "generators of torch, its device, NumPy and Python",
        _DEEPSPEED,
        "put back; torch is keyed by step, micro-batch and row, an item of a dataset by its place",
        "from a survivor",
        "-",
        "the random generators",
    ),
    (
        "counters, timers, batch size and reruns of the training loop",
        _LM,
        "put back",
        _GIVEN,
        "-",
        "the counters of Megatron-LM's loop",
    ),
    (
        "counters of the engine, position in the data",
        _DEEPSPEED,
        f"{_SEALED} (the capsule)",
        "the capsule of the others",
        "iteration and pass over the data before every update",
    ),
    (
        "counters, metrics, log, schedule and stateful callbacks of transformers.Trainer",
        _DEEPSPEED,
        "put back",
        _GIVEN,
        "-",
        "the Trainer's state",
    ),
    (
        "what the script gives to elaswave_plugin.keep",
        _BOTH,
        "put back",
        _GIVEN,
        "names at its entry",
        "what the script keeps",
    ),
    (
        "Python attributes of modules, variables of the script, objects that are not kept, threads",
        _BOTH,
        "not seen",
        "not seen",
        "-",
    ),
)


def state_of_a_step() -> tuple[Entry, ...]:
    """Return all entries, in the order of the docs."""
    return tuple(Entry(*row) for row in _ROWS)
