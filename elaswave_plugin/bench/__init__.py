"""Benchmarks that the command line runs: `elaswave bench`."""
