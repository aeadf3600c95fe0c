"""The configuration of a test cluster as text: kind's file, provisioner, CoreDNS's Corefile. cluster.py applies it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHARED_MOUNT = "/ddpjob-shared"
DATA_MOUNT = "/ddpjob-data"
CONTAINERD = "/var/lib/containerd"
POD_PATCHES = "kubeadm"
"""The folder of kubeadm's patches of static pods, within the shared folder."""
PROVISIONER = Path(__file__).with_name("provisioner.yaml")

# Within 198.18.0.0/15, reserved for benchmarks between networks (RFC 2544): no real network uses it.
POD_SUBNET = "198.19.0.0/16"
SERVICE_SUBNET = "198.18.128.0/20"

_REPOSITORY = Path(__file__).resolve().parents[2]

# The version that kind writes for this Kubernetes: a patch of another version has no effect.
# No fsync in etcd: its data need not survive a crash of the machine. No leader election: there is one control plane.
# A node that does not respond for 20 s is lost (50 s by default), and kubelet renews its lease every 5 s, not 10 s.
_KUBEADM_PATCH = """\
apiVersion: kubeadm.k8s.io/v1beta3
kind: ClusterConfiguration
etcd:
  local:
    extraArgs: {unsafe-no-fsync: "true"}
controllerManager:
  extraArgs: {leader-elect: "false", node-monitor-grace-period: 20s}
scheduler:
  extraArgs: {leader-elect: "false"}
"""
_INIT_PATCH = f"""\
apiVersion: kubeadm.k8s.io/v1beta3
kind: InitConfiguration
patches: {{directory: {SHARED_MOUNT}/{POD_PATCHES}}}
"""
# The API server spends a quarter of its CPU time on garbage that the machine has memory for.
API_SERVER_PATCH = """\
spec:
  containers:
    - name: kube-apiserver
      env: [{name: GOGC, value: "300"}]
"""

# On a node with systemd-logind, kubelet ends the pods in time when the machine shuts down.
_KUBELET_PATCH = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
shutdownGracePeriod: 40s
shutdownGracePeriodCriticalPods: 10s
nodeLeaseDurationSeconds: 20
"""


def mnist_dir() -> Path | None:
    """Return the folder of MNIST's four files to mount: ``$DDPJOB_MNIST_DIR``, else ../shared/mnist, else None."""
    chosen = os.environ.get("DDPJOB_MNIST_DIR")
    folder = Path(chosen) if chosen else _REPOSITORY.parent / "shared" / "mnist"
    if folder.is_dir():
        return folder.resolve()
    if chosen:
        raise ValueError(
            f"DDPJOB_MNIST_DIR={chosen} is not a folder: unset it, or set it to the folder of MNIST's four .gz files"
        )
    return None


def kind_config(shared_dir: Path, data_dir: Path | None, workers: int, stores: Sequence[Path] = ()) -> str:
    """Return kind's configuration for one control plane and so many workers, as JSON (which is also YAML).

    stores: a folder for containerd for each node, in this order; without them containerd begins empty.
    """
    mounts: list[dict[str, object]] = [{"hostPath": str(shared_dir), "containerPath": SHARED_MOUNT}]
    if data_dir is not None:
        mounts.append({"hostPath": str(data_dir), "containerPath": DATA_MOUNT, "readOnly": True})
    roles = ("control-plane", *["worker"] * workers)
    nodes: list[dict[str, Any]] = [{"role": role, "extraMounts": [*mounts]} for role in roles]
    for node, store in zip(nodes, stores, strict=False):
        node["extraMounts"].append({"hostPath": str(store), "containerPath": CONTAINERD})
    config = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "networking": {"podSubnet": POD_SUBNET, "serviceSubnet": SERVICE_SUBNET, "apiServerAddress": "127.0.0.1"},
        "kubeadmConfigPatches": [_KUBEADM_PATCH, _INIT_PATCH, _KUBELET_PATCH],
        "nodes": nodes,
    }
    return json.dumps(config, indent=1)


def provisioner(image: str) -> str:
    """Return the manifests of the default StorageClass; its pod runs a program of the node in this image."""
    return PROVISIONER.read_text(encoding="utf-8").replace("IMAGE", image)


def ready_nodes(node_list: Mapping[str, Any]) -> set[str]:
    """Return the names of the nodes in a NodeList whose condition Ready is True."""
    return {
        node["metadata"]["name"]
        for node in node_list["items"]
        for condition in node["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }


def without_forwarding(corefile: str) -> str:
    """Return the Corefile without the plugins forward and loop: it then answers for the cluster's names only."""
    kept = re.sub(r"(?m)^[ \t]*forward\b[^\n{]*(\{[^}]*\})?[ \t]*\n", "", corefile)
    return re.sub(r"(?m)^[ \t]*loop[ \t]*\n", "", kept)
