"""Views of pods, whatever the API server sends."""

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api.pod_view import pod_view
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


@given(status, meta, st.booleans())
def test_any_pod_of_an_api_server_has_a_view(status: dict[str, Any], meta: dict[str, Any], has_spec: bool) -> None:
    rendered = desired_pods(Job.of(a_job()), 1, SETTINGS)[0].body
    pod = copy.deepcopy(rendered) | {"status": status}
    pod["metadata"]["uid"] = "u"
    pod["metadata"] |= meta
    if not has_spec:
        del pod["spec"]
    view = pod_view(pod)
    assert (view.name, view.node_rank, view.owner_uid) == (pod["metadata"]["name"], 0, a_job()["metadata"]["uid"])
    assert view == pod_view(json.loads(json.dumps(pod)))
