"""What a test cluster is made of, as text: kind's configuration, volumes, CoreDNS's file. cluster.py applies it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARED_MOUNT = "/ddpjob-shared"
DATA_MOUNT = "/ddpjob-data"

# All within 198.18.0.0/15, which is reserved for tests between networks (RFC 2544): no machine has neighbours there.
POD_SUBNET = "198.19.0.0/16"
SERVICE_SUBNET = "198.18.128.0/20"

_REPOSITORY = Path(__file__).resolve().parents[2]

# etcd's fsync protects data that lives as long as the cluster: not here. Leader election serves several control
# planes: here is one.
_KUBEADM_PATCH = """\
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
etcd:
  local:
    extraArgs:
      - {name: unsafe-no-fsync, value: "true"}
controllerManager:
  extraArgs:
    - {name: leader-elect, value: "false"}
scheduler:
  extraArgs:
    - {name: leader-elect, value: "false"}
"""


def mnist_dir(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder with MNIST's four files that nodes get: ``$DDPJOB_MNIST_DIR``, else ../shared/mnist, else None."""
    chosen = environment.get("DDPJOB_MNIST_DIR")
    folder = Path(chosen) if chosen else _REPOSITORY.parent / "shared" / "mnist"
    if folder.is_dir():
        return folder.resolve()
    if chosen:
        raise ValueError(
            f"DDPJOB_MNIST_DIR={chosen} is not a folder; unset it or name the one that holds MNIST's four .gz files"
        )
    return None


def kind_config(shared_dir: Path, data_dir: Path | None) -> str:
    """kind's configuration file for one control plane and two workers: JSON, which is YAML with simpler quoting."""
    mounts: list[dict[str, object]] = [{"hostPath": str(shared_dir), "containerPath": SHARED_MOUNT}]
    if data_dir is not None:
        mounts.append({"hostPath": str(data_dir), "containerPath": DATA_MOUNT, "readOnly": True})
    config = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "networking": {"podSubnet": POD_SUBNET, "serviceSubnet": SERVICE_SUBNET, "apiServerAddress": "127.0.0.1"},
        "kubeadmConfigPatches": [_KUBEADM_PATCH],
        "nodes": [{"role": role, "extraMounts": mounts} for role in ("control-plane", "worker", "worker")],
    }
    return json.dumps(config, indent=1)


def shared_volume(name: str, *, storage_class: str, claim: tuple[str, str] | None, capacity: str) -> dict[str, object]:
    """A ReadWriteMany PersistentVolume on the folder ``name`` of what all nodes share."""
    spec: dict[str, object] = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": capacity},
        "storageClassName": storage_class,
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": f"{SHARED_MOUNT}/{name}", "type": "Directory"},
    }
    if claim is not None:
        spec["claimRef"] = {"namespace": claim[0], "name": claim[1]}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


def ready_nodes(node_list: Mapping[str, Any]) -> set[str]:
    """The names of the nodes whose condition Ready is True, of a NodeList as the API server gives it."""
    return {
        node["metadata"]["name"]
        for node in node_list["items"]
        for condition in node["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }


def without_forwarding(corefile: str) -> str:
    """A Corefile without the plugins forward (with its block) and loop: it answers for the cluster's names alone."""
    kept = re.sub(r"(?m)^[ \t]*forward\b[^\n{]*(\{[^}]*\})?[ \t]*\n", "", corefile)
    return re.sub(r"(?m)^[ \t]*loop[ \t]*\n", "", kept)
