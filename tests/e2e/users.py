"""Kubeconfigs of users who have one of Kubernetes' roles, which the chart extends, in the namespace of a trial."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import yaml

from ddpjob.api.objects import Json
from tests.e2e.trials import Trial


def cluster_of(trial: Trial) -> Json:
    config = yaml.safe_load(trial.cluster.kubeconfig.read_text())
    found: Json = config["clusters"][0]["cluster"]
    return found


def kubeconfig_of(trial: Trial, role: str, folder: Path, port: int | None = None) -> Path:
    """Return a kubeconfig with the rights of a role in the namespace. port: of a proxy before the API server."""
    space = trial.kubectl.namespace
    trial.kubectl("create", "serviceaccount", role)
    trial.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={space}:{role}")
    cluster = cluster_of(trial)
    if port is not None:
        cluster |= {"tls-server-name": urlsplit(cluster["server"]).hostname, "server": f"https://127.0.0.1:{port}"}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kind", "cluster": cluster}],
        "users": [{"name": role, "user": {"token": trial.kubectl("create", "token", role).strip()}}],
        "contexts": [{"name": role, "context": {"cluster": "kind", "user": role, "namespace": space}}],
        "current-context": role,
    }
    path = folder / f"{role}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
