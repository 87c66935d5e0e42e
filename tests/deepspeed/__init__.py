"""DeepSpeed: real jobs whose scripts own their loop, and the parts of the adapter."""
