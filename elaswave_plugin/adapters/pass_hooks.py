"""Hooks of modules for the passes of a model, also where torch.compile compiles them.

A hook that the compiler meets is compiled with the pass, or cuts it in two. Ours announce and
measure: they are passed over there, and called before and after the whole of what is compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from elaswave_plugin.recovery.phases import Phases

Before = Callable[[torch.nn.Module], None]
After = Callable[[Any], None]


class _Hooks(NamedTuple):
    module: torch.nn.Module
    before: Before | None
    after: After | None
    always: bool


class PassHooks:
    """Calls of ours before and after the passes of a model's modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks: list[_Hooks] = []
        self._compiled: list[torch.nn.Module] = []
        self._is_uncompiled = False

    def add(
        self,
        module: torch.nn.Module,
        before: Before | None = None,
        after: After | None = None,
        *,
        always: bool = False,
    ) -> None:
        """Call ``before(module)`` and ``after(output)`` at each pass of a module.

        ``always``: the second one with None where the pass has failed.
        """
        self._hooks.append(_Hooks(module, before, after, always))
        # Plain functions: a copy of the model, as for an average of its weights, shares them.
        if before is not None:
            module.register_forward_pre_hook(_beside(lambda one, inputs: before(one)))
        if after is not None:
            hook = _beside(lambda one, inputs, output: after(output))
            module.register_forward_hook(hook, always_call=always)

    def compiled(self) -> None:
        """Modules may have been compiled since this was called.

        By ``module.compile()`` or ``torch.compile(module)``. Source: torch/nn/modules/module.py,
        ``_wrapped_call_impl``; torch/_dynamo/eval_frame.py, ``OptimizedModule``.
        """
        for module in self._model.modules():
            # The second way makes a module, in which the model is another one.
            within = getattr(module, "_orig_mod", module)
            place = "_compiled_call_impl" if within is module else "forward"
            native = getattr(module, place)
            if native is not None and module not in self._compiled:
                self._compiled.append(module)
                inside = set(within.modules())
                hooks = [one for one in self._hooks if one.module in inside]
                setattr(module, place, self._around(native, hooks))

    def _around(self, compiled: Callable[..., Any], hooks: list[_Hooks]) -> Callable[..., Any]:
        """A compiled pass between the hooks of all modules in it; as it is in another such pass."""

        @wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_uncompiled:
                return compiled(*args, **kwargs)
            output, done = None, False
            for one in hooks:
                if one.before is not None:
                    one.before(one.module)
            try:
                output = compiled(*args, **kwargs)
                done = True
            finally:
                for one in hooks:
                    if one.after is not None and (done or one.always):
                        one.after(output)
            return output

        return call

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Passes in this block run as they were written: one that is void is not compiled.

        Source: torch/_dynamo/eval_frame.py, ``set_stance``.
        """
        if not self._compiled:
            # The compiler is not even imported.
            yield
            return
        self._is_uncompiled = True
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._is_uncompiled = False


def _beside(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, passed over where a pass is compiled."""

    def passed_over(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return passed_over


def watch_evaluation(module: torch.nn.Module, phases: Phases) -> list[RemovableHandle]:
    """Announce the forward passes of a model that does not train; returns the hooks."""
    begin, end = evaluation_hooks(module, phases)
    return [
        module.register_forward_pre_hook(lambda module, inputs: begin(module)),
        module.register_forward_hook(lambda *_: end(None), always_call=True),
    ]


def evaluation_hooks(module: torch.nn.Module, phases: Phases) -> tuple[Before, After]:
    """Return what to call before and after each pass of the module, also one that fails."""

    def begin(module: torch.nn.Module) -> None:
        if not module.training:
            phases.begin_pass()

    def end(output: object) -> None:
        if not module.training:
            phases.end_pass()

    return begin, end
