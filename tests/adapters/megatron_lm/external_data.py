"""Runs pretrain_gpt.py with loaders of its own: endless streams of tokens, one for each replica."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH, VOCABULARY = 32, 120


class Stream:
    """Micro-batches of one replica, from a generator that nobody can set to a place."""

    def __init__(self, seed: int, size: int) -> None:
        self._batches = self._endless(seed, size)

    @staticmethod
    def _endless(seed: int, size: int) -> Iterator[dict[str, Any]]:
        import torch

        draw = torch.Generator().manual_seed(seed)
        while True:
            words = torch.randint(1, VOCABULARY, (size, LENGTH + 1), generator=draw)
            yield {
                "tokens": words[:, :-1].contiguous(),
                "labels": words[:, 1:].contiguous(),
                "loss_mask": torch.ones(size, LENGTH),
                "attention_mask": torch.ones(size, 1, LENGTH, LENGTH).triu(1).bool(),
                "position_ids": torch.arange(LENGTH).repeat(size, 1),
            }

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)


def provide(numbers: Any) -> Any:
    """Loaders as examples/multimodal has them: on the first worker of a tensor parallel group."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None, None, None
    seed, size = parallel_state.get_data_parallel_rank(), get_args().micro_batch_size
    return Stream(seed, size), [Stream(100 + seed, size)], Stream(200 + seed, size)


if __name__ == "__main__":
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    import megatron.training

    native = megatron.training.pretrain

    def pretrain(provider: Any, *args: Any, **kwargs: Any) -> Any:
        """The script's call, with the loaders of this file."""
        provide.is_distributed = True  # type: ignore[attr-defined]
        return native(provide, *args, **kwargs)

    megatron.training.pretrain = pretrain
    runpy.run_path(str(folder / "pretrain_gpt.py"), run_name="__main__")
