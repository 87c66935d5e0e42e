"""Jobs under the schedulers of clusters, real ones that run on this host."""
