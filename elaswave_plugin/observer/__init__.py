"""Judges a run from outside, by the files that it left."""
