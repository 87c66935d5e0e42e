"""From a committed view to what every worker reads and runs (pure)."""
