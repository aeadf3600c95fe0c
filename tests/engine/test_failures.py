"""The table of failures: what each kind of failed pod leads to, through whole plans."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from ddpjob.api.pod_view import pod_view
from ddpjob.api.status import Failure
from ddpjob.api.times import timestamp as iso
from ddpjob.engine.evidence import PodEvidence, evidence_of
from ddpjob.engine.failures import TABLE, Context
from ddpjob.engine.judgement import judge
from tests.builders import DELETING, NOW, World, a_job, a_running_world, a_started_world, disrupted, ended, failed

Json = dict[str, Any]
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
MARKED = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]


def waits(reason: str, message: str = 'secret "token" not found') -> Json:
    return {"waiting": {"reason": reason, "message": message}}


def waiting(reason: str, started: str = "2026-03-01T11:00:00Z", **texts: str) -> Json:
    states = [{"name": "trainer", "state": waits(reason, **texts)}]
    return {"phase": "Pending", "startTime": started, "containerStatuses": states}


def alive(**more: Any) -> Json:
    return {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]} | more


RESTART, FREE, FAIL = ("Restart", True), ("Restart", False), ("Fail", False)
# Per case: status of the pod, its metadata, and the reason and reaction that follow.
ENDED_WITH_1 = {"terminated": {"exitCode": 1}}
CASES: dict[str, tuple[Json, Json, str, tuple[str, bool]]] = {
    "node lost, taint": (alive(**disrupted("DeletionByTaintManager")), DELETING, "NodeLost", FREE),
    "node removed": (alive(**disrupted("DeletionByPodGC")), DELETING, "NodeLost", FREE),
    "node unreachable": (alive(reason="NodeLost"), DELETING, "NodeLost", FREE),
    "node marked": (alive(conditions=MARKED), DELETING, "NodeLost", FREE),
    "preempted": (alive(**disrupted("PreemptionByScheduler")), DELETING, "Preempted", FREE),
    "drained": (alive(**disrupted("EvictionByEvictionAPI")), DELETING, "Drained", FREE),
    "node shutdown": ({"phase": "Failed", "reason": "Terminated"} | disrupted("TerminationByKubelet"), {},
                      "NodeShutdown", FREE),
    "node pressure": (EVICTED | disrupted("TerminationByKubelet"), {}, "Evicted", FREE),
    "own limit of storage": (EVICTED, {}, "LimitExceeded", RESTART),
    "own deadline": ({"phase": "Failed", "reason": "DeadlineExceeded"}, {}, "PodDeadlineExceeded", RESTART),
    "own deadline, trainer ended": (ended(143) | {"phase": "Failed", "reason": "DeadlineExceeded"}, {},
                                    "PodDeadlineExceeded", RESTART),
    "own deadline, trainer obeyed": (ended(0) | {"phase": "Failed", "reason": "DeadlineExceeded"}, {},
                                     "PodDeadlineExceeded", RESTART),
    "refused by the kubelet": ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, {},
                               "UnexpectedAdmissionError", FREE),
    "deleted": (alive(), DELETING, "PodDeleted", FREE),
    "container unknown": (ended(137, reason="ContainerStatusUnknown"), {}, "ContainerStatusUnknown", FREE),
    "out of memory": (ended(137, reason="OOMKilled"), {}, "OOMKilled", RESTART),
    "a rank out of memory": (failed(137, kind="OOMKilled", message="rank 1"), {}, "OOMKilled", RESTART),
    "GPU out of memory": (failed(1, kind="GPUOutOfMemory", exception="OutOfMemoryError", message="rank 1"), {},
                          "GPUOutOfMemory", RESTART),
    "GPU out of memory, by its exception": (
        failed(1, kind="OutOfMemoryError", exception="OutOfMemoryError", message="CUDA out of memory"), {},
        "GPUOutOfMemory", RESTART),
    "GPU out of memory, by its log": (
        ended(1, message="loss 2.1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."), {},
        "GPUOutOfMemory", RESTART),
    "not executable": (ended(126), {}, "StartError", RESTART),
    "not found": (ended(127), {}, "StartError", RESTART),
    "another architecture": (ended(255, message="exec /usr/bin/python3: exec format error\n"), {}, "StartError", FAIL),
    "another architecture, Docker": (
        ended(1, message="standard_init_linux.go:228: exec user process caused: exec format error"), {}, "StartError",
        FAIL),
    "a tool of another architecture": (
        ended(1, message="OSError: [Errno 8] Exec format error: './tool'"), {}, "Error", RESTART),
    "git in a script": (ended(128), {}, "Error", RESTART),
    "not started": (ended(128, reason="StartError"), {}, "StartError", RESTART),
    "usage": (failed(2, kind="UsageError", message="m"), {}, "UsageError", FAIL),
    "impossible ranks": (failed(71, kind="RanksImpossible", message="m"), {}, "RanksImpossible", RESTART),
    "mismatch": (failed(78, kind="ConfigMismatch", message="m"), {}, "ConfigMismatch", FAIL),
    "not finite": (failed(79, kind="NotFinite", message="m"), {}, "NotFinite", RESTART),
    "stopped": (failed(75, kind="Stopped", outcome="stopped", message="m"), {}, "Stopped", FREE),
    "a rank differs": (failed(81, kind="ReplicasDiverged", message="m", rank=2), {}, "ReplicasDiverged", RESTART),
    "a script's own code 81": (failed(81, kind="SystemExit", message="m", rank=2), {}, "SystemExit", RESTART),
    "ranks differ": (failed(81, kind="ReplicasDiverged", message="m"), {}, "ReplicasDiverged", RESTART),
    "superseded": (failed(80, kind="Superseded", message="m"), {}, "Superseded", FREE),
    "exited early": (failed(1, kind="ExitedEarly", exception="ExitedEarly", message="m"), {}, "ExitedEarly", RESTART),
    "hang": (failed(76, kind="Hang", message="m"), {}, "Hang", RESTART),
    "no data": (failed(66, kind="DataMissing", message="m"), {}, "DataMissing", RESTART),
    "rendezvous": (failed(69, kind="RendezvousFailed", message="m"), {}, "RendezvousFailed", RESTART),
    "volume full": (failed(73, kind="VolumeUnwritable", message="m"), {}, "VolumeUnwritable", RESTART),
    "lost peer": (failed(77, cause="peer", kind="PeerLost", message="m"), {}, "PeerLost", RESTART),
    "killed": (ended(137), {}, "SIGKILL", RESTART),
    "crashed": (ended(139), {}, "SIGSEGV", RESTART),
    "exception": (failed(1, kind="ValueError", exception="ValueError", message="m"), {}, "ValueError", RESTART),
    "timeout of a collective": (
        failed(1, cause="unknown", exception="RuntimeError", message="Timed out waiting 1800000ms for recv operation"),
        *({}, "CollectiveTimeout", RESTART),
    ),
    "failed device": (failed(1, kind="DeviceFailed", message="m"), {}, "DeviceFailed", RESTART),
    "other program's code 78": (ended(78), {}, "Error", RESTART),
    "launcher not copied": (
        {"phase": "Failed", "initContainerStatuses": [{"name": "ddpjob-launcher", "state": ENDED_WITH_1}]}, {},
        "LauncherNotInjected", RESTART),
    "no exit code": ({"phase": "Failed"}, {}, "PodFailed", RESTART),
}  # fmt: skip


def failure(status: Json, metadata: Json, **spec: Any) -> tuple[World, Json]:
    """Return the world and the failure after one pod of two got this status, and the other none."""
    world = a_running_world(a_job(**spec))
    pod = world.set_pod(1, status)
    pod["metadata"] |= metadata
    world.settle()
    world.later(11)
    return world, world.status["failures"][0]


@pytest.mark.parametrize("case", CASES)
def test_failed_pod_leads_to_the_reaction_of_its_row(case: str) -> None:
    status, metadata, reason, (action, counted) = CASES[case]
    world, found = failure(status, metadata)
    assert (found["reason"], found["action"], found["counted"]) == (reason, action, counted)
    assert found["hint"] and found["next"] and found["nodeRank"] == 1
    assert world.status["restarts"] == (action == "Restart")
    assert world.status["restartsCountedTowardsLimit"] == counted
    assert (world.status["state"] == "Failed") == (action == "Fail")


REPEATED = Failure(
    attempt=1, exception="ValueError", step=7, where="train.py:9", reason="ValueError", message="m", action="Restart",
    counted=True, time="2026-03-01T12:00:00Z",
)  # fmt: skip
REPEATS = failed(1, exception="ValueError", step=7, exact=True, where="train.py:9", message="m")
AFTER_REPEATED = [Context([REPEATED], has_trained=proved, is_proved=proved) for proved in (False, True)]


def test_every_row_of_the_table_is_reached_by_a_case() -> None:
    seen = set()
    refused = [(waiting(reason), {}, reason, FAIL) for reason in ("InvalidImageName", "CreateContainerConfigError")]
    twice = [(case, context) for case in [(REPEATS, {})] for context in AFTER_REPEATED]
    for (status, metadata, *_), context in [*((case, Context()) for case in [*CASES.values(), *refused]), *twice]:
        pod = {"metadata": {"name": "p", "uid": "u", "labels": {}} | metadata, "status": status}
        view = pod_view(pod)
        facts = evidence_of(view)
        seen.add(next(i for i, row in enumerate(TABLE) if row.matches(facts, context)))
    seen.add(next(i for i, row in enumerate(TABLE) if row.matches(PodEvidence(0), Context())))
    assert [row.when for i, row in enumerate(TABLE) if i not in seen] == []


GPU_LOG = "[rank0]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"


@pytest.mark.parametrize("status", [ended(137, reason="OOMKilled"), ended(1, message=GPU_LOG), EVICTED])
def test_limit_exceeded_twice_fails_the_job(status: Json) -> None:
    world, first = failure(status, {})
    world.run_all_and_settle()
    world.show(0, status)
    last = world.status["failures"][-1]
    assert (last["reason"], last["action"]) == (first["reason"], "Fail")
    assert world.status["state"] == "Failed" and world.condition("Failed")["reason"] == first["reason"]


def test_pod_whose_log_ends_with_gpu_out_of_memory_is_the_cause() -> None:
    """Without reports all nodes end with 1, often in the same second, and the lost peers may be noticed first."""
    world = a_running_world(a_job())
    world.set_pod(0, ended(1, message="torch.distributed.DistBackendError: remote process exited", at=at(1)))
    world.show(1, ended(1, message=GPU_LOG, at=at(2)))
    found = world.status["failures"][0]
    assert (found["reason"], found["nodeRank"]) == ("GPUOutOfMemory", 1)


def test_gpu_memory_that_a_program_reclaimed_before_a_kill_is_not_the_cause() -> None:
    assert failure(ended(137, message=f"{GPU_LOG}\nsmaller batch\nstep 8"), {})[1]["reason"] == "SIGKILL"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: CUDA out of memory, batch 64 becomes 32",
        "retrying after torch.OutOfMemoryError",
        "2026-03-01 12:00:00 INFO caught torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
def test_log_that_only_mentions_gpu_memory_keeps_its_own_cause(line: str) -> None:
    assert failure(ended(1, message=f"{line}\nKeyError: 'label'"), {})[1]["reason"] == "Error"


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[default0]:[rank0]: torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_line_of_an_exception_shows_that_a_gpu_ran_out_of_memory(line: str) -> None:
    log = f"loss 2.1\n{line}\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    assert failure(ended(1, message=log), {})[1]["reason"] == "GPUOutOfMemory"


def at(second: int) -> datetime:
    return NOW + timedelta(seconds=second)


def marked(reason: str, second: int = 0, *, status: str = "True") -> Json:
    """Return a condition that announces a disruption at this second after noon."""
    condition = {"type": "DisruptionTarget", "status": status, "reason": reason, "lastTransitionTime": iso(at(second))}
    return {"conditions": [condition]}


OOM = ended(137, reason="OOMKilled", at=at(20))
ERROR = failed(1, kind="ValueError", message="m", at=at(20))
LEFT_OVER = {
    "preemption given up": (marked("PreemptionByScheduler", 15), {}),
    "preemption withdrawn": (marked("PreemptionByScheduler", 15, status="False"), {}),
    "deleted after its end": (marked("EvictionByEvictionAPI", 25), DELETING | {"deletionTimestamp": iso(at(55))}),
    "other controller": (marked("WorkloadPreempted", 15), {}),
}


@pytest.mark.parametrize(("status", "reason"), [(OOM, "OOMKilled"), (ERROR, "ValueError"), (ended(137), "SIGKILL")])
@pytest.mark.parametrize("case", LEFT_OVER)
def test_disruption_that_did_not_end_the_trainer_is_not_the_cause(status: Json, reason: str, case: str) -> None:
    conditions, metadata = LEFT_OVER[case]
    _, found = failure(status | conditions, metadata)
    assert (found["reason"], found["action"], found["counted"]) == (reason, "Restart", True)


def test_disruption_older_than_the_container_is_not_the_cause() -> None:
    status = ended(143, at=at(20), started=at(10)) | marked("PreemptionByScheduler", 5)
    assert failure(status, DELETING)[1]["reason"] == "PodDeleted"
    status = ended(143, at=at(20), started=at(10)) | marked("PreemptionByScheduler", 15)
    assert failure(status, DELETING)[1]["reason"] == "Preempted"


@pytest.mark.parametrize("status", [failed(1, message="m", at=at(20)), ended(137, at=at(20))])
def test_lost_node_is_the_cause_even_if_the_trainer_ended_before(status: Json) -> None:
    """The trainer of a dying node may end before the control plane notices the loss."""
    _, found = failure(status | marked("DeletionByTaintManager", 70), {"deletionTimestamp": iso(at(100))})
    assert found["reason"] == "NodeLost"


@pytest.mark.parametrize("code", [126, 127])
@pytest.mark.parametrize(("seconds", "reason"), [(1, "StartError"), (59, "StartError"), (60, "Error")])
def test_exit_code_of_a_missing_command_after_a_minute_is_not_a_failed_start(
    code: int, seconds: int, reason: str
) -> None:
    _, found = failure(ended(code, at=at(seconds), started=NOW), {})
    assert (found["reason"], found["exitCode"]) == (reason, code)


@pytest.mark.parametrize("text", ["log", "kubelet"])
def test_image_of_another_architecture_has_its_own_advice(text: str) -> None:
    """Seen: exit code 255 with the hint "the program ended with an error"."""
    message = (
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
        'unable to start container process: exec: "/app": exec format error'
    )
    status = ended(255, message="exec /usr/bin/python3: exec format error", at=at(1), started=NOW)
    if text == "kubelet":
        status = ended(128, message=message, reason="StartError")
    _, found = failure(status, {})
    assert (found["reason"], found["action"]) == ("StartError", "Fail")
    assert "another architecture" in found["hint"] and "kubernetes.io/arch" in found["next"]
    _, found = failure(ended(255, message="exec /usr/bin/python3: exec format error", at=at(90), started=NOW), {})
    assert found["reason"] == "Error", "the last command of a script that trained"


def test_script_that_ends_with_a_missing_command_may_have_lost_a_peer() -> None:
    """Without ``set -e`` a script goes on after torchrun failed, and its last command decides the exit code."""
    world = a_running_world(a_job())
    world.show(1, ended(127, at=at(100), started=NOW))
    assert world.status["state"] == "Ending", "the other pod may show the cause"
    world.fail(0, 1, kind="ValueError", message="m", at=at(101))
    assert world.status["failures"][0]["reason"] == "ValueError"


# The kubelet's times are an hour old: the clock of its node may be wrong.
@pytest.mark.parametrize(("reason", "seconds"), [("CreateContainerConfigError", 60), ("InvalidImageName", 10)])
@pytest.mark.parametrize("started", ["2026-03-01T11:00:00Z", "2026-03-01T13:00:00Z"])
def test_refused_container_fails_the_job_when_the_operator_has_seen_it_for_so_long(
    reason: str, seconds: int, started: str
) -> None:
    world = a_started_world(a_job())
    world.set_pod(0, {"phase": "Pending"})
    world.show(1, waiting(reason, started))
    assert "failures" not in world.status
    assert world.condition("Running")["reason"] == reason
    assert world.reconcile().requeue_after == pytest.approx(seconds)
    world.later(seconds)
    assert world.condition("Failed")["reason"] == reason
    (found,) = world.status["failures"]
    assert (found["nodeRank"], found["action"], found["counted"]) == (1, *FAIL)
    assert 'secret "token" not found' in found["message"] and found["hint"] and found["next"]


def test_refused_container_gets_its_whole_time_after_another_one_started() -> None:
    world = a_started_world(a_job())
    world.show(0, waiting("CreateContainerConfigError"))
    world.forward(50)
    world.set_pod(0, alive())
    world.show(1, waiting("CreateContainerConfigError"))
    assert world.reconcile().requeue_after == pytest.approx(60)
    world.show(1, alive())
    world.later(1000)
    assert world.status["state"] == "Running" and "refusedStart" not in world.status["currentAttempt"]


def test_secret_that_the_kubelet_has_not_read_yet_fails_no_job() -> None:
    world = a_started_world(a_job())
    message = "failed to sync secret cache: timed out waiting for the condition"
    world.show(1, waiting("CreateContainerConfigError", message=message))
    world.later(1000)
    assert world.status["state"] == "Pending"
    assert world.condition("Running")["reason"] == "CreateContainerConfigError", "it is shown"


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "InvalidImageName"])
def test_container_beside_the_trainer_never_fails_the_job(reason: str) -> None:
    beside = {"name": "proxy", "state": waits(reason)}
    trainer = {"name": "trainer", "state": {"running": {}}}
    for states in ({"containerStatuses": [trainer, beside]}, {"initContainerStatuses": [beside]}):
        world = a_running_world(a_job())
        world.show(1, {"phase": "Running", "containerStatuses": [trainer]} | states)
        world.later(1000)
        assert (world.status["attempt"], world.status["state"]) == (1, "Running")


def test_ordinary_sidecar_that_does_not_start_is_no_obstacle_of_a_trainer_that_starts_normally() -> None:
    world = a_started_world(a_job())
    states = [{"name": "proxy", "state": waits("InvalidImageName")}, {"name": "trainer", "state": {"waiting": {}}}]
    world.set_pod(0, {"phase": "Pending"})
    world.show(1, {"phase": "Pending", "containerStatuses": states})
    world.later(1000)
    assert world.condition("Running")["reason"] == "Starting"


def test_init_container_that_is_refused_fails_the_job() -> None:
    world = a_started_world(a_job())
    trainer = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    proxy = {"name": "proxy", "state": waits("CreateContainerConfigError")}
    world.show(1, {"phase": "Pending", "containerStatuses": [trainer], "initContainerStatuses": [proxy]})
    world.later(60)
    assert world.condition("Failed")["reason"] == "CreateContainerConfigError"


def test_commands_name_the_job_the_pod_and_the_node() -> None:
    pod = {"metadata": {"name": "p-1", "uid": "u", "labels": {}}, "spec": {"nodeName": "n-1"}}
    for row in TABLE:
        text = row.next.format(logs="l", pod="p", node="n")
        assert "{" not in text and "}" not in text, row.when
    view = pod_view(pod | {"status": {"phase": "Failed"}})
    assert judge(evidence_of(view), Context(), "").next == "kubectl describe pod p-1"


def test_log_tail_can_be_omitted() -> None:
    status = ended(1, message="password=hunter2")
    for keep, spec in ((True, {}), (False, {"logTail": "Omit"})):
        world, found = failure(status, {}, **spec)
        assert ("logTail" in found) == keep
        assert ("hunter2" in str(world.status)) == keep
        assert ("hunter2" in str([note for made in world.plans for note in made.events])) == keep


RULES = [
    {"onExitCodes": {"operator": "In", "values": [3, 4]}, "action": "Fail"},
    {"onExitCodes": {"operator": "NotIn", "values": [3, 4, 5, 137]}, "action": "RestartIgnoreLimit"},
    {"onReasons": ["OOMKilled", "Drained"], "action": "Restart"},
]


@pytest.mark.parametrize(
    ("status", "metadata", "expected"),
    [
        (ended(3), {}, FAIL),
        (ended(9), {}, FREE),
        (ended(5), {}, RESTART),
        (ended(137, reason="OOMKilled"), {}, RESTART),
        (alive(**disrupted("EvictionByEvictionAPI")), DELETING, RESTART),
        (alive(), DELETING, FREE),
    ],
)
def test_first_rule_that_matches_precedes_the_table(status: Json, metadata: Json, expected: tuple[str, bool]) -> None:
    _, found = failure(status, metadata, restartPolicy={"rules": RULES})
    assert (found["action"], found["counted"]) == expected
