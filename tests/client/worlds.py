"""Where the contract runs: this machine with real processes, and an API server where the test acts as the operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from ddpjob import Client, DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.status import CONDITIONS
from tests.worlds.control_plane import ControlPlane

READS_JOBS = {"apiGroups": [names.GROUP], "resources": [names.DDPJOBS.plural], "verbs": ["get", "list"]}
_numbers = itertools.count(1)
TIME = "2026-01-02T03:04:05Z"
# Succeeds when ``finish`` makes the file; on SIGTERM it ends like a trainer that has saved.
SCRIPT = """
trap 'echo saved; exit 75' TERM
echo "attempt $DDPJOB_ATTEMPT"
until [ -e "$PLACE/go" ]; do sleep 0.02; done
[ ! -e "$PLACE/fail" ] || exit 3
"""


def condition(kind: str, status: str = "True") -> Json:
    return {"type": kind, "status": status, "reason": kind, "message": "", "lastTransitionTime": TIME}


class LocalWorld:
    """Jobs of this machine.

    ``job`` runs until ``finish`` or ``fail``; ``run`` returns when it runs, and ``stop`` lets a suspended one stop.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = Client.local(folder / "state")

    def job(self, name: str) -> DDPJob:
        env = {"PLACE": str(self.folder)}
        return DDPJob(name, image="none", command=["sh", "-c", SCRIPT], env=env, restart_policy={"maxRestarts": 0})

    def run(self, job: DDPJob) -> None:
        self.client.wait(job, until=lambda status: status.state == "Running", timeout=60)

    def stop(self, job: DDPJob) -> None:
        assert self.client.get(job).state == "Suspended"

    def finish(self, job: DDPJob) -> None:
        (self.folder / "go").touch()

    def fail(self, job: DDPJob) -> None:
        (self.folder / "fail").touch()
        self.finish(job)


class ClusterWorld:
    """Jobs of one namespace of an API server; see ``LocalWorld``."""

    def __init__(self, plane: ControlPlane, namespace: str, server: str = "") -> None:
        self.plane = plane
        self.namespace = namespace
        self.attempt = 0
        kubeconfig = plane.kubeconfig(name=namespace, server=server, namespace=namespace)
        self.client = Client.cluster(kubeconfig=kubeconfig, timeout=20)

    def job(self, name: str) -> DDPJob:
        return DDPJob(name, image="none", command=["train"])

    def run(self, job: DDPJob) -> None:
        self.attempt += 1
        self.patch(job, state="Running", attempt=self.attempt, conditions=[condition("Running")])

    def stop(self, job: DDPJob) -> None:
        assert self.client.get(job).spec.suspend
        self.patch(job, state="Suspended", conditions=[condition("Suspended")])

    def finish(self, job: DDPJob) -> None:
        self.patch(job, state="Succeeded", conditions=[condition("Succeeded"), condition("Finished")])

    def fail(self, job: DDPJob) -> None:
        failure = {"attempt": self.attempt, "nodeRank": 0, "exitCode": 3, "reason": "Error", "message": "it ended"}
        failure |= {"next": "kubectl logs", "action": "Fail", "counted": False, "time": TIME}
        self.patch(job, state="Failed", conditions=[condition("Failed"), condition("Finished")], failures=[failure])

    def patch(self, job: DDPJob, **status: object) -> None:
        """Write the status as the operator does."""
        assert {c["type"] for c in status.get("conditions", ())} <= set(CONDITIONS)  # type: ignore[attr-defined]
        path = f"{names.DDPJOBS.path(self.namespace)}/{job.name}/status"
        self.plane.request("PATCH", path, {"status": status})

    def user(self, *rules: Json, roles: Iterable[str] = (), server: str = "") -> Client:
        """Return a client for a user who has these rules, and these ClusterRoles, in the namespace."""
        name = f"user-{next(_numbers)}"
        token = self.plane.service_account(self.namespace, name)
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        self.plane.request("POST", f"{rbac}/roles", {"metadata": {"name": name}, "rules": list(rules)})
        subject = {"kind": "ServiceAccount", "name": name, "namespace": self.namespace}
        for kind, role in (("Role", name), *(("ClusterRole", role) for role in roles)):
            reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role}
            body = {"metadata": {"generateName": f"{name}-"}, "subjects": [subject], "roleRef": reference}
            self.plane.request("POST", f"{rbac}/rolebindings", body)
        config = self.plane.kubeconfig(token, name=f"{self.namespace}-{name}", server=server, namespace=self.namespace)
        return Client.cluster(kubeconfig=config, timeout=20)


World = LocalWorld | ClusterWorld
