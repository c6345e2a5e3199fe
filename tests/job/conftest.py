"""These tests see nothing of the cluster they may run in themselves."""

from tests.cluster.conftest import no_cluster_around  # noqa: F401 - a fixture
