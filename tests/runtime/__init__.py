"""Tests of supervisors, trainers and groups: real processes on the CPU engine."""
