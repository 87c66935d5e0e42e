"""Megatron-LM: ``megatron.training.pretrain`` obeys --elaswave, for scripts that call it."""

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["install", "prepare"]

_MARK = "__elaswave__"
_HOOK = "pretrain_hook"
_FLAG = "--elaswave"
_ADAPTER = "elaswave_plugin.adapters.megatron_lm"


def prepare() -> None:
    """Before Megatron-LM is imported: let it be imported on a machine without a GPU."""
    if _FLAG in sys.argv:
        import_module(f"{_ADAPTER}.triton_stub").without_triton()


def install() -> None:
    """Let ``pretrain`` know our options; with --elaswave in the arguments, it joins the job.

    Where a diff of ``patches/`` gave it a hook, nothing is replaced.
    """
    training = vars(import_module("megatron.training.training"))
    if _HOOK in training:
        training[_HOOK] = _elastic(inspect.unwrap(training["pretrain"]))
        return
    for module in (training, vars(import_module("megatron.training"))):
        module["pretrain"] = _elastic(module["pretrain"])


def _elastic(native: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(native, _MARK):
        return native
    signature = inspect.signature(native)

    @functools.wraps(native)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        provider = call.arguments.get("extra_args_provider")
        call.arguments["extra_args_provider"] = functools.partial(
            _with_our_group, provider, sys.argv[1:]
        )
        train = functools.partial(native, *call.args, **call.kwargs)
        if _FLAG not in sys.argv[1:]:
            return train()
        return import_module(f"{_ADAPTER}.attach").run(train)

    pretrain.__dict__[_MARK] = True
    return pretrain


def _with_our_group(
    provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None,
    words: Sequence[str],
    parser: argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """Their parser with our group; the arguments of a run that uses none of it stay as they are."""
    if provider is not None:
        parser = provider(parser)
    known = set(parser._actions)
    import_module("elaswave_plugin.command_line").add_arguments(parser)
    for action in parser._actions:
        if action not in known:
            action.default = argparse.SUPPRESS
    try:
        import_module("elaswave_plugin.words").check_options(words)
    except ValueError as error:
        parser.error(str(error))
    ours = [word.split("=")[0] for word in words if word.startswith(f"{_FLAG}-")]
    if ours and _FLAG not in words:
        parser.error(f"{ours[0]} is given without {_FLAG}; add {_FLAG}")
    return parser
