"""``ddpjob why`` on a real cluster: what a kubelet, the scheduler and a quota say of a job, and what it makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from ddpjob import Client
from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e import nodes
from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import ROOT, Installation
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import until
from tests.e2e.trials import Trial, Trials, Wait
from tests.json_schema import faults
from tests.kind.cluster import Cluster
from tests.kind.images import OPERATOR_TAG, TORCH_TAG, TRAINER_TAG
from tests.soak import ALL

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]

GPU = "nvidia.com/gpu"
SCHEMA = ROOT / "docs" / "reference" / "schemas" / "explanation.json"
SHARED = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}
ONCE = {"restartPolicy": {"maxRestarts": 0, "maxTotalRestarts": 0}}
AGAIN = {"restartPolicy": {"backoff": {"initialSeconds": 1, "maxSeconds": 1}}}
RETRY = {"restartPolicy": {"backoff": {"initialSeconds": 300, "maxSeconds": 300}}}
RAISE = ["python3", "-c", "def load(n):\n    raise ValueError(f'sample {n} has 3 channels')\nload(17)"]
KILL = "sleep 9 & kill -9 $!; wait $!; exit $?"
# The runtime notices a killed process a moment later, which the container must outlive.
FILL = ["sh", "-c", "python3 -c 'x = bytearray(10**9)'; code=$?; sleep 2; exit $code"]
# A trainer that makes no step after this one. (docs/reference/trainer.md has the same with steps.)
SERVE = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
class Report(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["REPORT"].encode())
HTTPServer(("", int(os.environ["DDPJOB_PROGRESS_PORT"])), Report).serve_forever()
"""


def reports(code: int, kind: str, **more: Any) -> Json:
    """Return the fields of a job whose trainer ends with a code and writes a report (docs/reference/reports.md)."""
    report = {"schema": 2, "outcome": "failed", "code": code, "cause": "own", "kind": kind, "message": "as reported"}
    script = f'printf %s "$REPORT" > /dev/termination-log; exit {code}'
    env = [{"name": "REPORT", "value": json.dumps(report | more)}]
    return {"command": ["sh", "-c", script], "env": env, **ONCE}


def serves(phase: str, step: int | None = None) -> Json:
    """Return the fields of a job whose trainer reports the same progress as long as it runs."""
    env = [{"name": "REPORT", "value": json.dumps({"schema": 1, "phase": phase, "step": step, "ageSeconds": 0})}]
    return {"command": ["python3", "-c", SERVE], "env": env, **ONCE}


def with_pods(**spec: Any) -> Json:
    """Return the fields of a job whose pods have more fields."""
    return {"template": {"spec": {"terminationGracePeriodSeconds": 1, **spec}}}


def half_placed(name: str, **pods: Any) -> Json:
    """Return the fields of a job of two nodes, of which only one gets a Kubernetes node: all nodes have one system."""
    term = {"topologyKey": "kubernetes.io/os", "labelSelector": {"matchLabels": {names.LABEL_JOB_NAME: name}}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"numNodes": 2, **with_pods(affinity=affinity, **pods)}


def failed(stage: str, reason: str, **fields: Any) -> Json:
    return {"state": "Failed", "stage": stage, "reason": reason, "attempt": 1, **fields}


# Name of the job, fields of its spec, and fields of the verdict.
ALL_CASES: tuple[tuple[str, Json, Json], ...] = (
    (
        "affinity",
        {"template": {"spec": {"nodeSelector": {"no-such": "label"}}}},
        {"stage": "Placement", "reason": "Affinity", "nodeRank": 0},
    ),
    ("resource", {"resources": {"requests": {"cpu": "4000"}}}, {"stage": "Placement", "reason": "Resource"}),
    ("quota", {"resources": {"limits": {GPU: 1}}}, {"stage": "Quota", "reason": "QuotaExceeded"}),
    ("unbound-claim", {"checkpoint": {"mountPath": "/c", "claimName": "unbound"}}, {"stage": "Volume"}),
    ("no-claim", {"checkpoint": {"mountPath": "/c", "claimName": "no-such-claim"}}, {"stage": "Volume"}),
    ("image", {"image": "localhost:1/no/such:image"}, {"stage": "Image", "nodeRank": 0}),
    ("image-name", {"image": "Not/A/Valid/Name"}, {"stage": "Image", "reason": "InvalidImageName"}),
    ("secret", {"envFrom": [{"secretRef": {"name": "no-such-secret"}}]}, {"stage": "Configuration"}),
    ("command", {"command": ["no-such-program"], **ONCE}, {"stage": "Configuration", "reason": "StartError"}),
    (
        "exception",
        {"command": RAISE, **ONCE},
        {"stage": "Crash", "reason": "ValueError", "exception": "ValueError", "nodeRank": 0},
    ),
    ("exit", {"command": ["sh", "-c", "exit 3"], **ONCE}, {"stage": "Crash", "exitCode": 3, "nodeRank": 0}),
    (
        "memory",
        {"command": FILL, "resources": {"limits": {"memory": "64Mi"}}, **ONCE},
        {"stage": "Crash", "reason": "OOMKilled"},
    ),
    (
        "usage",
        {"command": ["ddptrain", "train", "--no-such-flag"], **ONCE},
        failed("Configuration", "UsageError", nodeRank=0, exitCode=2),
    ),
    ("ranks", reports(71, "RanksImpossible"), failed("Configuration", "RanksImpossible", exitCode=71)),
    ("mismatch", reports(78, "ConfigMismatch"), failed("Configuration", "ConfigMismatch", exitCode=78)),
    ("not-finite", reports(79, "LossNotFinite", step=7), failed("Crash", "LossNotFinite", exitCode=79, step=7)),
    ("stopped", reports(75, "Stopped", outcome="stopped"), failed("Disruption", "Stopped", exitCode=75)),
    ("superseded", reports(80, "Superseded"), failed("Disruption", "Superseded", exitCode=80)),
    ("exited-early", reports(1, "ExitedEarly", rank=0), failed("Crash", "ExitedEarly", exitCode=1, rank=0)),
    ("hang-reported", reports(76, "Hang", rank=0, where="a.py:3"), failed("Hang", "Hang", rank=0, where="a.py:3")),
    ("data", reports(66, "DataMissing"), failed("Crash", "DataMissing", exitCode=66)),
    ("rendezvous", reports(69, "RendezvousFailed"), failed("Rendezvous", "RendezvousFailed", exitCode=69)),
    ("volume", reports(73, "VolumeUnwritable"), failed("Volume", "VolumeUnwritable", exitCode=73)),
    ("peer", reports(77, "PeerLost", cause="peer"), failed("Crash", "PeerLost", exitCode=77, confidence="Low")),
    ("gpu-memory", reports(1, "GPUOutOfMemory", rank=0), failed("Crash", "GPUOutOfMemory", rank=0)),
    ("rank-killed", reports(137, "Killed", rank=0, signal=9), failed("Crash", "Killed", signal=9, rank=0)),
    ("killed", {"command": ["sh", "-c", KILL], **ONCE}, failed("Crash", "SIGKILL", signal=9)),
    (
        "deterministic",
        reports(1, "ValueError", exception="ValueError", where="a.py:3", step=5, rank=0) | AGAIN,
        failed("Crash", "DeterministicError") | {"attempt": 2, "exception": "ValueError", "step": 5},
    ),
    ("deadline", {"activeDeadlineSeconds": 1}, failed("Deadline", "DeadlineExceeded")),
    (
        "no-start",
        {"resources": {"requests": {"cpu": "4000"}}, "startupDeadlineSeconds": 5},
        failed("Deadline", "StartupDeadlineExceeded"),
    ),
    (
        "no-step",
        {**serves("start"), "startupDeadlineSeconds": 40},
        failed("Deadline", "StartupDeadlineExceeded"),
    ),
    (
        "no-progress",
        {**serves("train", 5), "progressDeadlineSeconds": 30},
        failed("Hang", "ProgressDeadlineExceeded"),
    ),
    (
        "no-end",
        {
            **{"command": ["sh", "-c", "[ $NODE_RANK = 0 ] || sleep 600"], "numNodes": 2, "completionGraceSeconds": 1},
            **ONCE,
        },
        failed("Hang", "CompletionDeadlineExceeded"),
    ),
    (
        "pod-deadline",
        {"template": {"spec": {"activeDeadlineSeconds": 5, "terminationGracePeriodSeconds": 1}}, **ONCE},
        failed("Disruption", "PodDeadlineExceeded", nodeRank=0),
    ),
    (
        "killed-by-torchrun",
        {"command": ["torchrun", "--no-python", "python3", "-c", "import os; os.kill(os.getpid(), 9)"], **ONCE},
        failed("Crash", "SIGKILL", signal=9, nodeRank=0),
    ),
    (
        "init-container",
        {**with_pods(initContainers=[{"name": "first", "image": TRAINER_TAG, "command": ["false"]}]), **ONCE},
        failed("Crash", "PodFailed", nodeRank=0),
    ),
    ("pod-security", {"podSecurity": {"profile": "Unset"}}, {"stage": "Refused", "reason": "CreateRefused"}),
    ("webhook", {}, {"stage": "Starting", "reason": "CreateFailed"}),
    (
        "claim-conflict",
        {"checkpoint": {"mountPath": "/c", "claimTemplate": {"spec": SHARED}}},
        {"stage": "Refused", "reason": "NameConflict"},
    ),
    (
        "gang",
        {"scheduling": {"schedulingPolicy": {"gang": {}}}},
        {"stage": "Placement", "reason": "GangSchedulerUnavailable"},
    ),
    (
        "gate",
        with_pods(schedulingGates=[{"name": "example.com/queue"}]),
        {"stage": "Quota", "reason": "SchedulingGated"},
    ),
    (
        "no-scheduler",
        with_pods(schedulerName="no-such-scheduler"),
        {"stage": "Placement", "reason": "NoScheduler"},
    ),
    # By its priority the older one of two partial jobs, independent of their uids.
    (
        "partial",
        half_placed("partial", priorityClassName="system-cluster-critical"),
        {"stage": "Placement", "reason": "PartiallyScheduled", "attempt": 1},
    ),
    (
        "yielded",
        {**half_placed("yielded"), "scheduling": {"partialGangSeconds": 2}},
        {"stage": "Placement", "reason": "YieldedTo"},
    ),
    (
        "peers-not-placed",
        {**half_placed("peers-not-placed"), **reports(69, "RendezvousFailed")},
        {"stage": "Placement", "reason": "PeersNotPlaced"},
    ),
    ("retry", {"command": ["sh", "-c", "exit 3"], **RETRY}, {"stage": "WaitingForRetry", "exitCode": 3}),
    ("suspended", {"suspend": True}, {"stage": "Suspended", "isAbnormal": False}),
    ("succeeded", {"command": ["true"]}, {"stage": "Succeeded", "isAbnormal": False}),
)

# Each source of what only a cluster knows of the job: scheduler, quota, claim, and what kubelet says of a container.
# tests/client has the verdicts of all stages. `make soak` applies all cases.
SAMPLE = {"affinity", "quota", "unbound-claim", "image", "secret", "command", "exception", "memory"}
CASES = [case for case in ALL_CASES if case[0] in SAMPLE or ALL]


def verdicts(trial: Trial) -> Mapping[str, tuple[Json, float]]:
    """Apply a job for each case. Return the first verdict with the expected fields, or the last, and its seconds."""
    quota = {"kind": "ResourceQuota", "metadata": {"name": "no-gpus"}, "spec": {"hard": {f"requests.{GPU}": 0}}}
    claims = [
        {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": SHARED | spec}
        for name, spec in (
            ("unbound", {"storageClassName": "none"}),
            (names.claim_name("claim-conflict"), {"accessModes": ["ReadWriteOnce"]}),
        )
    ]
    trial.kubectl.apply(*({"apiVersion": "v1", **given} for given in (quota, *claims)))
    with unanswered_webhook(trial, "webhook"):
        trial.kubectl.apply(*(shell_job(name, "sleep 600", **spec) for name, spec, _ in CASES))
        return until_explained(trial)


def until_explained(trial: Trial) -> Mapping[str, tuple[Json, float]]:
    """Ask again and again for the verdict on each job until all have the expected fields."""
    found: dict[str, tuple[Json, float]] = {}
    with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:

        def all_fit() -> bool:
            for name, _, fields in CASES:
                if name not in found or not fits(found[name][0], fields):
                    begin = time.monotonic()
                    verdict = client.explain(name).wire()
                    found[name] = (verdict, time.monotonic() - begin)
            return all(fits(found[name][0], fields) for name, _, fields in CASES)

        with suppress(AssertionError):  # the tests show which job has another verdict
            until("each job has its verdict", all_fit, seconds=240)
    return found


@contextmanager
def unanswered_webhook(trial: Trial, job: str) -> Iterator[None]:
    """Ask an admission webhook without a server for each pod of a job."""
    space = trial.kubectl.namespace
    webhook = {
        "name": "pods.e2e.ddpjob.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {"service": {"name": "no-such-service", "namespace": space}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}},
        "objectSelector": {"matchLabels": {names.LABEL_JOB_NAME: job}},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
    }
    kind = "ValidatingWebhookConfiguration"
    made = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": space}}
    trial.kubectl.apply(made | {"webhooks": [webhook]})
    try:
        yield
    finally:
        trial.kubectl("delete", kind, space)


def as_a_command(trial: Trial) -> str:
    """Return what `ddpjob why -o json` prints of a job that failed."""
    trial.kubectl.apply(shell_job(trial.name, "exit 3", **ONCE))
    trial.until("the failure", lambda job: job.get("status", {}).get("state") == "Failed")
    env = os.environ | {"KUBECONFIG": str(trial.cluster.kubeconfig)}
    words = [sys.executable, "-m", "ddpjob.cli.main", "why", trial.name, "-n", trial.kubectl.namespace, "-o", "json"]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def fits(verdict: Json, fields: Json) -> bool:
    return fields.items() <= verdict.items()


TRIALS = Trials.of(2, verdicts, soak=(as_a_command,))._replace(has_claim=False)


@pytest.mark.parametrize(("name", "fields"), [(name, fields) for name, _, fields in CASES], ids=[c[0] for c in CASES])
def test_verdict_names_stage_and_cause(outcome: Wait, name: str, fields: Json, record_property: Any) -> None:
    verdict, seconds = outcome(verdicts)[name]
    record_property("seconds", seconds)
    assert {key: verdict.get(key) for key in fields} == fields, verdict["sentence"]
    assert verdict["operator"] == ("Unknown" if verdict["state"] in ("Failed", "Succeeded") else "Alive")
    assert not verdict["isAbnormal"] or (verdict["hint"] and verdict["next"])
    assert verdict["unread"] == []


@pytest.mark.soak
def test_command_prints_the_verdict_as_its_schema_says(outcome: Wait) -> None:
    found = json.loads(outcome(as_a_command))
    assert not list(faults(found, json.loads(SCHEMA.read_text())))
    assert (found["stage"], found["exitCode"], found["job"]) == ("Crash", 3, "as-a-command")


@pytest.mark.soak
def test_taint_of_all_nodes_is_named(trial: Trial) -> None:
    """A selector would leave another reason in the scheduler's message, so all nodes have the taint."""
    workers = nodes.staying(trial.cluster)
    trial.kubectl("taint", "node", *workers, "ddpjob-e2e/why=true:NoSchedule")
    try:
        trial.kubectl.apply(shell_job(trial.name, "sleep 600"))
        assert_explained(trial, {"stage": "Placement", "reason": "Taint", "nodeRank": 0})
    finally:
        trial.kubectl("taint", "node", *workers, "ddpjob-e2e/why-")


@pytest.mark.soak
def test_pod_evicted_by_its_node_is_named(trial: Trial) -> None:
    """The node that no other test uses at this time gets too few process ids."""
    node = nodes.leaving(trial.cluster)
    place = {"tolerations": [{"key": nodes.LEAVING_TAINT, "operator": "Exists"}]}
    place |= {"nodeSelector": {"kubernetes.io/hostname": node}}
    trial.kubectl.apply(shell_job(trial.name, "sleep 600", **with_pods(**place), **ONCE))
    trial.namespace.until_run([trial.name])
    with nodes.under_pressure(trial.cluster, node):
        assert_explained(trial, failed("Disruption", "Evicted", nodeRank=0, nodeName=node))


@pytest.fixture
def wrong_launcher(cluster: Cluster, operator: Installation, trials_ended: None) -> Iterator[None]:
    """Let the operator inject the launcher from an image that does not have it."""
    cluster.load_image(TORCH_TAG)
    operator.install(OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS, launcher=TORCH_TAG)
    operator.wait_until_ready()
    yield
    operator.install(OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    operator.wait_until_ready()


@pytest.mark.soak
def test_launcher_that_is_not_injected_is_named(wrong_launcher: None, trial: Trial) -> None:
    trial.kubectl.apply(shell_job(trial.name, "true", command=["torchrun", "train.py"], launcher="Injected", **ONCE))
    assert_explained(trial, failed("Configuration", "LauncherNotInjected", nodeRank=0))


def assert_explained(trial: Trial, fields: Json) -> None:
    """Wait until the verdict on the job of a trial has these fields."""
    with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:
        with suppress(AssertionError):
            until("the verdict", lambda: fits(client.explain(trial.name).wire(), fields), seconds=120)
        verdict = client.explain(trial.name).wire()
    assert {key: verdict.get(key) for key in fields} == fields, verdict["sentence"]
