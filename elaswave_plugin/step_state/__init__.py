"""The state of a step that is in no shard."""
