"""Tests of agents and guardians: pure parts, and jobs of tiny trainers in real processes."""
