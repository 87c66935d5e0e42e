"""All process groups of a worker, edited together."""
