"""`px.rpc`: remote calls of functions that a server registers, also as `px.experimental.rpc`."""

from phalanx.coordinator.rpc import Client, Server, StatusOrResult

__all__ = ["Client", "Server", "StatusOrResult"]
