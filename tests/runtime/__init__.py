"""Tests of the runtime: real processes on the CPU engine."""
