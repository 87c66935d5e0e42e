"""Process groups of torch over NCCL."""
