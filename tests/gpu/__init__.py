"""Tests of the GPU kit, and of calls that an abort cuts off, on a machine without a GPU."""
