"""Tests of the loops."""
