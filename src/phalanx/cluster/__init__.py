"""Who belongs to a cluster, and which member this process is.

- `phalanx.cluster.spec`: the description of a cluster as plain data.
- `phalanx.cluster.resolvers`: where that description comes from, one file per source.
"""

from phalanx.cluster.spec import ClusterDef, ClusterSpec, JobDef, ServerDef

__all__ = ["ClusterDef", "ClusterSpec", "JobDef", "ServerDef"]
