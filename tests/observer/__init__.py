"""Tests of the outside reader, its report and the command line."""
