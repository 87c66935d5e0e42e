"""The version of elaswave_plugin."""

__version__ = "0.1.0"
