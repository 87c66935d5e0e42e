"""Stands in for transformer_engine.common.recipe: a base class for Megatron-Core's own."""


class DelayedScaling:
    """Of fp8, which is refused."""
