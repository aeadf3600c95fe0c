"""The operator with a gang scheduler on a real API server: CRDs that come later, groups before pods, and their end."""

import pytest

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane
from tests.worlds.custom_resources import pod_groups

pytestmark = pytest.mark.apiserver


def groups(jobs: Jobs, kind: Resource) -> list[Json]:
    return list(jobs.plane.request("GET", f"/{kind.path(jobs.namespace)}")["items"])


def is_only(jobs: Jobs, kind: Resource, attempt: int) -> bool:
    return [group["metadata"]["name"].rpartition("-")[2] for group in groups(jobs, kind)] == [str(attempt)]


@pytest.mark.parametrize(
    ("scheduler", "kind"),
    [("volcano", names.VOLCANO_GROUPS), ("coscheduling", names.COSCHEDULING_GROUPS)],
)
def test_gang_waits_for_its_scheduler_and_has_one_group_for_each_attempt(
    control_plane: ControlPlane, namespace: str, jobs: Jobs, scheduler: str, kind: Resource
) -> None:
    with OperatorProcess(control_plane, namespace, gang_scheduler=scheduler, sweep_interval_seconds=5):
        jobs.submit(numNodes=2)
        jobs.wait_for("Queued")
        assert jobs.condition("Running")["reason"] == "GangSchedulerUnavailable" and not jobs.pods()

        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        control_plane.request("POST", path, pod_groups(kind))
        first = jobs.wait_for_pods(2)
        (group,) = groups(jobs, kind)
        uid = jobs.get()["metadata"]["uid"]
        assert group["metadata"]["name"] == names.group_name("mnist", uid, 1) and group["spec"] == {"minMember": 2}
        created = [(resource, code) for verb, resource, _, code in jobs.writes() if verb == "create"]
        assert created.index(("podgroups", 201)) < created.index(("pods", 201))

        unplaced = {"conditions": [{"type": "Unschedulable", "status": "True", "message": "2/2 tasks unschedulable"}]}
        if scheduler == "volcano":
            where = f"/{kind.path(namespace)}/{group['metadata']['name']}/status"
            control_plane.request("PATCH", where, {"status": unplaced})
            eventually(
                "the message of the group is shown",
                lambda: "2/2 tasks unschedulable" in jobs.condition("Scheduled")["message"],
            )

        for pod in first:
            jobs.run(pod)
        jobs.wait_for("Running")
        jobs.end(first[1], 1)
        second = jobs.wait_for_pods(2, attempt=2)
        eventually("only the group of attempt 2 is left", lambda: is_only(jobs, kind, 2))
        for pod in second:
            jobs.end(pod, 0)
        jobs.wait_for("Succeeded", restarts=1)
        eventually("no group is left", lambda: not groups(jobs, kind))
        control_plane.request("DELETE", f"{path}/podgroups.{kind.api_version.split('/')[0]}")
