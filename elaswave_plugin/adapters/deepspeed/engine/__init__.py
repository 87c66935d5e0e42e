"""A DeepSpeed engine in an elastic job."""
