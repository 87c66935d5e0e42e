"""Tests of elaswave_plugin, one folder a part."""
