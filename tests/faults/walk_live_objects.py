"""Run as a job: after a loss, compare the live Megatron objects with freshly built ones.

Every survivor builds a second model, DDP and optimizer the ordinary way on the shrunken groups, and
walks both object trees. An attribute that still has its old value, or that only one of the two has,
is something that Megatron-Core captured and `rebind` does not know.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIST_NAMES = ("_RANKS", "_RANKS_WITH_CP")
SIMPLE = (int, float, str, bool, type(None))


def described(value: Any, seen: dict[int, str], path: str, depth: int = 0) -> Any:
    """A JSON-able picture of an object: sizes, ranks, shapes, dtypes, ranges, groups; no values."""
    if isinstance(value, SIMPLE):
        return value
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), str(value.dtype)]
    if isinstance(value, torch.distributed.ProcessGroup):
        return ["group", torch.distributed.get_process_group_ranks(value), value.rank()]
    if id(value) in seen or depth > 9:
        return "seen"
    seen[id(value)] = path
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {name: described(one, seen, path, depth + 1) for name, one in value.items()}
    if isinstance(value, dict):
        return [
            [described(key, seen, path, depth + 1), described(one, seen, path, depth + 1)]
            for key, one in value.items()
        ]
    if isinstance(value, list | tuple):
        return [described(one, seen, path, depth + 1) for one in value]
    if type(value).__module__.startswith("megatron"):
        return {
            name: described(one, seen, f"{path}.{name}", depth + 1)
            for name, one in sorted(vars(value).items())
        }
    return type(value).__name__


def dispatchers(model: Any) -> list[tuple[str, Any]]:
    """List what sends tokens to experts, and is no module."""
    return [
        (f"{name}.token_dispatcher", module.token_dispatcher)
        for name, module in model.named_modules()
        if hasattr(module, "token_dispatcher")
    ]


def picture(model: Any, optimizer: Any) -> dict[str, Any]:
    """The parts of a job that depend on its groups."""
    distributed = optimizer.chained_optimizers[0]
    return {
        "modules": {
            name: {key: value for key, value in vars(one).items() if isinstance(value, SIMPLE)}
            for name, one in (*model.named_modules(), *dispatchers(model))
        },
        "ddp": {
            name: described(value, {}, name)
            for name, value in sorted(vars(model).items())
            if name not in ("_modules", "grad_accs", "param_to_bucket_group")
        },
        "optimizer": {
            name: described(value, {}, name)
            for name, value in sorted(vars(distributed).items())
            if name not in ("model_chunks", "optimizer", "buffers", "per_model_buffers")
        },
        "param_groups": [
            [{k: v for k, v in group.items() if k != "params"}, len(group["params"])]
            for group in distributed.optimizer.param_groups
        ],
        "pieces": [
            described(distributed._get_model_param_range_map(p), {}, "range")
            if p in distributed.model_param_gbuf_map
            else None
            for p in model.module.parameters()
        ],
    }


def rank_lists() -> dict[str, Any]:
    """Every rank list of parallel_state, and the ranks of every group that it keeps."""
    from megatron.core import parallel_state

    state = {name: value for name, value in vars(parallel_state).items() if value is not None}
    groups = [value for value in state.values() if isinstance(value, dist.ProcessGroup)]
    return {
        "lists": {name: value for name, value in state.items() if name.endswith(LIST_NAMES)},
        "groups": [dist.get_process_group_ranks(group) for group in groups],
        "kinds": sorted({type(group).__name__ for group in groups}),
    }


def write_pictures(folder: str, example: dict[str, Any], job: Any) -> None:
    """Write the pictures of the job's own objects and of fresh ones."""
    (bound,) = job._framework.models
    live = picture(bound.chunks[0], bound._optimizer)
    args = example["parse_arguments"]()
    model = example["build_model"](args)
    optimizer, _ = example["build_optimizer"](args, model)
    pictures = {"live": live, "fresh": picture(model[0], optimizer), "ranks": rank_lists()}
    Path(folder, f"walk-{os.getpid()}.json").write_text(json.dumps(pictures))


if __name__ == "__main__":
    folder, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    example = runpy.run_path(script, run_name="example")
    from elaswave_plugin.adapters.megatron.job import ElasticJob

    finish = ElasticJob.finish

    def look_and_finish(job: ElasticJob) -> None:
        """Look at everything before leaving."""
        write_pictures(folder, example, job)
        finish(job)

    ElasticJob.finish = look_and_finish  # type: ignore[method-assign]
    example["main"]()
