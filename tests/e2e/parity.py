"""What of an object says where and when it ran, and what says what it is: for comparing a cluster with local mode.

Names carry five characters of the job's uid; times, durations, speeds, addresses and machines belong to one run. All
else must be the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tests.e2e.kubectl import Json

# Durations and speeds: numbers that no two runs share.
MEASURED = frozenset({"activeSeconds", "timings", "samplesPerSecond", "etaSeconds", "nodeName"})
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
# What the API server and its admission add to every object of that moment.
_METADATA = frozenset({"uid", "resourceVersion", "creationTimestamp", "managedFields"})


def status_of(job: Json) -> Json:
    """The status of a finished job without what belongs to one run."""
    status: Json = _plain(job["status"], job)
    return status


def pods_of(pods: Iterable[Json], job: Json) -> list[Json]:
    """Specs, labels, annotations and owners of pods as they are stored, by name."""
    return [_rendered(pod, job) for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))]


def differences(here: Any, there: Any, path: str = "") -> list[str]:
    """Where two objects differ, a line each; empty when they are equal."""
    if isinstance(here, dict) and isinstance(there, dict):
        keys = sorted({*here, *there})
        return [line for key in keys for line in differences(here.get(key), there.get(key), f"{path}.{key}")]
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = enumerate(zip(here, there, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}[{index}]")]
    return [] if here == there else [f"{path}: here {json.dumps(here)}, there {json.dumps(there)}"]


def _rendered(pod: Json, job: Json) -> Json:
    metadata = {key: value for key, value in pod["metadata"].items() if key not in _METADATA}
    rendered: Json = _plain({"metadata": metadata, "spec": pod["spec"]}, job)
    return rendered


def _plain(value: Any, job: Json) -> Any:
    uid = job["metadata"]["uid"]
    text = json.dumps(value).replace(uid, "<uid>").replace(f"-{uid[:5]}", "-<uid5>")
    return _without_measures(json.loads(_TIME.sub("<time>", text)))


def _without_measures(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_measures(inner) for key, inner in value.items() if key not in MEASURED}
    if isinstance(value, list):
        return [_without_measures(inner) for inner in value]
    return value
