"""Agents among themselves (standard library only)."""
