"""Process groups of torch over the links."""
