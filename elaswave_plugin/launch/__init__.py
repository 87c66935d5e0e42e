"""The launchers: `elaswave run`, torchrun, PYTHON_EXEC (standard library only)."""
