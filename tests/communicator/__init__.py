"""Tests of links, groups and devices: worker processes on the CPU engine."""
