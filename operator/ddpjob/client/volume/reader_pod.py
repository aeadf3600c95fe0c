"""The pod that reads a volume: how it is made, and why it does not run. Pure.

It has the image of the job, so that it can be pulled and needs no other image, and only ``python3`` of it. It has no
label by which the operator, the Service or the NetworkPolicy of a job would take it for a pod of the job.
"""

import inspect
from collections.abc import Iterable, Mapping

from ddpjob.api import names
from ddpjob.api.objects import Json, element
from ddpjob.api.pod_view import PodView
from ddpjob.client.volume import reader
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.evidence import FAILED_TO_SYNC, NO_IMAGE, NO_START
from ddpjob.errors import DDPJobError, UnavailableError

LABEL_READER_OF = f"{names.GROUP}/reader-of"
"""Label of reader pods; its value is the uid of the job."""
SOURCE_ENV = "DDPJOB_READER"
SECONDS = 3600
"""After this time the pod ends, also if it is not deleted; a transfer that takes longer goes on in another one."""
_USER = 1000
_RESOURCES = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}
_OF_THE_JOB = ("imagePullSecrets", "serviceAccountName", "nodeSelector", "tolerations")
_SECURITY_OF_THE_JOB = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "seLinuxOptions")
_WITHOUT_SIDECAR = ("sidecar.istio.io/inject", "linkerd.io/inject")
# The text is in the environment, because a command is a part of a URL, which proxies limit to 8 KiB.
_PROGRAM = ("python3", "-I", "-S", "-c", f"import os; exec(os.environ['{SOURCE_ENV}'])")


def command(*arguments: str) -> list[str]:
    """Return the command that runs ``reader`` in the pod."""
    return [*_PROGRAM, *arguments]


def reader_pod(job: Job, name: str, node: str | None) -> Json:
    """Return the pod. node: on which it must run, because only there the claim can be mounted; None for any."""
    model = desired_pods(job, 1, EngineSettings()).first
    trainer = model["spec"]["containers"][0]
    mount = element(trainer["volumeMounts"], "name", names.CHECKPOINT_VOLUME)
    container = {
        "name": names.TRAINER_CONTAINER,  # of which a ``PodView`` is
        "image": trainer["image"],
        "command": command("wait"),
        "env": [
            {"name": SOURCE_ENV, "value": inspect.getsource(reader)},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},  # many images ask for all
        ],
        "resources": _RESOURCES,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [mount | {"readOnly": True}],
    }
    container |= {key: trainer[key] for key in ("imagePullPolicy",) if key in trainer}
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": SECONDS,
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _security(model["spec"], trainer),
        "containers": [container],
        # Not read-only here: some drivers cannot mount a volume twice on one node in different ways.
        "volumes": [element(model["spec"]["volumes"], "name", names.CHECKPOINT_VOLUME)],
    }
    spec |= {key: model["spec"][key] for key in _OF_THE_JOB if key in model["spec"]}
    if affinity := _affinity(model["spec"].get("affinity") or {}, node):
        spec["affinity"] = affinity
    # With it the pod is deleted with the job, which is not the controller of the pod.
    owner = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "name": job.name, "uid": job.uid}
    metadata: Json = {"name": name, "namespace": job.namespace, "ownerReferences": [owner]}
    for kind in ("annotations", "labels"):
        given: Mapping[str, str] = model["metadata"].get(kind) or {}
        metadata[kind] = {key: given[key] for key in _WITHOUT_SIDECAR if key in given}
    metadata["labels"] |= {LABEL_READER_OF: job.uid, names.LABEL_MANAGED_BY: "ddpjob"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _security(spec: Json, trainer: Json) -> Json:
    """Return what Pod Security ``restricted`` requires, with the ids of the job, but not as root."""
    given = (spec.get("securityContext") or {}) | (trainer.get("securityContext") or {})
    kept = {key: given[key] for key in _SECURITY_OF_THE_JOB if given.get(key) is not None}
    if "fsGroup" in kept:
        kept["fsGroupChangePolicy"] = "OnRootMismatch"  # else each start changes the owner of every file
    user = given.get("runAsUser") or _USER
    return kept | {"runAsUser": user, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def _affinity(given: Json, node: str | None) -> Json:
    """Return the affinity to nodes alone: that to other pods is about the pods of the job."""
    of_nodes = given.get("nodeAffinity") or {}
    if node is not None:
        # With the taints that the scheduler heeds, unlike nodeName; the job's own pod fits the rest already.
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        of_nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"nodeAffinity": of_nodes} if of_nodes else {}


def node_for(claim: Json, pods: Iterable[Json]) -> str | None:
    """Return the node on which the claim can be mounted; None if on any. pods: of its namespace.

    Raises:
        UnavailableError: one pod alone may mount it, and runs.
    """
    name, modes = claim["metadata"]["name"], set((claim.get("spec") or {}).get("accessModes") or ())
    if modes & {"ReadWriteMany", "ReadOnlyMany"}:
        return None
    held = {
        pod["metadata"]["name"]: str(pod["spec"]["nodeName"])
        for pod in pods
        if pod["spec"].get("nodeName")
        and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        and any(
            (volume.get("persistentVolumeClaim") or {}).get("claimName") == name
            for volume in pod["spec"].get("volumes") or ()
        )
    }
    if held and "ReadWriteOncePod" in modes:
        raise UnavailableError(
            f"the claim {name} is in use by the pod {min(held)}",
            "its access mode ReadWriteOncePod allows one pod at a time",
            "wait until the job has finished, or ddpjob suspend it",
        )
    return min(held.values(), default=None)


def obstacle(pod: PodView) -> str:
    """Return what the pod waits for, in the words of the scheduler or the kubelet; empty if they say nothing."""
    return pod.unschedulable or ": ".join(filter(None, pod.waiting or ()))


def hopeless(pod: PodView, job: str) -> DDPJobError | None:
    """Return why the pod will not start; None if it may."""
    reason, message = pod.waiting or (pod.reason, pod.log or pod.message)
    is_wrong = reason in NO_IMAGE or (reason in NO_START and not message.startswith(FAILED_TO_SYNC))
    if not is_wrong and pod.state != "failed":
        return None
    return UnavailableError(
        f"the pod that reads the volume does not start: {': '.join(filter(None, (reason, message)))}",
        "it runs python3 of the job's image, with its pull secrets, as a user that is not root, with a root file "
        "system that is read-only",
        f"kubectl describe ddp {job}; correct the image or its pull secret, or mount the claim in a pod with another "
        "image, and copy with kubectl cp",
    )


def late(pod: PodView, namespace: str, seconds: float) -> UnavailableError:
    """Return the error about a pod that does not run in time."""
    return UnavailableError(
        f"the pod that reads the volume does not run after {seconds:g} s: {obstacle(pod) or 'no scheduler answers'}",
        "it needs 50m of CPU, 64Mi of memory, a node that can mount the claim, and the image of the job",
        f"kubectl get events -n {namespace} --field-selector involvedObject.name={pod.name}; "
        "then run the same command again",
    )
