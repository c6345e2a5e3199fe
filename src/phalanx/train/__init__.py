"""`px.train`: what training loops need around the step."""

from phalanx.cluster.spec import ClusterDef, ClusterSpec, JobDef, ServerDef

__all__ = ["ClusterDef", "ClusterSpec", "JobDef", "ServerDef"]
