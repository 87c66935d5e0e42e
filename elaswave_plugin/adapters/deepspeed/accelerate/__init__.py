"""Hugging Face Accelerate on DeepSpeed."""
