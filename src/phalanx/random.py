"""`px.random`: random numbers that differ between replicas, reproducibly."""

from phalanx.core.random import replica_key

__all__ = ["replica_key"]
