"""Tests of the values that travel between workers."""
