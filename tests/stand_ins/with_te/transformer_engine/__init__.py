"""A stand-in for Transformer Engine: what Megatron-Core imports, and what its local layers use."""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.8.0"
