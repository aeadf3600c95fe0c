"""Trim a pod to the fields that the engine reads, because the cache holds the pods of all jobs.

A pod of the API server takes about 20 KB as Python objects, a trimmed one 2 KB. ``pod_view`` and ``owner_uid`` return
the same for both; a field that they begin to read must be added here.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, is_true

_METADATA = ("namespace", "name", "uid", "resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds")
_OWNER = ("kind", "uid", "controller")
_STATUS = ("phase", "reason", "message", "podIP", "startTime")
_CONDITIONS = ("PodScheduled", "DisruptionTarget")
_UNTIL_IT_RUNS = "PodReadyToStartContainers"
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_TERMINATED = ("exitCode", "signal", "reason", "message", "startedAt", "finishedAt")
_WAITING = ("reason", "message")


def trim_pod(pod: Mapping[str, Any], like: Json | None = None) -> Json:
    """Return a pod with the fields that the engine reads.

    like: another trimmed pod, best of the same job. Equal parts are shared with it, so it must not be changed.
    """
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    metadata = _part(meta, _METADATA)
    metadata["labels"] = {
        sys.intern(key): value for key, value in (meta.get("labels") or {}).items() if _is_label_of_ours(key)
    }
    if owners := meta.get("ownerReferences"):
        metadata["ownerReferences"] = [_part(owner, _OWNER) for owner in owners]
    trimmed: Json = {
        "metadata": metadata,
        "spec": _part(spec, ("nodeName",))
        | {"containers": [_part(c, ("name",)) for c in spec.get("containers") or ()]},
        "status": _trimmed_status(status),
    }
    shared: Json = _shared(trimmed, like)
    return shared


def _trimmed_status(status: Mapping[str, Any]) -> Json:
    trimmed = _part(status, _STATUS)
    kinds = ("Ready", "ContainersReady", *_CONDITIONS) if _is_marked(status) else _CONDITIONS
    kinds = (_UNTIL_IT_RUNS, *kinds) if status.get("phase") == "Pending" else kinds
    conditions = [_part(c, _CONDITION) for c in status.get("conditions") or () if _is_of_interest(c, kinds)]
    if conditions:
        trimmed["conditions"] = conditions
    for key in ("containerStatuses", "initContainerStatuses"):
        if containers := status.get(key):
            trimmed[key] = list(_trimmed_containers(containers))
    return trimmed


def _trimmed_containers(containers: Iterable[Mapping[str, Any]]) -> Iterable[Json]:
    for container in containers:
        state = container.get("state") or {}
        trimmed: Json = {}
        if "running" in state:
            trimmed["running"] = {}
        if ended := state.get("terminated"):
            trimmed["terminated"] = _part(ended, _TERMINATED)
        if waiting := state.get("waiting"):
            trimmed["waiting"] = _part(waiting, _WAITING)
        yield _part(container, ("name",)) | {"state": trimmed}


def _is_label_of_ours(key: str) -> bool:
    return key == names.LABEL_MANAGED_BY or key.startswith(f"{names.GROUP}/")


def _is_marked(status: Mapping[str, Any]) -> bool:
    """Return whether the pod is not ready although its containers are, see ``PodView.node_unready``."""
    return is_true(status, "ContainersReady") and not is_true(status, "Ready")


def _is_of_interest(condition: Mapping[str, Any], kinds: Sequence[str]) -> bool:
    """Return whether a condition can change a view; every running pod has the condition PodScheduled."""
    kind = condition.get("type")
    return kind in kinds and not (kind == "PodScheduled" and condition.get("status") == "True")


def _part(obj: Mapping[str, Any], keys: Iterable[str]) -> Json:
    return {key: value for key in keys if (value := obj.get(key)) is not None}


def _shared(new: Any, like: Any) -> Any:
    """Return ``new`` with every part that equals the part of ``like`` at the same place replaced by that."""
    if new == like:
        return like
    if isinstance(new, dict) and isinstance(like, dict):
        return {key: _shared(value, like.get(key)) for key, value in new.items()}
    if isinstance(new, list) and isinstance(like, list) and len(new) == len(like):
        return [_shared(value, other) for value, other in zip(new, like, strict=True)]
    return new
