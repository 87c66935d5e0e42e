"""Tests of sealed snapshots within one process."""
