"""Megatron-Core: a script with a loop of its own joins the job where it makes its world."""

import argparse
import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

from elaswave_plugin.around import around, is_of_a_framework

__all__ = ["be_not_first", "install"]

_MARK = "__elaswave__"
_FLAG = "--elaswave"
# Set for the workers of a job (ipc/environment.py, AGENT).
_SUPERVISED = "ELASWAVE_AGENT"
# Of a worker, and how many had its place before it (ipc/environment.py).
_SLOT, _INCARNATION = "ELASWAVE_SLOT", "ELASWAVE_INCARNATION"
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


class _Start:
    """The start of this process in the job, once its script makes its world."""

    def __init__(self) -> None:
        self._made: Any = None

    def is_behind(self) -> bool:
        """True while the script is at what the others have behind them."""
        return self._made is not None and bool(self._made.is_behind)

    def joining(self, native: Any) -> Any:
        """``init_process_group``, which a script of another kind has put back by its mark."""
        joining = around(self._join)(native)
        vars(joining)[_MARK] = partial(_leave, native)
        return joining

    def _join(self, native: Any, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Join the job where it is wanted."""
        if backend == _OURS or not _is_wanted() or _has_joined():
            return native(backend, *args, **kwargs)
        start = import_module("elaswave_plugin.adapters.megatron.script_start")
        self._made = start.ScriptStart()
        return native(**self._made.world())

    def not_first(self, native: Any, group: Any = None) -> int:
        """``get_rank`` of a worker in the place of rank 0, which is another until it is back.

        What a script does on rank 0 alone, as writing files, is done for the steps behind.
        """
        rank = int(native(group))
        if rank or group is not None or not self.is_behind():
            return rank
        return 0 if is_of_a_framework() else 1

    def once(self, native: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.save``, which writes nothing where the state is not here.

        So it is for the steps behind, and in a worker without a part of the model.
        """
        if is_of_a_framework() or self._made is None:
            return native(*args, **kwargs)
        if self.is_behind():
            return None
        if self._made.loop is not None and not self._made.loop.has_place:
            return self._made.loop.leave_out("torch.save")
        return native(*args, **kwargs)

    def as_then(self, native: Any, group: Any = None) -> int:
        """``get_world_size``, of a script behind the others: as it was told to them."""
        loop = None if group is not None or self._made is None else self._made.loop
        if loop is None or is_of_a_framework():
            return int(native(group))
        loop.shares.ask_width()
        then = loop.world_size_behind
        return int(native(group)) if then is None else int(then)

    def gathered_then(self, native: Any, object_list: Any, obj: Any, group: Any = None) -> None:
        """``all_gather_object``, which makes two calls by a number of workers of its own."""
        loop = None if self._made is None else self._made.loop
        then = None if loop is None else loop.gathered_behind()
        if then is None:
            native(object_list, obj, group)
            return
        decode = import_module("torch.distributed.distributed_c10d")._tensor_to_object
        object_list[: len(then)] = [decode(one, size, group) for one, size in then]

    def told_then(
        self,
        native: Any,
        object_list: Any,
        src: Any = None,
        group: Any = None,
        device: Any = None,
        group_src: Any = None,
    ) -> None:
        """``broadcast_object_list``, by which the worker that is told to be another one is told."""
        if self.is_behind():
            # The source itself would keep what it has.
            c10d = import_module("torch.distributed.distributed_c10d")
            src, group_src = None, (c10d.get_rank(group) + 1) % c10d.get_world_size(group)
        native(object_list, src, group, device, group_src)


def install() -> None:
    """Look at each world that a script makes, and at the options that its parser does not know."""
    distributed, parser = vars(import_module("torch.distributed")), argparse.ArgumentParser
    if hasattr(distributed["init_process_group"], _MARK):
        return
    be_not_first()
    start = _Start()
    distributed["init_process_group"] = start.joining(distributed["init_process_group"])
    torch, cuda = vars(import_module("torch")), vars(import_module("torch.cuda"))
    for owner, name, call in (
        (torch, "save", start.once),
        (cuda, "set_device", _where_there_is_one),
        (distributed, "get_rank", start.not_first),
        (distributed, "get_world_size", start.as_then),
        (distributed, "broadcast_object_list", start.told_then),
        (distributed, "all_gather_object", start.gathered_then),
    ):
        owner[name] = around(call)(owner[name])
    parse = around(_without_ours)(parser.parse_known_args)
    parser.parse_known_args = parse  # type: ignore[method-assign]


def be_not_first() -> None:
    """Have a script in the place of a lost rank 0 read another rank, also before its world is made.

    What it does on rank 0 alone, as a log, the others have behind them.
    """
    if _is_wanted() and _replaces_rank_0():
        os.environ["RANK"] = "1"


def _replaces_rank_0() -> bool:
    return os.environ.get(_SLOT) == "0" and os.environ.get(_INCARNATION) != "0"


def _leave(native: Any) -> None:
    """Have ``init_process_group`` and the rank as they were: the script says how it joins."""
    vars(import_module("torch.distributed"))["init_process_group"] = native
    if _replaces_rank_0():
        os.environ["RANK"] = "0"


def _where_there_is_one(native: Any, device: Any) -> None:
    """``torch.cuda.set_device``, which scripts call before they make their world, also on a CPU."""
    if not _is_wanted() or import_module("torch.cuda").is_available():
        native(device)


def _without_ours(native: Any, parser: Any, args: Any = None, namespace: Any = None) -> Any:
    known, others = native(parser, args, namespace)
    if _is_wanted() and _FLAG not in parser._option_string_actions:
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        import_module("elaswave_plugin.command_line").add_arguments(ours)
        others = native(ours, others)[1]
    return known, others
