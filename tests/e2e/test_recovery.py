"""A pod, a process or the operator is killed during training; the training continues with the same losses."""

from collections.abc import Callable

import pytest

from ddpjob.api.objects import Json
from ddptrain.reporting.metrics import effective_rows, read_rows
from tests.e2e.installation import Installation
from tests.e2e.jobs import mnist_job
from tests.e2e.namespace import CLAIM, JobNamespace, claim_of
from tests.e2e.reference import ReferenceRun

pytestmark = [pytest.mark.kind, pytest.mark.timeout(400, func_only=True)]

NAME = "survivor"
# PID 1 of a container cannot be killed from inside; the ranks, children of the launcher, can.
KILL_A_RANK = """
import os, pathlib, signal
ranks = [int(p.name) for p in pathlib.Path("/proc").iterdir() if p.name.isdigit()
         and (p / "stat").read_text().rpartition(")")[2].split()[1] == "1" and int(p.name) != os.getpid()]
os.kill(max(ranks), signal.SIGKILL)
"""


def kill_a_pod(namespace: JobNamespace, pod: str) -> None:
    namespace.kubectl("delete", "pod", pod, "--grace-period=0", "--force")


def kill_a_process(namespace: JobNamespace, pod: str) -> None:
    namespace.kubectl("exec", pod, "--", "python3", "-c", KILL_A_RANK)


def uids(pods: list[Json]) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


@pytest.mark.parametrize(
    ("kill", "cause"),
    [
        # A forced deletion sets deletionTimestamp and removes the pod at once; either may be seen first.
        (kill_a_pod, {"reason": ("PodDeleted", "PodLost"), "nodeRank": 1, "counted": False}),
        (kill_a_process, {"reason": ("Killed",), "nodeRank": 1, "rank": 3, "signal": 9, "counted": True}),
    ],
)
def test_after_a_kill_a_new_attempt_resumes_with_the_same_losses(
    namespace: JobNamespace,
    operator: Installation,
    reference: ReferenceRun,
    kill: Callable[[JobNamespace, str], None],
    cause: Json,
) -> None:
    namespace.kubectl.apply(claim_of(namespace), mnist_job(NAME, "--step-delay", "0.03", claim=CLAIM))
    before = namespace.until_step(NAME, 60, checkpoint=50)
    assert before["attempt"] == 1
    victim = next(pod for pod in uids(namespace.pods()) if pod.endswith("-1-1"))

    kill(namespace, victim)

    status = namespace.until_finished(NAME)
    assert status["state"] == "Succeeded"
    assert (status["attempt"], status["restarts"], status["restartsCountedTowardsLimit"]) == (2, 1, cause["counted"])
    (failure,) = status["failures"]
    assert failure["attempt"] == 1
    assert failure["reason"] in cause["reason"]
    assert {key: failure.get(key) for key in cause} == cause | {"reason": failure["reason"]}
    assert failure["hint"]
    assert failure["next"]
    assert status["checkpoint"]["resumedFromStep"] >= 50
    rows = effective_rows(namespace.volume, "train")
    assert [row["step"] for row in rows] == list(range(1, len(reference.losses) + 1))
    assert [row["loss"] for row in rows] == pytest.approx(reference.losses, abs=1e-6)
    assert len({row["run"] for row in rows}) == 2, "both attempts trained"
    assert operator.refused_requests() == []


def test_killing_the_operator_touches_no_pod_and_status_continues(
    namespace: JobNamespace, operator: Installation
) -> None:
    namespace.kubectl.apply(claim_of(namespace), mnist_job(NAME, "--epochs", "1", "--step-delay", "0.1", claim=CLAIM))
    namespace.until_step(NAME, 20)
    before = uids(namespace.pods())

    operator.kill()

    seen = namespace.status(NAME)["progress"]["step"]
    status = namespace.until_step(NAME, seen + 10)
    assert status["state"] == "Running", "the training must outlive the operator's absence: give it more steps"
    assert uids(namespace.pods()) == before
    status = namespace.until_finished(NAME)
    assert status["state"] == "Succeeded"
    assert (status["attempt"], status["restarts"]) == (1, 0)
    assert uids(namespace.pods()) == before
    starts = [row for row in read_rows(namespace.volume) if row["event"] == "start"]
    assert len(starts) == 1, "one undivided run"
