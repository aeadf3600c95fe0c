"""Pods with an ordinary container beside the trainer that never ends by itself, as a service mesh injects one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e.jobs import CONTAINER_SECURITY, shell_job
from tests.e2e.kubectl import until
from tests.e2e.trials import Trial, Trials, Wait
from tests.kind.images import TRAINER_TAG

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

SIDECAR = {
    "name": "istio-proxy",
    "image": TRAINER_TAG,
    "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"],
    "securityContext": CONTAINER_SECURITY,
}
FAIL_ONCE = """
[ $DDPJOB_ATTEMPT$NODE_RANK != 11 ] || { echo "bad batch"; exit 3; }
[ $DDPJOB_ATTEMPT != 1 ] || exec sleep 600
echo trained
"""


@dataclass(frozen=True)
class Finished:
    """A finished job, its pods and the logs of their trainers when all sidecars had stopped."""

    job: Json
    pods: dict[str, Json]
    logs: dict[str, str]
    advice: str
    """What the command printed that ``next`` of the failure names, if there is a failure."""

    def attempt(self, number: int) -> list[str]:
        """Return the names of the pods of one attempt, by node_rank."""
        return sorted(n for n, p in self.pods.items() if p["metadata"]["labels"][names.LABEL_ATTEMPT] == str(number))


def beside_a_sidecar(trial: Trial) -> dict[str, Finished]:
    """Run a job that succeeds, one whose node 1 fails once, and one that keeps no pods."""
    template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [SIDECAR]}}
    jobs = [
        shell_job("succeeds", "echo trained", numNodes=2, template=template),
        shell_job("fails-once", FAIL_ONCE, numNodes=2, template=template),
        shell_job("keeps-none", "echo trained", podRetention="None", template=template),
    ]
    trial.kubectl.apply(*jobs)
    return {name: ended(trial, name) for name in (job["metadata"]["name"] for job in jobs)}


TRIALS = Trials.of(1, beside_a_sidecar)


def ended(trial: Trial, name: str) -> Finished:
    trial.namespace.until_finished(name)
    selector = f"--selector={names.LABEL_JOB_NAME}={name}"

    def look() -> tuple[list[Json]] | None:
        pods = trial.kubectl.objects("pods", selector)
        return (pods,) if all(len(ends(pod)) == 2 for pod in pods) else None

    pods = until(f"all sidecars of {name} have stopped", look, seconds=60)[0]
    found = {pod["metadata"]["name"]: pod for pod in pods}
    logs = {pod: trial.kubectl("logs", pod, f"--container={names.TRAINER_CONTAINER}") for pod in found}
    job = trial.namespace.job(name)
    advice = [trial.kubectl(*shlex.split(failure["next"])[1:]) for failure in job["status"].get("failures", ())]
    return Finished(job, found, logs, "".join(advice))


def ends(pod: Json) -> dict[str, Json]:
    """Return how the containers ended that have ended."""
    states = {status["name"]: status["state"] for status in pod["status"].get("containerStatuses", ())}
    return {name: state["terminated"] for name, state in states.items() if "terminated" in state}


@pytest.fixture
def jobs(outcome: Wait) -> dict[str, Finished]:
    ended: dict[str, Finished] = outcome(beside_a_sidecar)
    return ended


def test_pods_ask_for_no_injected_sidecar_and_end_with_their_trainer_beside_one(jobs: dict[str, Finished]) -> None:
    done = jobs["succeeds"]
    assert (done.job["status"]["state"], done.job["status"]["restarts"]) == ("Succeeded", 0)
    assert len(done.pods) == 2
    for name, pod in done.pods.items():
        asked = pod["metadata"]["labels"] | pod["metadata"]["annotations"]
        assert (asked["sidecar.istio.io/inject"], asked["linkerd.io/inject"]) == ("false", "disabled")
        assert {container["name"] for container in pod["spec"]["containers"]} == {"trainer", "istio-proxy"}
        assert ends(pod)["trainer"]["exitCode"] == 0
        assert pod["status"]["reason"] == "DeadlineExceeded", "the kubelet stops the sidecar of a pod that is kept"
        assert done.logs[name] == "trained\n"


def test_failed_pod_beside_a_sidecar_keeps_its_log_and_the_next_attempt_succeeds(
    jobs: dict[str, Finished],
) -> None:
    done = jobs["fails-once"]
    status = done.job["status"]
    assert (status["state"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 1)
    (failure,) = status["failures"]
    assert (failure["nodeRank"], failure["exitCode"], failure["logTail"].strip()) == (1, 3, "bad batch")
    assert done.attempt(1) == [failure["pod"]], "only the failed pod of the former attempt is kept"
    assert failure["next"].startswith(f"kubectl logs {failure['pod']}")
    assert done.advice == done.logs[failure["pod"]] == "bad batch\n"
    assert [done.logs[pod] for pod in done.attempt(2)] == ["trained\n"] * 2


def test_job_that_keeps_no_pods_has_none_although_their_sidecars_ran(jobs: dict[str, Finished]) -> None:
    done = jobs["keeps-none"]
    assert (done.job["status"]["state"], done.pods) == ("Succeeded", {})
