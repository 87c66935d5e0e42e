"""The main path of a recovery, and the worker in which it runs."""
