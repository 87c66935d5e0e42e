"""A node's guardian and agent: its trainers and their snapshots (standard library only)."""
