"""Durations on a command line."""

from __future__ import annotations

import argparse


def seconds(text: str) -> float:
    """A positive number; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value
