"""Kubeconfigs of users who have one of Kubernetes' roles, which the chart extends, in the namespace of a trial."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.e2e.trials import Trial


def kubeconfig_of(trial: Trial, role: str, folder: Path) -> Path:
    """Return a kubeconfig with the rights of a role in the namespace."""
    space = trial.kubectl.namespace
    trial.kubectl("create", "serviceaccount", role)
    trial.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={space}:{role}")
    cluster = yaml.safe_load(trial.cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
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
