"""The fields of what trainer and supervisor say to each other, checked before it is acted on."""

from __future__ import annotations

from types import NoneType

from elaswave_plugin.runtime.wire import Frame, not_understood

Field = tuple[str, type | tuple[type, ...]]
# A kind, and its fields.
Kind = tuple[str, tuple[Field, ...]]
_NUMBER = (int, float)

SAID_BY_TRAINER: tuple[Kind, ...] = (
    ("join", (("facts", dict), ("respawn", int))),
    ("ready", (("facts", dict),)),
    ("begun", (("epoch", int), ("step", int))),
    ("saves_last", ()),
    ("remember", (("what", dict),)),
    ("quiesced", (("epoch", int), ("facts", dict))),
    ("sealed", (("record", dict), ("copy_to", list))),
    ("release", (("epoch", int),)),
    ("progress", (("text", str),)),
    ("severed", (("epoch", int), ("evidence", str))),
    ("replan", (("reason", str),)),
    ("raised", (("error", str), ("message", str), ("where", str), ("traceback", str))),
    ("detached", (("trains", bool), ("missing", str))),
    ("finish", (("completed", int),)),
    ("leave", (("reason", str), ("returns", bool))),
    ("abandon", (("reason", str), ("exit_code", int))),
    ("layout", (("layout", object),)),
    ("slow", (("slow", list),)),
)
_PROPOSAL: tuple[Field, ...] = (
    ("epoch", int),
    ("reason", str),
    ("within_s", _NUMBER),
    ("boundary", bool),
    ("before_step", (int, NoneType)),
)
SAID_BY_SUPERVISOR: tuple[Kind, ...] = (
    ("propose", _PROPOSAL),
    ("notice", ()),
    ("stop", (("reason", str), ("exit_code", int))),
    ("cuts_wanted", (("cuts", list),)),
    ("commit", (("path", list), ("payload", str))),
    ("started", ()),
    ("copied", (("step", int), ("epoch", int), ("slot", int))),
    ("copying", (("slot", int),)),
    ("alone", (("view", dict), ("remembered", dict))),
)
# Of the link alone, beside the messages of the agreement.
SAID_BY_PEER: tuple[Kind, ...] = (
    ("goodbye", ()),
    ("ask", ()),
    ("here", ()),
    ("beat", (("n", int), ("heard", int), ("left", _NUMBER))),
)


def flaw_of(frame: Frame, kinds: tuple[Kind, ...], *, key: str = "t") -> str | None:
    """What a frame lacks, or has of another type; "" for nothing, None for a kind not in `kinds`.

    ``key``: that of its kind.
    """
    kind = frame.get(key)
    fields = next((fields for known, fields in kinds if known == kind), None)
    if fields is None:
        return None
    for name, wanted in fields:
        if name not in frame:
            return f" without {name!r}"
        if not isinstance(frame[name], wanted):
            return f" with {name} {frame[name]!r:.60}"
    return ""


def misunderstood(frame: Frame, kinds: tuple[Kind, ...]) -> str | None:
    """Why a frame cannot be acted on, as ``said ...``; None where it can."""
    flaw = flaw_of(frame, kinds)
    if flaw is None:
        return not_understood(frame.get("t"))
    return not_understood(frame["t"], flaw) if flaw else None
