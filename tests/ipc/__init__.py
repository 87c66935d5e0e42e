"""Tests of what processes of one node tell each other."""
