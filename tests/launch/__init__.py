"""Tests of the launcher: options, refusals, signals, and jobs under torchrun."""
