"""One slot of a job: its trainers and its snapshot memory (standard library only)."""
