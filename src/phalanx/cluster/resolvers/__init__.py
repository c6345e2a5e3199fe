"""Where the description of the cluster comes from: one file per source.

Every resolver answers the same questions, those of `ClusterResolver`: who is in the cluster, which
task this process is, and which accelerators it has.
"""

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.gce import GCEClusterResolver
from phalanx.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from phalanx.cluster.resolvers.ray import RayClusterResolver
from phalanx.cluster.resolvers.sagemaker import SageMakerClusterResolver
from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.resolvers.slurm import SlurmClusterResolver
from phalanx.cluster.resolvers.tfconfig import TFConfigClusterResolver
from phalanx.cluster.resolvers.tpu import TPUClusterResolver, TPUSystemMetadata
from phalanx.cluster.resolvers.union import UnionClusterResolver, UnionResolver

__all__ = [
    "ClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "RayClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TPUSystemMetadata",
    "UnionClusterResolver",
    "UnionResolver",
]
