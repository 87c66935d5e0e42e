"""Supervisors among themselves (standard library only)."""
