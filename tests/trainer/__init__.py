"""Tests of what runs in a trainer before and beside the training."""
