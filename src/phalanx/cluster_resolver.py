"""`px.cluster_resolver`: where the tasks of a cluster are."""

from phalanx.cluster.resolvers import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    RayClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    TPUSystemMetadata,
    UnionClusterResolver,
    UnionResolver,
)

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
