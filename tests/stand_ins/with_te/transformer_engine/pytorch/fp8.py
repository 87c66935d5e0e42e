"""Stands in for transformer_engine.pytorch.fp8: fp8 is off."""

from contextlib import nullcontext


class _Off:
    """Says that fp8 is off."""

    @classmethod
    def is_fp8_enabled(cls):
        """Never."""
        return False


def fp8_autocast(enabled=False, **kwargs):
    """Nothing to do where it is off."""
    assert not enabled
    return nullcontext()


def fp8_model_init(enabled=False, **kwargs):
    """Nothing to do where it is off."""
    assert not enabled
    return nullcontext()


def __getattr__(name):
    """The class that tells the state of fp8, by its name there."""
    if name == "FP8GlobalStateManager":
        return _Off
    raise AttributeError(name)
