"""Run Helm on the chart of this repository and return the rendered objects."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.prepared import program

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ddpjob"
NAMESPACE = "ddpjob-system"
# Without a cluster, Helm renders for the Kubernetes version that it was built with; fix it.
KUBE_VERSION = ("--kube-version", "1.34.0")

Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm. The caller checks the exit status."""
    return subprocess.run([program("helm"), *arguments], text=True, capture_output=True, timeout=120, check=False)


def template(
    values: Object | None = None, *, release: str = "ddpjob", namespace: str = NAMESPACE, hooks: bool = True
) -> list[Object]:
    """Return the objects that ``helm install`` would create.

    Raises:
        AssertionError: Helm refused the values; its message is in the error.
    """
    options = [*KUBE_VERSION, *_set(values), *([] if hooks else ["--no-hooks"])]
    done = helm("template", release, str(CHART), "--namespace", namespace, *options)
    assert done.returncode == 0, done.stderr
    # libyaml's parser takes a tenth of the time; PyYAML may be built without it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(done.stdout, loader) if document]


def refusal(values: Object, *options: str) -> str:
    """Return Helm's error for values that it refuses.

    Raises:
        AssertionError: Helm accepted the values.
    """
    done = helm("template", "ddpjob", str(CHART), "--namespace", NAMESPACE, *KUBE_VERSION, *_set(values), *options)
    assert done.returncode != 0, f"accepted {values}"
    return done.stderr


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    """Return the objects of these kinds, in order."""
    return [item for item in objects if item["kind"] in kinds]


def _set(values: Object | None) -> list[str]:
    # --set-json keeps the types of values; --set would guess them.
    return [part for key, value in (values or {}).items() for part in ("--set-json", f"{key}={json.dumps(value)}")]
