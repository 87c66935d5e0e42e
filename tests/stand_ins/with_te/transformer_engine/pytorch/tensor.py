"""Stands in for transformer_engine.pytorch.tensor: a class of which there is no object."""


class QuantizedTensor:
    """Of fp8, which is refused."""
