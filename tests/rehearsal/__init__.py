"""Tests of `elaswave rehearse`."""
