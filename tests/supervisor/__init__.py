"""Tests of supervisors: pure parts, and jobs of tiny trainers in real processes."""
