"""Cluster tests see nothing of the cluster they may run in themselves."""

import os

import pytest

PREFIXES = ("SLURM", "SM_", "TPU_", "KUBE_", "MEGASCALE_", "GCE_METADATA")


@pytest.fixture(autouse=True)
def no_cluster_around(monkeypatch):
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name)
