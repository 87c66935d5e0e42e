"""The kit for a machine with GPUs: items within budgets, one JSON and one page."""
