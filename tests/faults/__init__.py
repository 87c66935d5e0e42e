"""Fault tests: real processes, real SIGKILL, compared with the run that was not disturbed."""
