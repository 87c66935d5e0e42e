"""Tests of parts of a recovery within one process."""
