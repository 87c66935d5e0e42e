"""Patch records of DeepSpeed, and what is unsupported."""
