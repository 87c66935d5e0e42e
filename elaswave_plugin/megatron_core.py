"""Megatron-Core: a script with a loop of its own joins the job where it makes its world."""

import argparse
import functools
import os
import sys
from importlib import import_module
from typing import Any

__all__ = ["install"]

_MARK = "__elaswave__"
_FLAG = "--elaswave"
# Set for the workers of a job (ipc/environment.py, AGENT).
_SUPERVISED = "ELASWAVE_AGENT"
# The backend of a world that is ours already.
_OURS = "elaswave"


def _is_wanted() -> bool:
    named = _FLAG in sys.argv[1:] or os.environ.get("ELASWAVE") == "1"
    return named and _SUPERVISED in os.environ


def _has_joined() -> bool:
    """Return whether this process is a worker of the job already, or none of its own."""
    pages = import_module("elaswave_plugin.ipc.progress_page")
    page = pages.page_of(os.environ)
    if page is not None:
        page.close()
    return page is not None or pages.page_fd(os.environ) is None


def install() -> None:
    """Look at each world that a script makes, and at the options that its parser does not know."""
    distributed, parser = vars(import_module("torch.distributed")), argparse.ArgumentParser
    if hasattr(distributed["init_process_group"], _MARK):
        return
    distributed["init_process_group"] = _joining(distributed["init_process_group"])
    parser.parse_known_args = _without_ours(parser.parse_known_args)  # type: ignore[method-assign]


def _joining(native: Any) -> Any:
    @functools.wraps(native)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if backend == _OURS or not _is_wanted() or _has_joined():
            return native(backend, *args, **kwargs)
        start = import_module("elaswave_plugin.adapters.megatron.script_start").ScriptStart()
        return native(**start.world())

    # What `attach` puts back, in a script that says by its lines how it joins.
    init_process_group.__dict__[_MARK] = native
    return init_process_group


def _without_ours(native: Any) -> Any:
    @functools.wraps(native)
    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        known, others = native(self, args, namespace)
        if _is_wanted() and _FLAG not in self._option_string_actions:
            ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            import_module("elaswave_plugin.command_line").add_arguments(ours)
            others = native(ours, others)[1]
        return known, others

    return parse_known_args
