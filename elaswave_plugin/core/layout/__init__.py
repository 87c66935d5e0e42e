"""Which worker holds which part of the model: layouts, groups, shards (pure)."""
