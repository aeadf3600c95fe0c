"""Configurations of clients with one cluster, one user and one context."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_kubeconfig(
    path: Path,
    server: str,
    user: Mapping[str, Any],
    *,
    ca_file: str = "",
    name: str = "test",
    namespace: str = "default",
) -> Path:
    """Write a kubeconfig, as JSON, and return its path. name: of the user and the context."""
    cluster = {"server": server} | ({"certificate-authority": ca_file} if ca_file else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": "cluster", "user": name, "namespace": namespace}}],
        "current-context": name,
    }
    path.write_text(json.dumps(config))
    return path
