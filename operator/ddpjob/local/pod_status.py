"""A pod's status as a kubelet reports it, computed from the states of its containers.

https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
"""

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.local.translate import LOOPBACK

_UNREADY = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}  # phase to the reason of the condition Ready


def waiting(reason: str, message: str = "") -> Json:
    """Return the state of a container that does not run yet."""
    return {"waiting": {"reason": reason} | ({"message": message} if message else {})}


def running(since: datetime) -> Json:
    """Return the state of a running container."""
    return {"running": {"startedAt": timestamp(since)}}


def terminated(code: int, reason: str, message: str, started: datetime | None, ended: datetime) -> Json:
    """Return the state of a container that ended; ``started`` is None if it never ran."""
    state: Json = {"exitCode": code, "reason": reason, "finishedAt": timestamp(ended)}
    state["startedAt"] = timestamp(started) if started is not None else "1970-01-01T00:00:00Z"
    return {"terminated": state | ({"message": message} if message else {})}


def pod_status(pod: Json, states: Mapping[str, Json], start: datetime, now: datetime) -> Json:
    """Return the complete status.

    pod: with its last status. states: by container, init containers included. start: when the kubelet accepted it.
    """
    spec = pod["spec"]
    inits, mains = spec.get("initContainers") or [], spec["containers"]
    initialized = all(_is_initialized(container, states[container["name"]]) for container in inits)
    begun = initialized and all("waiting" not in states[container["name"]] for container in mains)
    phase = _phase(inits, mains, states)
    ready = phase == "Running" and all("running" in states[container["name"]] for container in mains)
    unready = "" if ready else _UNREADY.get(phase, "ContainersNotReady")
    status: Json = {
        "phase": phase,
        "conditions": _conditions(
            (pod.get("status") or {}).get("conditions") or (),
            {
                "Initialized": (initialized, "" if initialized else "ContainersNotInitialized"),
                "Ready": (ready, unready),
                "ContainersReady": (ready, unready),
            },
            timestamp(now),
        ),
        "hostIP": LOOPBACK,
        "hostIPs": [{"ip": LOOPBACK}],
        "startTime": timestamp(start),
        "containerStatuses": [_container_status(c, states[c["name"]], is_init=False) for c in mains],
    }
    if inits:
        status["initContainerStatuses"] = [_container_status(c, states[c["name"]], is_init=True) for c in inits]
    if begun or any("waiting" not in state for state in states.values()):
        status |= {"podIP": LOOPBACK, "podIPs": [{"ip": LOOPBACK}]}
    return status


def is_sidecar(container: Json) -> bool:
    """Return whether an init container keeps running with the other containers."""
    return container.get("restartPolicy") == "Always"


def exit_code(state: Json) -> int | None:
    """Return the exit code of a container that ended, otherwise None."""
    code: int | None = (state.get("terminated") or {}).get("exitCode")
    return code


def _is_initialized(container: Json, state: Json) -> bool:
    return "running" in state or "terminated" in state if is_sidecar(container) else exit_code(state) == 0


def _phase(inits: Sequence[Json], mains: Sequence[Json], states: Mapping[str, Json]) -> str:
    """Return the phase for restartPolicy Never.

    https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-phase
    """
    if any(exit_code(states[c["name"]]) not in (None, 0) for c in inits if not is_sidecar(c)):
        return "Failed"
    codes = [exit_code(states[container["name"]]) for container in mains]
    if None not in codes:
        return "Succeeded" if not any(codes) else "Failed"
    return "Pending" if any("waiting" in states[container["name"]] for container in mains) else "Running"


def _conditions(before: Sequence[Json], wanted: Mapping[str, tuple[bool, str]], now: str) -> list[Json]:
    """Return the kubelet's conditions with the time of their last change; others (PodScheduled) are unchanged."""
    known = {condition["type"]: condition for condition in before}
    out = [condition for condition in before if condition["type"] not in wanted]
    for kind, (holds, reason) in wanted.items():
        value = "True" if holds else "False"
        same = known.get(kind, {}).get("status") == value
        condition: Json = {"type": kind, "status": value, "lastProbeTime": None}
        condition["lastTransitionTime"] = known[kind]["lastTransitionTime"] if same else now
        out.append(condition | ({"reason": reason} if reason else {}))
    return out


def _container_status(container: Json, state: Json, *, is_init: bool) -> Json:
    ended_well = is_init and exit_code(state) == 0
    return {
        "name": container["name"],
        "state": state,
        "lastState": {},
        "ready": ended_well or "running" in state,
        "started": "running" in state,
        "restartCount": 0,
        "image": container.get("image", ""),
        "imageID": "",
    }


MAX_MESSAGE_BYTES = 4096
MAX_LOG_BYTES = 2048
MAX_LOG_LINES = 80


def termination_message(file: Path, log: Path, *, falls_back: bool) -> str:
    """Return the end of the message file; if that is empty and ``falls_back``, the end of the log.

    https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
    """
    text = _end_of(file, MAX_MESSAGE_BYTES)
    if text or not falls_back:
        return text
    return "".join(_end_of(log, MAX_LOG_BYTES).splitlines(keepends=True)[-MAX_LOG_LINES:])


def _end_of(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(-min(size, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""
