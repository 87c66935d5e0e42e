"""Enumerates what the real agreement code does in small jobs, whatever comes in whatever order."""
