"""Tests: tracking."""
