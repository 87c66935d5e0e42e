"""The deterministic cluster: real agreement, virtual time and network, for tests of protocols."""

from elaswave_plugin.testing.cluster import Cluster

__all__ = ["Cluster"]
