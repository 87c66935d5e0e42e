"""Commands of `elaswave` that need no job."""
