"""The parts of a step: the deal of micro-batches, order of sums, op lists, keys of draws (pure)."""
