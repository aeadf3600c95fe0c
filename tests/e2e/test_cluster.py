"""The cluster of the other tests is as tests/kind/cluster_config.py says."""

import pytest

from tests.e2e import nodes
from tests.kind.cluster import Cluster

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]


def test_control_plane_has_the_options_of_its_configuration(cluster: Cluster) -> None:
    """Seen: kind ignored a patch for another version of kubeadm's API, and etcd synced each write to the disk."""
    manifests = nodes.run_on(cluster.control_plane, "cat /etc/kubernetes/manifests/*.yaml")
    assert manifests.count("--leader-elect=false") == 2
    for option in ("--unsafe-no-fsync=true", "--node-monitor-grace-period=20s", "name: GOGC"):
        assert option in manifests
