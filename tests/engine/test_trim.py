"""A trimmed pod gives the same view as the whole one, and takes a tenth of its memory."""

import copy
import gc
import json
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.observed import owner_uid
from ddpjob.engine.pod_view import pod_view
from ddpjob.engine.trim import trim_pod
from tests.builders import SETTINGS, a_job

TIMES = ("2026-03-01T12:00:00Z", "2026-03-01T12:00:01Z", "2026-03-01T13:00:00Z")
TEXTS = st.sampled_from(["", "OOMKilled", "Evicted", "Error", '{"message": "boom", "rank": 3}', "é\n" * 50])
terminated = st.fixed_dictionaries(
    {"exitCode": st.sampled_from([0, 1, 137])},
    optional={
        "signal": st.sampled_from([0, 9]), "reason": TEXTS, "message": TEXTS, "startedAt": st.sampled_from(TIMES),
        "finishedAt": st.sampled_from(TIMES), "containerID": st.just("containerd://0123456789abcdef"),
    },
)  # fmt: skip
waiting = st.fixed_dictionaries({}, optional={"reason": st.sampled_from(["ErrImagePull", "PodInitializing"]),
                                              "message": TEXTS})  # fmt: skip
state = st.one_of(
    st.just({}),
    st.sampled_from(TIMES).map(lambda time: {"running": {"startedAt": time}}),
    terminated.map(lambda ended: {"terminated": ended}),
    waiting.map(lambda why: {"waiting": why}),
)
container = st.builds(
    lambda name, state: {"name": name, "state": state, "ready": False, "restartCount": 0, "imageID": "sha256:0"},
    st.sampled_from(["trainer", "sidecar"]),
    state,
)
condition = st.builds(
    lambda kind, status, text: {"type": kind, "status": status, "reason": "Why", "message": text},
    st.sampled_from(["PodScheduled", "DisruptionTarget", "Ready", "Initialized"]),
    st.sampled_from(["True", "False", "Unknown"]),
    TEXTS,
)
status = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        "reason": TEXTS, "message": TEXTS, "podIP": st.just("192.0.2.1"), "qosClass": st.just("Burstable"),
        "conditions": st.lists(condition, max_size=3, unique_by=lambda item: item["type"]),
        "containerStatuses": st.lists(container, max_size=2) | st.none(),
        "initContainerStatuses": st.lists(container, max_size=2) | st.none(),
    },
)  # fmt: skip
meta = st.fixed_dictionaries(
    {},
    optional={
        "deletionTimestamp": st.sampled_from(TIMES), "deletionGracePeriodSeconds": st.sampled_from([0, 30]),
        "annotations": st.just({"note": "x" * 100}),
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


@given(status, meta, st.booleans(), status)
def test_trimmed_pod_gives_the_same_view(
    status: dict[str, Any], meta: dict[str, Any], has_spec: bool, other: dict[str, Any]
) -> None:
    pod = a_pod() | {"status": status}
    pod["metadata"] |= meta
    if not has_spec:
        del pod["spec"]
    sibling = trim_pod(a_pod(1) | {"status": other})
    before = copy.deepcopy(sibling)
    for trimmed in (trim_pod(pod), trim_pod(pod, like=sibling), trim_pod(trim_pod(pod))):
        assert pod_view(trimmed) == pod_view(pod)
        assert owner_uid(trimmed) == owner_uid(pod)
    assert sibling == before


def test_trimmed_pod_of_a_job_takes_less_than_three_kilobytes() -> None:
    nodes = 200
    texts = [json.dumps(a_pod(number, nodes)) for number in range(nodes)]
    tracemalloc.start()
    try:
        whole = [json.loads(text) for text in texts]
        whole_bytes = tracemalloc.get_traced_memory()[0] / nodes
        kept: list[dict[str, Any]] = []
        for pod in whole:
            kept.append(trim_pod(pod, like=kept[0] if kept else None))
        del whole, pod
        gc.collect()
        kept_bytes = tracemalloc.get_traced_memory()[0] / nodes
    finally:
        tracemalloc.stop()
    print(f"{whole_bytes:.0f} bytes whole, {kept_bytes:.0f} bytes trimmed")
    assert kept_bytes < 3000 < whole_bytes / 3
