"""Actions of a test on the jobs of one namespace, as their user and as the kubelet."""

from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, owner_uid
from tests.builders import ended, running
from tests.processes import eventually
from tests.worlds.control_plane import ApiError, ControlPlane

CORE = "/api/v1/namespaces"


class Jobs:
    """The jobs, their pods and the operator's writes in one namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace
        self.path = f"/{names.DDPJOBS.path(namespace)}"

    def submit(self, name: str = "mnist", **spec: Any) -> Json:
        """Apply a job, by default with one node."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.DDPJOBS.kind,
            "metadata": {"name": name},
            "spec": {"image": "trainer:1"} | spec,
        }
        return self.plane.request("POST", self.path, body)

    def get(self, name: str = "mnist") -> Json:
        return self.plane.request("GET", f"{self.path}/{name}")

    def exists(self, name: str = "mnist") -> bool:
        try:
            self.get(name)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def status(self, name: str = "mnist") -> Json:
        return dict(self.get(name).get("status") or {})

    def condition(self, kind: str, name: str = "mnist") -> Json:
        found = [c for c in self.status(name).get("conditions") or () if c["type"] == kind]
        return dict(found[0]) if found else {}

    def wait_for(self, state: str, name: str = "mnist", **fields: Any) -> Json:
        """Wait until the status has this state and these fields, and return it."""
        wanted = {"state": state} | fields

        def probe() -> Json | None:
            status = self.status(name)
            return status if all(status.get(key) == value for key, value in wanted.items()) else None

        return eventually(f"{name} is {wanted}; it is {self.status(name)}", probe, timeout=180.0)

    def pods(self, name: str = "mnist", attempt: int | None = None) -> list[Json]:
        """Return the job's pods by node_rank."""
        selector = f"{names.LABEL_JOB_NAME}={name}" + (f",{names.LABEL_ATTEMPT}={attempt}" if attempt else "")
        pods = self.plane.request("GET", f"{CORE}/{self.namespace}/pods?labelSelector={selector}")["items"]
        return sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][names.LABEL_NODE_RANK]))

    def wait_for_pods(self, number: int, name: str = "mnist", attempt: int = 1, *, timeout: float = 60.0) -> list[Json]:
        def probe() -> list[Json] | None:
            pods = self.pods(name, attempt)
            return pods if len(pods) == number else None

        return eventually(f"{number} pods of attempt {attempt} of {name}", probe, timeout=timeout)

    def run(self, pod: Json) -> None:
        """Report a running trainer. The pod is not bound to a node, so that it can be deleted."""
        self._report(pod, running())

    def end(self, pod: Json, code: int) -> None:
        """Report that the trainer ended."""
        self._report(pod, ended(code))

    def _report(self, pod: Json, status: Json) -> None:
        self.plane.request("PATCH", f"{self.object_path(pod)}/status", {"status": status})

    def delete(self, pod: Json) -> None:
        """Delete the pod."""
        self.plane.request("DELETE", self.object_path(pod), {"gracePeriodSeconds": 0})

    def object_path(self, pod: Json) -> str:
        return f"{CORE}/{self.namespace}/pods/{pod['metadata']['name']}"

    def objects(self, plural: str) -> list[Json]:
        return list(self.plane.request("GET", f"{CORE}/{self.namespace}/{plural}")["items"])

    def owned(self, plural: str, name: str = "mnist") -> list[str]:
        """Return the names of the objects that the job owns."""
        uid = self.get(name)["metadata"]["uid"]
        return [item["metadata"]["name"] for item in self.objects(plural) if owner_uid(item) == uid]

    def writes(self, *, about: str = "", since: int = 0) -> list[tuple[str, str, str, int]]:
        """Return the operator's writes in order, without the first ``since``: verb, resource, name, HTTP status."""
        found = []
        for event in self.plane.writes():
            ref = event["objectRef"]
            ours = ref.get("namespace") == self.namespace and event["userAgent"].startswith("ddpjob-operator/")
            if ours and ref.get("name", "").startswith(about):
                resource = "/".join(part for part in (ref["resource"], ref.get("subresource")) if part)
                found.append((event["verb"], resource, ref.get("name", ""), event["responseStatus"]["code"]))
        return found[since:]

    def settle(self) -> None:
        """Wait until the operator has handled all earlier changes: it handles a new job to its end."""
        marker = f"marker-{len(self.writes())}"
        self.submit(marker)
        self.wait_for("Pending", marker, nodes={"desired": 1, "pending": 1} | dict.fromkeys(NOT_PENDING, 0))


NOT_PENDING = ("running", "succeeded", "failed")
