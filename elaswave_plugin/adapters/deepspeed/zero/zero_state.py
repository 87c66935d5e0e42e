"""The state of one kind of DeepSpeed optimizer, as the framework asks for it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elaswave_plugin.core.layout.shards import MOMENTS
from elaswave_plugin.tracking.state_dump import NamedPiece


class ZeroState(ABC):
    """The optimizer state of one worker, as flat tensors in the order of ``shards.py``."""

    alignment = 1
    # Whether each worker can write its moments without the others.
    moments_may_follow = True

    def __init__(self, engine: Any, inner: Any, params: list[Any]) -> None:
        """``inner``: the optimizer that updates the masters of ``params``."""
        self._engine = engine
        self._inner = inner
        self.params = params

    @property
    @abstractmethod
    def _masters(self) -> list[torch.Tensor]:
        """The fp32 tensors that Adam updates."""

    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Unpadded lengths of the buckets, in elements."""

    def prepare(self) -> None:
        """Give every master the moments that Adam would make in its first step."""
        for master in self._masters:
            if not self._inner.state[master]:
                _make_moments(self._inner, master)

    def share(self) -> None:  # noqa: B027, other stages cut only what is sealed
        """Before the first seal, have what no snapshot will hold (collective over WORLD)."""

    def parts(self) -> list[torch.Tensor]:
        """Masters, exp_avg, exp_avg_sq of this worker's shard, bucket after bucket."""
        masters = self._masters
        moments = [self._inner.state[master][part] for part in MOMENTS for master in masters]
        return [*(master.detach() for master in masters), *moments]

    def parts_of(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a master and its moments by their names in a state dump."""
        state = self._inner.state[master]
        named = {"master": master, **{name: state[name] for name in MOMENTS}}
        return {name: part.detach() for name, part in named.items()}

    @abstractmethod
    def drop(self) -> None:
        """Forget an interrupted step."""

    @abstractmethod
    def recut(self) -> None:
        """Cut the state again by the group's present size; undefined until written."""

    @abstractmethod
    def write_weights(self, masters: torch.Tensor) -> None:
        """Install masters of shape [shard_numel], and have a place for their moments."""

    def write_moments(self, moments: torch.Tensor) -> None:
        """Install moments of shape [2, shard_numel]."""
        write_moments(self._inner, self._masters, moments)

    @abstractmethod
    def sync_weights(self) -> Iterator[torch.Tensor]:
        """Gather the weights from their shards; yields those that every worker now holds."""

    def resume(self) -> None:  # noqa: B027, only ZeRO-3 learns anything in its passes
        """Take up what was learnt in the passes before the change (collective over WORLD)."""

    def saving(self) -> AbstractContextManager[None]:
        """Have the state as DeepSpeed writes it into a checkpoint (collective over WORLD)."""
        return nullcontext()

    @abstractmethod
    def named_pieces(self) -> Iterator[NamedPiece]:
        """This worker's pieces of the state, by global parameter name."""


def _make_moments(inner: Any, master: torch.Tensor) -> None:
    # torch's fused kernels read the count on the device.
    place = master.device if inner.defaults.get("fused") else "cpu"
    # DeepSpeedCPUAdam may keep moments of masters in bf16 in float32.
    dtype = torch.float32 if getattr(inner, "fp32_optimizer_states", False) else master.dtype
    inner.state[master] = {
        # torch counts in a tensor, DeepSpeed's own Adam in an integer.
        "step": torch.tensor(0.0, device=place)
        if type(inner).__module__.startswith("torch.")
        else 0,
        **{name: torch.zeros_like(master, dtype=dtype, requires_grad=False) for name in MOMENTS},
    }


@torch.no_grad()
def write_masters(inner: Any, masters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Install masters, flat one after the other; their moments are zeros until written."""
    offset = 0
    for master in masters:
        piece = flat[offset : offset + master.numel()]
        master.detach().copy_(piece.view(master.shape))
        _make_moments(inner, master)
        offset += master.numel()


@torch.no_grad()
def write_moments(inner: Any, masters: Sequence[torch.Tensor], moments: torch.Tensor) -> None:
    """Install moments of shape [2, sum of the masters' elements]."""
    offset = 0
    for master in masters:
        for name, flat in zip(MOMENTS, moments, strict=True):
            piece = flat[offset : offset + master.numel()]
            inner.state[master][name].copy_(piece.view(master.shape))
        offset += master.numel()


def applied_steps(inner: Any) -> int:
    """Adam's step count: optimizer steps that were applied."""
    return max((int(state["step"]) for state in inner.state.values() if state), default=0)


def set_applied_steps(inner: Any, count: int) -> None:
    """Set Adam's step count of every master."""
    for state in inner.state.values():
        step = state["step"]
        state["step"] = torch.full_like(step, count) if torch.is_tensor(step) else count
