"""Tracking: what happened in a run, written so that an outside reader can check it."""
