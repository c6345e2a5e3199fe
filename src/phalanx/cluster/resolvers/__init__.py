"""Where the description of the cluster comes from: one file per source.

Every resolver answers the same questions, those of `ClusterResolver`: who is in the cluster, which
task this process is, and which accelerators it has.
"""

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.resolvers.tfconfig import TFConfigClusterResolver

__all__ = ["ClusterResolver", "SimpleClusterResolver", "TFConfigClusterResolver"]
