"""What the framework asks of the state of one kind of DeepSpeed optimizer."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from elaswave_plugin.runtime.state_dump import NamedPiece

# Beside the master weights, in the order of ``core/shards.py``.
MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroState(Protocol):
    """The optimizer state of one worker, as flat tensors in the order of ``core/shards.py``."""

    alignment: int

    @property
    def params(self) -> list[Any]:
        """The parameters whose state this is."""

    def lengths(self) -> tuple[int, ...]:
        """Unpadded lengths of the buckets, in elements."""

    def prepare(self) -> None:
        """Give every master the moments that Adam would make in its first step."""

    def parts(self) -> list[torch.Tensor]:
        """Masters, exp_avg, exp_avg_sq of this worker's shard, bucket after bucket."""

    def drop(self) -> None:
        """Forget an interrupted step."""

    def recut(self) -> None:
        """Cut the state anew from the group's present size; undefined until written."""

    def write(self, payload: torch.Tensor) -> None:
        """Install a payload of shape [3, shard_numel]."""

    def sync_weights(self) -> Iterator[torch.Tensor]:
        """Gather the weights from their shards; yields those that every worker now holds."""

    def named_pieces(self) -> Iterator[NamedPiece]:
        """This worker's pieces of the state, by global parameter name."""


def prepare_moments(inner: Any, masters: Sequence[torch.Tensor]) -> None:
    """Give every master the moments that Adam would make in its first step."""
    for master in masters:
        if not inner.state[master]:
            _set_moments(inner, master, torch.zeros_like(master), torch.zeros_like(master))


def _set_moments(
    inner: Any, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> None:
    inner.state[master] = {
        # torch counts in a tensor, DeepSpeed's own Adam in an integer.
        "step": torch.tensor(0.0) if type(inner).__module__.startswith("torch.") else 0,
        "exp_avg": exp_avg.detach().reshape(master.shape),
        "exp_avg_sq": exp_avg_sq.detach().reshape(master.shape),
    }


def flat_parts(inner: Any, masters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Masters, then each moment, in order."""
    moments = [inner.state[master][part] for part in MOMENTS for master in masters]
    return [*(master.detach() for master in masters), *moments]


@torch.no_grad()
def write_flat(inner: Any, masters: Sequence[torch.Tensor], payload: torch.Tensor) -> None:
    """Install a payload of shape [3, sum of the masters' elements]."""
    offset = 0
    for master in masters:
        piece = payload[:, offset : offset + master.numel()].to(master.device)
        master.detach().copy_(piece[0].view(master.shape))
        _set_moments(inner, master, piece[1].clone(), piece[2].clone())
        offset += master.numel()


def applied_steps(inner: Any) -> int:
    """Adam's step count: optimizer steps that were applied."""
    return max((int(state["step"]) for state in inner.state.values() if state), default=0)


def set_applied_steps(inner: Any, count: int) -> None:
    """Set Adam's step count of every master."""
    for state in inner.state.values():
        state["step"] = torch.tensor(float(count)) if torch.is_tensor(state["step"]) else count
