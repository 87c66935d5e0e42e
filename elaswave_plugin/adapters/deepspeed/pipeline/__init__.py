"""A PipelineEngine in an elastic job."""
