"""What a step is: the deal of micro-batches, order of sums, op lists, keys of draws (pure)."""
