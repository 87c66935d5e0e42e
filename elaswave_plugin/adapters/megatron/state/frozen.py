"""Weights that are not trained: kept by the global number of their layer, so that layers can move.

Megatron-Core's buffers hold trained weights only. The others come back in a redo, and travel with
their layers to another stage, or to a worker that comes later, as whole tensors from the host.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.adapters.megatron.state.global_names import global_names
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.step_state.step_state import Part, copied, digest_of


def frozen_names(chunks: Sequence[DistributedDataParallel]) -> tuple[str, ...]:
    """The names of those that are not trained."""
    return tuple(name for name, param in global_names(chunks) if not param.requires_grad)


def freeze(chunk: DistributedDataParallel, names: frozenset[str]) -> None:
    """Freeze those of a chunk that was built again, as they were at launch."""
    for name, param in global_names([chunk]):
        if name in names:
            param.requires_grad_(False)


@contextmanager
def as_at_launch(
    chunks: Sequence[DistributedDataParallel], names: frozenset[str]
) -> Iterator[None]:
    """Inside, all weights are trained but ``names``, as buffers and optimizer were laid out.

    A script may freeze others for a while, as a GAN's step does, or from some step on.
    """
    present = list(global_names(chunks))
    flags = [(param, param.requires_grad) for _, param in present]
    for name, param in present:
        param.requires_grad_(name not in names)
    yield
    for param, is_trained in flags:
        param.requires_grad_(is_trained)


def why_layers_stay(chunks: Sequence[DistributedDataParallel]) -> str | None:
    """The reason why frozen weights keep layers at their stage; None where they do not.

    A stage has to have something to train, whichever layers it is given.
    """
    for layer in (module for chunk in chunks for module in chunk.modules()):
        is_layer = isinstance(layer, TransformerLayer)
        if is_layer and not any(param.requires_grad for param in layer.parameters()):
            return f"layer {layer.layer_number} has no weight that is trained"
    for name, param in global_names(chunks):
        if getattr(param, "shared_embedding", False) and not param.requires_grad:
            return f"stages share a weight that is not trained ({name})"
    return None


class Frozen(Part):
    """Weights that are in no buffer of Megatron-Core's, and which weights are trained now.

    The host has one copy of them, which lasts until they change.
    """

    name = "weights that are not trained, or the names and shapes of weights"

    def __init__(
        self,
        models: Sequence[Sequence[DistributedDataParallel]],
        *,
        at_launch: Callable[[], frozenset[str]],
    ) -> None:
        """``models``: the chunks of each; ``at_launch``: what was not trained then, anywhere."""
        self._models = models
        self._at_launch = at_launch
        self._copies: dict[str, tuple[int, torch.Tensor]] = {}
        # Whether the loop has ever changed one.
        self._vary = False

    def keep(self) -> dict[str, Any]:
        """Digest and copy of each, by name; and of all weights whether they are trained."""
        params = dict(self._named())
        for name in self._copies.keys() - params.keys():
            del self._copies[name]
        # What a script freezes later is in a buffer, and sealed as what is trained.
        sealed = self._in_buffers()
        for name, param in params.items():
            if param not in sealed:
                digest = digest_of(param)
                if name not in self._copies or self._copies[name][0] != digest:
                    self._vary = self._vary or name in self._copies
                    self._copies[name] = digest, copied(param)
        trained = {_of_all_tp(name): param.requires_grad for name, param in params.items()}
        return {"values": dict(self._copies), "trained": trained}

    @torch.no_grad()
    def put_back(self, kept: Any) -> None:
        """Install those that differ."""
        for name, param in self._named():
            self._install(param, kept["trained"].get(_of_all_tp(name)), kept["values"].get(name))

    def missing(self, kept: Any) -> Mapping[str, bool]:
        """The weights of layers that have come since, and frozen ones of another tp position.

        Whether one is trained is as it was at launch if no worker is left that knows better.
        """
        sealed = self._in_buffers()
        return {
            name: param not in sealed
            for name, param in self._named()
            if _of_all_tp(name) not in kept["trained"]
            or (param not in sealed and name not in kept["values"])
        }

    def part_of(self, kept: Any, names: Sequence[str], *, is_current: bool) -> Mapping[str, Any]:
        """Those of these that are here; raises ConfigurationError where they may be old."""
        trained, values, at_launch = kept["trained"], kept["values"], self._at_launch()
        # A worker that has built it again knows what is trained, as it was at launch.
        here = [
            name
            for name in names
            if name in values or trained.get(_of_all_tp(name)) == (name in at_launch)
        ]
        if here and self._vary and not is_current:
            raise ConfigurationError(
                "the loop changes weights that are not trained, and a loss between two steps has"
                " moved layers to another stage, where no worker has these changes: change them in"
                ' train_step, or set move_layers = "never"'
            )
        return {name: (trained[_of_all_tp(name)], values.get(name)) for name in here}

    @torch.no_grad()
    def take_in(self, kept: Any, more: Mapping[str, Any]) -> None:
        """Install what came from others, and keep it as well."""
        params = dict(self._named())
        for name, (trained, value) in more.items():
            kept["trained"][_of_all_tp(name)] = trained
            if value is not None:
                kept["values"][name] = value
            self._install(params[name], trained, value)

    def proof(self) -> int:
        """Of their values, and of the names, shapes and kinds of all weights."""
        digest, sealed = xxhash.xxh3_64(), self._in_buffers()
        for name, param in self._named():
            told = (name, tuple(param.shape), str(param.dtype), param.requires_grad)
            digest.update(repr(told).encode())
            if param not in sealed:
                digest.update(digest_of(param).to_bytes(8, "little"))
        return digest.intdigest() >> 1

    def _in_buffers(self) -> set[torch.nn.Parameter]:
        return {
            param
            for chunks in self._models
            for chunk in chunks
            for param in chunk.param_to_bucket_group
        }

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, chunks in enumerate(self._models):
            where = f" (model {number})" if len(self._models) > 1 else ""
            for name, param in global_names(chunks):
                yield name + where, param

    @staticmethod
    def _install(
        param: torch.nn.Parameter, trained: bool | None, value: tuple[int, torch.Tensor] | None
    ) -> None:
        if trained is not None:
            param.requires_grad_(trained)
        if value is not None and digest_of(param) != value[0]:
            param.copy_(value[1])


def _of_all_tp(name: str) -> str:
    """The name without its tp position: which weights are trained is alike on all of them."""
    return re.sub(r" \(tp \d+\)", "", name)
