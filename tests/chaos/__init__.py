"""Random sequences of faults on real jobs."""
