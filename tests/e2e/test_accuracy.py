"""How often ``ddpjob why`` is right about situations of a real cluster, by labels as those of ``tests/situations``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from ddpjob import Client
from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.client.accuracy import Judged, judge, table
from tests.e2e import nodes
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import until
from tests.e2e.test_why import ALL_CASES, GPU, ONCE, SHARED, unanswered_webhook, with_pods
from tests.e2e.trials import Trial
from tests.kind.command import CommandError

pytestmark = [pytest.mark.kind, pytest.mark.soak, pytest.mark.timeout(900, func_only=True)]

# Labels of cases of test_why.py.
OF_CASES: Mapping[str, Json] = {
    "affinity": {"stage": "Placement", "reason": ["Affinity"], "next": ["nodeSelector"], "node": 0},
    "resource": {"stage": "Placement", "reason": ["Resource"], "next": ["spec.resources"], "node": 0},
    "quota": {"stage": "Quota", "reason": ["QuotaExceeded"], "next": ["quota"]},
    "unbound-claim": {"stage": "Volume", "next": ["storageclass"], "node": 0},
    "no-claim": {"stage": "Volume", "next": ["create the claim"], "node": 0},
    "image": {"stage": "Image", "reason": ["ImagePullBackOff"], "next": ["spec.image"], "node": 0},
    "image-name": {"stage": "Image", "reason": ["InvalidImageName"], "next": ["spec.image"], "node": 0},
    "secret": {"stage": "Configuration", "next": ["create it"], "node": 0},
    "command": {"stage": "Configuration", "reason": ["StartError"], "next": ["command"], "node": 0},
    "exception": {"stage": "Crash", "reason": ["ValueError"], "next": ["logs"], "node": 0},
    "exit": {"stage": "Crash", "next": ["logs"], "node": 0},
    "memory": {"stage": "Crash", "reason": ["OOMKilled"], "next": ["limits.memory"], "node": 0},
    "killed": {"stage": "Crash", "reason": ["SIGKILL"], "next": ["memory"], "never": ["sharedMemory"], "node": 0},
    "killed-by-torchrun": {"stage": "Crash", "reason": ["SIGKILL"], "next": ["memory"], "node": 0},
    "deadline": {"stage": "Deadline", "reason": ["DeadlineExceeded"], "next": ["activeDeadlineSeconds"]},
    "no-start": {"stage": "Deadline", "reason": ["StartupDeadlineExceeded"], "next": ["obstacle"]},
    "pod-deadline": {"stage": "Disruption", "reason": ["PodDeadlineExceeded"], "next": ["spec.template"], "node": 0},
    "init-container": {"stage": "Crash", "reason": ["PodFailed"], "next": ["describe pod"], "node": 0},
    "pod-security": {"stage": "Refused", "reason": ["CreateRefused"], "next": ["podSecurity"]},
    "webhook": {"stage": "Starting", "reason": ["CreateFailed"], "abnormal": "any"},
    "gate": {"stage": "Quota", "reason": ["SchedulingGated"], "next": ["kubectl"], "node": 0},
    "no-scheduler": {"stage": "Placement", "reason": ["NoScheduler"], "next": ["schedulerName"], "node": 0},
    "retry": {"stage": "WaitingForRetry", "next": ["logs"], "node": 0},
    "suspended": {"stage": "Suspended", "abnormal": False},
    "succeeded": {"stage": "Succeeded", "abnormal": False},
}


def exits(code: int) -> Json:
    return {"command": ["sh", "-c", f"exit {code}"], **ONCE}


def python(program: str) -> Json:
    return {"command": ["python3", "-c", program], **ONCE}


def apart(key: str, kind: str) -> Json:
    term = {"topologyKey": key, "labelSelector": {"matchLabels": {"no-such": "pod"}}}
    return with_pods(affinity={kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})


SPREAD = {"maxSkew": 1, "topologyKey": "no-such-label", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
OTHERS: Mapping[str, tuple[Json, Json]] = {
    "config-map": (
        {"envFrom": [{"configMapRef": {"name": "no-such-map"}}]},
        {"stage": "Configuration", "next": ["create it"], "node": 0},
    ),
    "key": (
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "there", "key": "no-such-key"}}}]},
        {"stage": "Configuration", "next": ["create it"], "node": 0},
    ),
    "secret-volume": (
        with_pods(
            containers=[{"name": "trainer", "volumeMounts": [{"name": "keys", "mountPath": "/keys"}]}],
            volumes=[{"name": "keys", "secret": {"secretName": "no-such-secret"}}],
        ),
        {"stage": ["Volume", "Configuration"], "next": ["create it"], "node": 0},
    ),
    "tag": (
        {"image": "localhost:1/ddpjob:429"},
        {"stage": "Image", "reason": ["ImagePullBackOff"], "next": ["registry|spec.image"], "never": ["limits how"]},
    ),
    "not-executable": (
        {"command": ["/etc/passwd"], **ONCE},
        {"stage": "Configuration", "reason": ["StartError"], "next": ["command"], "node": 0},
    ),
    "wrong-file": (
        {"command": ["python3", "no-such.py"], **ONCE},
        {"stage": ["Crash", "Configuration"], "next": ["command|args"], "node": 0},
    ),
    "module": (
        python("import no_such_module"),
        {"stage": "Crash", "reason": ["ModuleNotFoundError"], "next": ["install"], "node": 0},
    ),
    "abort": (
        {"command": ["sh", "-c", "python3 -c 'import os; os.abort()'; exit $?"], **ONCE},
        {"stage": "Crash", "reason": ["SIGABRT"], "next": ["logs"], "never": ["sharedMemory"], "node": 0},
    ),
    "sigterm": (
        exits(143),
        {"stage": "Crash", "reason": ["SIGTERM"], "next": ["probes"], "never": ["sharedMemory"], "node": 0},
    ),
    "sigint": (exits(130), {"stage": "Crash", "reason": ["SIGINT"], "never": ["sharedMemory"], "node": 0}),
    "sigsegv": (exits(139), {"stage": "Crash", "reason": ["SIGSEGV"], "next": ["logs"], "never": ["sharedMemory"]}),
    "sigbus": (exits(135), {"stage": "Crash", "reason": ["SIGBUS"], "next": ["sharedMemory"], "node": 0}),
    "sigill": (exits(132), {"stage": "Crash", "reason": ["SIGILL"], "next": ["image"], "node": 0}),
    "spread": (
        with_pods(topologySpreadConstraints=[SPREAD]),
        {"stage": "Placement", "reason": ["Affinity"], "next": ["topologyKey"], "never": ["maxSkew"], "node": 0},
    ),
    "beside": (
        apart("kubernetes.io/hostname", "podAffinity"),
        {"stage": "Placement", "reason": ["Affinity"], "next": ["podAffinity"], "node": 0},
    ),
    "service-account": (
        with_pods(serviceAccountName="no-such-account"),
        {"stage": "Refused", "reason": ["CreateRefused"], "next": ["ServiceAccount"]},
    ),
    "priority": (
        with_pods(priorityClassName="no-such-class"),
        {"stage": "Refused", "reason": ["CreateRefused"], "next": ["priorityClassName"]},
    ),
    "runtime-class": (
        with_pods(runtimeClassName="no-such-class"),
        {"stage": "Refused", "reason": ["CreateRefused"], "next": ["runtimeClassName"]},
    ),
    "policy": ({}, {"stage": "Refused", "reason": ["CreateRefused"], "next": ["policy"]}),
}
"""Fields of the spec of further jobs, and their labels."""


def policy(space: str) -> list[Json]:
    """Return a policy of the cluster that refuses the pods of the job ``policy``."""
    mine = {"matchLabels": {names.LABEL_JOB_NAME: "policy"}}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    spec = {
        "matchConstraints": {"objectSelector": mine, "resourceRules": [rule]},
        "validations": [{"expression": "false", "message": "pods need a cost center"}],
    }
    within = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}}}
    binding = {"policyName": space, "validationActions": ["Deny"], "matchResources": within}
    kinds = (("ValidatingAdmissionPolicy", spec), ("ValidatingAdmissionPolicyBinding", binding))
    return [
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": space}, "spec": given}
        for kind, given in kinds
    ]


def on_leaving_node(trial: Trial, name: str) -> None:
    """Start a job on the node that tests drain and stop, and wait until its pod runs."""
    place: Json = {
        "nodeSelector": {"kubernetes.io/hostname": nodes.leaving(trial.cluster)},
        "tolerations": [{"key": nodes.LEAVING_TAINT, "operator": "Exists"}],
    }
    trial.kubectl.apply(shell_job(name, "sleep 600", **with_pods(**place)))
    selector = f"--selector={names.LABEL_JOB_NAME}={name}"

    def runs() -> bool:
        found = trial.kubectl.objects("pods", selector)
        return any(pod["status"].get("phase") == "Running" for pod in found)

    until(f"the pod of {name} runs", runs, seconds=240)


def judged_when_right(trial: Trial, labels: Mapping[str, Json], seconds: float) -> list[Judged]:
    """Ask about each job until the answer is that of its label, and return the last answers."""
    found: dict[str, Judged] = {}
    with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:

        def all_right() -> bool:
            for name, label in labels.items():
                before = found.get(name)
                if before is None or not (before.stage and before.next and before.culprit is not False):
                    found[name] = judge({"name": name, "label": label}, client.explain(name))
            return all(each.stage and each.next and each.culprit is not False for each in found.values())

        with suppress(AssertionError):  # what is wrong until then is counted
            until("each answer is right", all_right, seconds=seconds)
    return [*found.values()]


def test_why_is_right_about_situations_of_a_real_cluster(trial: Trial, record_property: Any) -> None:
    """A wrong answer is printed beside its label, with the state of the cluster."""
    space, begin = trial.kubectl.namespace, time.monotonic()
    specs = {name: spec for name, spec, _ in ALL_CASES if name in OF_CASES}
    specs |= {name: spec for name, (spec, _) in OTHERS.items()}
    labels = {**OF_CASES, **{name: label for name, (_, label) in OTHERS.items()}}
    quota = {"kind": "ResourceQuota", "metadata": {"name": "no-gpus"}, "spec": {"hard": {f"requests.{GPU}": 0}}}
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "unbound"}}
    secret = {"kind": "Secret", "metadata": {"name": "there"}, "stringData": {"key": "value"}}
    given = (quota, claim | {"spec": SHARED | {"storageClassName": "none"}}, secret)
    trial.kubectl.apply(*({"apiVersion": "v1", **each} for each in given))
    leaving = nodes.leaving(trial.cluster)
    try:
        trial.kubectl.apply(*policy(space))
        with unanswered_webhook(trial, "webhook"):
            trial.kubectl.apply(*(shell_job(name, "sleep 600", **spec) for name, spec in specs.items()))
            found = judged_when_right(trial, labels, seconds=300)
        on_leaving_node(trial, "drained")
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
        trial.kubectl("drain", leaving, *flags, timeout=90)
        drained = {"stage": ["Placement", "WaitingForRetry"], "next": ["uncordon"], "never": ["spec.resources"]}
        found += judged_when_right(trial, {"drained": drained}, seconds=60)
        trial.kubectl("uncordon", leaving)
        on_leaving_node(trial, "not-ready")
        with nodes.without_kubelet(trial.cluster, leaving):
            not_ready = {
                "stage": ["Running", "Disruption"],
                "reason": ["NodeNotResponding", "NodeLost"],
                "next": ["node"],
            }
            found += judged_when_right(trial, {"not-ready": not_ready}, seconds=60)
    finally:
        for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
            with suppress(CommandError):
                trial.kubectl("delete", kind, space)
        with suppress(CommandError):
            trial.kubectl("uncordon", leaving)
    figures = table({"real cluster": found})
    record_property("figures", figures)
    print(f"{figures}\n{time.monotonic() - begin:.0f} s")
    wrong = [each for each in found if not (each.stage and each.next and each.culprit is not False)]
    assert len(found) >= 40 and not any(each.is_confidently_wrong for each in found), "\n".join(map(str, wrong))
    assert len(wrong) <= 0.03 * len(found), "\n".join(map(str, wrong))
