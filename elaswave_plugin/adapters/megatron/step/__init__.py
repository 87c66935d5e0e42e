"""One step of Megatron-Core after a loss."""
