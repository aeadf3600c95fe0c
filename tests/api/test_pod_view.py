"""Views of pods: small, whatever the API server sends."""

import copy
import gc
import json
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.api.pod_view import PodView, pod_view
from ddpjob.engine.desired import Job, desired_pods
from tests.builders import SETTINGS, a_job

TIMES = ("2026-03-01T12:00:00Z", "2026-03-01T12:00:01Z", "2026-03-01T13:00:00Z")
TEXTS = st.sampled_from(["", "OOMKilled", "Evicted", "Error", '{"message": "boom", "rank": 3}', "é\n" * 50])
terminated = st.fixed_dictionaries(
    {"exitCode": st.sampled_from([0, 1, 137])},
    optional={
        "signal": st.sampled_from([0, 9]), "reason": TEXTS, "message": TEXTS, "startedAt": st.sampled_from(TIMES),
        "finishedAt": st.sampled_from(TIMES),
    },
)  # fmt: skip
state = st.one_of(
    st.just({}),
    st.just({"running": {}}),
    terminated.map(lambda ended: {"terminated": ended}),
    st.just({"waiting": {"reason": "ErrImagePull"}}),
)
status = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        "reason": TEXTS, "message": TEXTS, "podIP": st.just("192.0.2.1"),
        "conditions": st.lists(st.sampled_from(["PodScheduled", "DisruptionTarget", "Ready"]).map(
            lambda kind: {"type": kind, "status": "True"}), max_size=3),
        "containerStatuses": st.none() | st.lists(st.builds(
            lambda name, state: {"name": name, "state": state}, st.sampled_from(["trainer", "sidecar"]), state)),
        "initContainerStatuses": st.none() | st.just([{"name": "fetch", "state": {"terminated": {"exitCode": 3}}}]),
    },
)  # fmt: skip
meta = st.fixed_dictionaries(
    {},
    optional={
        "deletionTimestamp": st.sampled_from(TIMES), "deletionGracePeriodSeconds": st.sampled_from([0, 30]),
    },
)  # fmt: skip


def a_pod(number: int = 0, nodes: int = 2) -> dict[str, Any]:
    """Return a pod of a job as the operator renders it, with what an API server, a scheduler and a kubelet add."""
    pod = copy.deepcopy(desired_pods(Job.of(a_job(numNodes=nodes)), 1, SETTINGS)[number].body)
    time = f"2026-03-01T12:{number // 60 % 60:02}:{number % 60:02}Z"
    pod["metadata"] |= {"uid": f"0a1b2c3d-0000-4000-8000-{number:012}", "resourceVersion": str(1000 + number)}
    pod["metadata"] |= {"creationTimestamp": time, "generation": 1}
    pod["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {f"f:{n}": {} for n in range(60)}}]
    pod["spec"] |= {"nodeName": f"worker-{number % 250}", "schedulerName": "default-scheduler", "priority": 0}
    pod["spec"]["tolerations"] = [{"key": f"node.kubernetes.io/{n}", "operator": "Exists"} for n in range(3)]
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    trainer = {"name": names.TRAINER_CONTAINER, "state": {"running": {"startedAt": time}}, "ready": True}
    pod["status"] = {
        "phase": "Running", "podIP": f"10.0.{number // 250}.{number % 250}", "startTime": time, "hostIP": "10.1.0.1",
        "conditions": [{"type": k, "status": "True", "lastTransitionTime": time, "lastProbeTime": None} for k in kinds],
        "containerStatuses": [trainer | {"image": "trainer:1", "imageID": "sha256:" + "0" * 64, "lastState": {}}],
    }  # fmt: skip
    read: dict[str, Any] = json.loads(json.dumps(pod))  # as a client gets it: no part is shared with another pod
    return read


@given(status, meta, st.booleans())
def test_any_pod_of_an_api_server_has_a_view(status: dict[str, Any], meta: dict[str, Any], has_spec: bool) -> None:
    pod = a_pod() | {"status": status}
    pod["metadata"] |= meta
    if not has_spec:
        del pod["spec"]
    view = pod_view(pod)
    assert (view.name, view.node_rank, view.owner_uid) == (pod["metadata"]["name"], 0, a_job()["metadata"]["uid"])
    assert view == pod_view(json.loads(json.dumps(pod)))


def test_view_of_a_running_pod_takes_less_than_a_kilobyte() -> None:
    nodes = 200
    texts = [json.dumps(a_pod(number, nodes)) for number in range(nodes)]
    tracemalloc.start()
    try:
        whole = [json.loads(text) for text in texts]
        whole_bytes = tracemalloc.get_traced_memory()[0] / nodes
        views: list[PodView] = [pod_view(pod) for pod in whole]
        del whole
        gc.collect()
        view_bytes = tracemalloc.get_traced_memory()[0] / nodes
    finally:
        tracemalloc.stop()
    print(f"{whole_bytes:.0f} bytes whole, {view_bytes:.0f} bytes as {len(views)} views")
    assert view_bytes < 1000 < whole_bytes / 10
