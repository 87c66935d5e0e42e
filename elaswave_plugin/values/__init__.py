"""The values that travel between workers, beside the tensors of the state."""
