"""Who belongs to a cluster, and which member this process is.

- `phalanx.cluster.spec`: the description of a cluster as plain data.
- `phalanx.cluster.definitions`: the same as messages, in TensorFlow's format.
- `phalanx.cluster.resolvers`: where the description comes from, one file per source.
- `phalanx.cluster.roles`: which part a task has in training over several workers.
- `phalanx.job.hub`: what the workers of a job tell each other besides data.
- `phalanx.job.launch`: starts the processes of a job and ends them together.
"""

from phalanx.cluster.definitions import ClusterDef, JobDef, ServerDef
from phalanx.cluster.spec import ClusterSpec

__all__ = ["ClusterDef", "ClusterSpec", "JobDef", "ServerDef"]
