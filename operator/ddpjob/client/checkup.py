"""``ddpjob doctor``: verdicts on torch and on a cluster that no other command gives before there is a job.

They are pure functions of what was read. The JSON is that of ``ddpjob doctor -o json``.
"""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.client.verdict.operator import serves

Status = Literal["ok", "warning", "error", "unknown"]
_MIN_TORCH = (2, 10)
_TORCH_SECONDS = 60.0
_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"
_MOST_SKEW = 60.0
_INSTALL = "docs/start/install.md installs the operator: helm install ddpjob charts/ddpjob -n ddpjob-system"


class Check(WireModel):
    """The verdict on one part."""

    part: Literal["machine", "cluster"]
    """Whether it is about this machine or the cluster."""
    name: str
    """Which check: a word that stays the same between releases."""
    status: Status
    """ok; warning: something does not work, or only slowly; error: jobs cannot run; unknown: it could not be found out,
    for example without the right to read it."""
    summary: str
    """What was found."""
    hint: str | None = None
    """The usual cause, or what follows from it."""
    next: str | None = None
    """What to do: a command, or a document."""


class Checkup(WireModel):
    """What ``ddpjob doctor`` found."""

    version: str
    """Release of ddpjob."""
    cluster: str | None = None
    """The cluster and namespace that were checked; absent if there is none."""
    healthy: bool
    """Whether no check found an error."""
    checks: list[Check]
    """The checks, those of this machine first."""


def of_cluster(name: str, status: Status, summary: str, hint: str = "", next_step: str = "") -> Check:
    """Return a verdict on the cluster."""
    text = " ".join(summary.split())
    return Check(part="cluster", name=name, status=status, summary=text, hint=hint or None, next=next_step or None)


def check_torch(gpus: int) -> Check:
    """Check torch in another process, because its import may end the process. gpus: what the driver shows."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return torch(None, "", 0, gpus)
    command = [sys.executable, "-c", _COUNT_DEVICES]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TORCH_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return torch(version, f"its import takes longer than {_TORCH_SECONDS:g} s", 0, gpus)
    if done.returncode:
        return torch(version, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1], 0, gpus)
    return torch(version, "", int(done.stdout.split()[-1]), gpus)


def torch(version: str | None, error: str, devices: int, gpus: int) -> Check:
    """Judge torch.

    Args:
        version: None if it is not installed.
        error: why it cannot be imported.
        devices, gpus: GPUs that torch can use, and that the driver shows.
    """
    status: Status = "warning"
    summary, hint, todo = f"torch {version}, {devices} GPU{'' if devices == 1 else 's'}", "", "pip install torch"
    if version is None:
        summary = "torch is not installed in this Python"
        hint = "jobs of this machine that train need it; jobs on a cluster do not"
    elif error:
        status, summary = "error", f"torch {version} cannot be imported: {' '.join(error.split())}"
        hint = "a library that torch needs is missing, or does not fit this machine"
    elif tuple(int(part) if part.isdigit() else 0 for part in re.split(r"[.+]", version)[:2]) < _MIN_TORCH:
        hint = f"ddprun and ddptrain are tested with torch {'.'.join(map(str, _MIN_TORCH))} or later"
    elif gpus and not devices:
        summary += f", but the driver shows {gpus}"
        hint = "this torch is built for CPUs only, or for a later driver"
        todo = 'python -c "import torch; print(torch.version.cuda); torch.cuda.init()" says why'
    else:
        status, todo = "ok", ""
    return Check(part="machine", name="torch", status=status, summary=summary, hint=hint or None, next=todo or None)


def server(version: Json, skew: float | None, error: str) -> Check:
    """Judge the API server. skew: by how many seconds this machine's clock is ahead of it. error: why it is silent."""
    if error:
        hint = "it restarts, a network or a proxy between is down, or the credentials of the kubeconfig have expired"
        summary = f"the API server does not answer: {error}"
        return of_cluster("api-server", "error", summary, hint, "kubectl get --raw /readyz")
    text = f"Kubernetes {version.get('gitVersion', 'of an unknown version')}"
    if skew is not None and abs(skew) > _MOST_SKEW:
        side = "ahead of" if skew > 0 else "behind"
        hint = "tokens and certificates may count as expired, or not valid yet"
        summary = f"{text}; this machine's clock is {abs(skew):.0f} s {side} the server's"
        return of_cluster("api-server", "warning", summary, hint, "timedatectl status")
    return of_cluster("api-server", "ok", text)


def operator(deployments: Sequence[Json], namespace: str, version: str) -> Check:
    """Judge whether an operator works on the jobs of a namespace. version: of this program."""
    serving = [one for one in deployments if serves(one, namespace)]
    if not serving:
        others = f"; {len(deployments)} serve other namespaces" if deployments else ""
        hint = "jobs are stored, and nothing starts their pods"
        return of_cluster("operator", "error", f"no operator serves the namespace {namespace}{others}", hint, _INSTALL)
    one = max(serving, key=_ready)
    meta = one["metadata"]
    text = f"{meta['namespace']}/{meta['name']}: {_ready(one)} of {one['spec'].get('replicas', 1)} replicas are ready"
    if not _ready(one):
        hint = "pods that run train on; nothing is started, stopped or restarted meanwhile"
        look = f"kubectl -n {meta['namespace']} describe deployment {meta['name']}"
        return of_cluster("operator", "error", text, hint, look)
    running = str((meta.get("labels") or {}).get("app.kubernetes.io/version") or "")
    if running and running != version:
        hint = "neighbouring releases work together; fields of the later one are missing or not shown"
        summary = f"{text}, of release {running}; this is {version}"
        return of_cluster("operator", "warning", summary, hint, "docs/tasks/operations.md")
    return of_cluster("operator", "ok", f"{text}, of release {running or 'unknown'}")


def _ready(deployment: Json) -> int:
    return int((deployment.get("status") or {}).get("readyReplicas") or 0)
