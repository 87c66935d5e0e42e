"""The model's buffers: those that stay constant, and those that the passes of a step change.

In exact mode what a pass changes belongs to the replica whose micro-batch it runs, as it does where
none is lost. After a step every worker gets the values of every replica; the host of a lost
replica installs its values before its micro-batches. Outside of passes the modules of rank n have
those of replica n. In fast mode running statistics are averaged over the workers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter

from elaswave_plugin.adapters.megatron.state.recomputed_buffers import RecomputedBuffers
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.step_state.engine_parts import Changing, average, why_no_average
from elaswave_plugin.step_state.step_state import Part, copied, digest_of
from elaswave_plugin.values.plain import row_of

# Buffers that the capsule has, and counts of a step that are dropped with it (expert_bias.py).
_OF_ROUTERS = ("expert_bias", "local_tokens_per_expert")

Values = dict[str, torch.Tensor]


class ModelBuffers(Part):
    """Tensors of the modules that are no parameters."""

    name = "the model's buffers"
    of_passes = True

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], *, exact: bool, refused: str | None
    ) -> None:
        """``refused``: why what passes change is not carried here; None where it is."""
        self._chunks = chunks
        self.by_replica = exact and refused is None
        """True if each replica has values of its own, as in exact mode."""
        self._refused = refused
        self._changes = Changing(why_not=self._why_not)
        # Values by replica, and the replica whose values the modules have; exact mode.
        self._replicas: dict[int, Values] = {}
        self._present: int | None = None
        self._at_launch: Values = {}
        self._recomputed = RecomputedBuffers(_with_buffers(chunks) if self.by_replica else ())

    @property
    def is_carried(self) -> bool:
        """True if passes may change any."""
        return self._refused is None

    @property
    def changing(self) -> bool:
        """True if passes change any, or may, as is not known yet."""
        return self._changes.may_change

    # ---- a part of the state of a step ----------------------------------------------------------

    def keep(self) -> dict[str, Any]:
        """Copies of all of them; raises ConfigurationError where the loop's body changed some."""
        self._check_untouched()
        modules = [*_with_buffers(self._chunks)]
        return {
            "values": {name: copied(tensor) for name, tensor in _buffers_of(modules)},
            "unsaved": [
                f"{place}.{leaf}"
                for place, module in modules
                for leaf in module._non_persistent_buffers_set
            ],
            "changing": self._changes.names,
            "replicas": {n: dict(values) for n, values in self._replicas.items()},
        }

    @torch.no_grad()
    def put_back(self, kept: Any) -> None:
        """Install those that are there."""
        self._know(kept["changing"])
        self._replicas = {n: dict(values) for n, values in kept["replicas"].items()}
        present = dict(self._present_values())
        for name, value in kept["values"].items():
            # A first pass may make tables, which a worker that comes later has not, or longer ones.
            if name not in present or present[name].shape != value.shape:
                self._make(name, value, persistent=name not in kept["unsaved"])
        self._install(kept["values"])
        self._present = None
        self._show()

    def sealed(self) -> None:
        """Have the values of the replica that this rank stands for, which it may not have yet."""
        self._show()

    def check(self, kept: Any) -> None:
        """Raise ConfigurationError for one that passes have changed and may not change."""
        self._changes.check(self._present_values(), kept["values"])

    def is_still(self, kept: Any) -> bool:
        """Return whether passes change none; a step in which they may not ends by it."""
        return not (self.is_carried and self.changing)

    def proof(self) -> int:
        """Digest what is alike on all: the unchanging values, and those of every replica."""
        digest = xxhash.xxh3_64()
        for name, tensor in self._present_values():
            if not self.by_replica or name not in self._changing:
                digest.update(f"{name} {digest_of(tensor)}".encode())
        for number, values in sorted(self._replicas.items()):
            for name, tensor in sorted(values.items()):
                digest.update(f"{number} {name} {digest_of(tensor)}".encode())
        return digest.intdigest() >> 1

    def _why_not(self, name: str) -> str | None:
        return self._refused or (None if self.by_replica else why_no_average(name))

    @property
    def _changing(self) -> tuple[str, ...]:
        return self._changes.names or ()

    # ---- the passes of a step -------------------------------------------------------------------

    @torch.no_grad()
    def enter(self, replica: int) -> None:
        """The passes that come are of a micro-batch of this replica."""
        if not self.by_replica or not self.changing:
            return
        self._recomputed.begin()
        if self._present is None:
            # All replicas begin their first step with the same values.
            self._at_launch = {name: copied(tensor) for name, tensor in self._present_values()}
        elif replica != self._present:
            self._put_away()
            self._install(self._replicas.get(replica, self._at_launch))
        self._present = replica

    @contextmanager
    def passes(self, *, forward_only: bool) -> Iterator[None]:
        """Inside, passes run, for which ``enter`` is called; an evaluation may change nothing."""
        self._check_untouched()
        before = self._digests() if forward_only else {}
        yield
        if self.by_replica and self._changing:
            self._put_away()
            self._show()
        for name, digest in (self._digests() if forward_only else {}).items():
            if digest != before[name]:
                raise ConfigurationError(
                    f"an evaluation changes the model's buffer {name.partition(' ')[2]!r}: call "
                    "model.eval() before it, as no other worker would know of the change"
                )

    def _digests(self) -> dict[str, int]:
        found = {f"here {name}": digest_of(tensor) for name, tensor in self._present_values()}
        for number, values in self._replicas.items():
            found |= {f"{number} {name}": digest_of(tensor) for name, tensor in values.items()}
        return found

    def _check_untouched(self) -> None:
        """Raise ConfigurationError where the script has changed by itself what passes change."""
        if not self.by_replica or not self._changing or self._present is None:
            return
        wanted = self._replicas[self._present]
        for name, tensor in self._named(self._changing):
            if not torch.equal(copied(tensor), wanted[name]):
                raise ConfigurationError(
                    f"the script changes the model's buffer {name!r} outside of forward passes, "
                    "which change it as well: after a loss no worker would do so for the lost "
                    "replica; change it in the forward pass alone"
                )

    # ---- the end of a step ----------------------------------------------------------------------

    def agree(self, hosted: Sequence[int], *, replicas: int) -> None:
        """Tell all workers what the passes of a step have changed (collective over WORLD).

        ``hosted``: the replicas whose micro-batches this worker has run; ``replicas``: their count.
        """
        self._know(self._changes.settle())
        if not self._changing:
            self._replicas, self._present, self._at_launch = {}, None, {}
        elif self.by_replica:
            self._tell(hosted, replicas)
        else:
            average(dict(self._present_values()), self._changing)

    def _know(self, changing: tuple[str, ...] | None) -> None:
        self._changes.know(changing)
        if changing is not None:
            self._recomputed.watch_only(name.rpartition(".")[0] for name in changing)

    @torch.no_grad()
    def _tell(self, hosted: Sequence[int], count: int) -> None:
        """Every replica's values come from the one worker that has run it."""
        self._put_away()
        shapes = dict(self._named(self._changing))
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
        table = torch.zeros(count, num_bytes, dtype=torch.uint8)
        for replica in hosted:
            table[replica] = _as_bytes(self._replicas[replica], self._changing)
        dist.all_reduce(table)
        self._replicas = {n: _from_bytes(row, shapes) for n, row in enumerate(table)}
        if self._present not in hosted:
            self._present = None
        self._show()

    # ---- values ---------------------------------------------------------------------------------

    def _put_away(self) -> None:
        """The values that the modules have are the newest of their replica."""
        if self._present is not None:
            values = {name: copied(tensor) for name, tensor in self._named(self._changes.names)}
            self._replicas[self._present] = values

    def _show(self) -> None:
        """Have the modules hold the values of the replica that this rank stands for."""
        if not self.by_replica or not self._changing or not self._replicas:
            return
        rank = dist.get_rank()
        if self._present != rank:
            self._install(self._replicas[rank])
            self._present = rank

    @torch.no_grad()
    def _install(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self._present_values():
            value = values.get(name)
            if value is not None and value.shape == tensor.shape:
                tensor.copy_(value)

    def _make(self, name: str, value: torch.Tensor, *, persistent: bool) -> None:
        number, _, place = name.partition(".")
        place, _, leaf = place.rpartition(".")
        chunk = self._chunks[int(number)]
        # Layers may have moved since, and who has no place is given the values of any stage.
        module = dict(chunk.named_modules()).get(place)
        if module is not None:
            device = next(chunk.parameters()).device
            module.register_buffer(leaf, value.to(device), persistent=persistent)

    def _named(self, names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of these names, in their order; None: all."""
        found = dict(self._present_values())
        return ((name, found[name]) for name in (found if names is None else names))

    def _present_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        return model_buffers(self._chunks)


def model_buffers(
    chunks: Sequence[DistributedDataParallel],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of modules that are in no snapshot, by chunk and name."""
    return _buffers_of(_with_buffers(chunks))


def _buffers_of(
    modules: Iterable[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for place, module in modules:
        for name, tensor in module.named_buffers(recurse=False):
            if not (isinstance(module, TopKRouter) and name in _OF_ROUTERS):
                yield f"{place}.{name}", tensor


def _with_buffers(
    chunks: Sequence[DistributedDataParallel],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that have buffers of their own, by chunk and name."""
    for number, chunk in enumerate(chunks):
        for place, module in chunk.named_modules():
            if module._buffers:
                yield f"{number}.{place}", module


def _as_bytes(values: Values, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([row_of(values[name]).view(torch.uint8) for name in names])


def _from_bytes(row: torch.Tensor, shapes: Mapping[str, torch.Tensor]) -> Values:
    values: Values = {}
    start = 0
    for name, like in shapes.items():
        stop = start + like.numel() * like.element_size()
        # A copy begins at an address that suits every type.
        values[name] = row[start:stop].clone().view(like.dtype).view(like.shape)
        start = stop
    return values
