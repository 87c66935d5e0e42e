"""The parts of the model that each worker holds: layouts, groups, shards (pure)."""
