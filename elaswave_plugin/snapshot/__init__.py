"""Sealed buffers and verified reads of them."""
