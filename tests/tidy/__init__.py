"""Tests: tidy."""
