"""Stands in for apex.multi_tensor_apply."""

from cpu_kernels import multi_tensor_applier

__all__ = ["multi_tensor_applier"]
