"""What GPUs do, on a machine without one: the kit, and calls that an abort cuts off."""
