"""The pod that reads the volume of a job of a cluster: what it is, from the first use to the end, and why it is late.

It has the image of the job, so that it can be pulled and needs no other image, and only ``python3`` of it. It has no
label by which the operator, the Service or the NetworkPolicy of a job would take it for a pod of the job.
"""

import inspect
import secrets
import time
from collections.abc import Generator, Iterable, Mapping

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.objects import Json, element
from ddpjob.api.pod_view import PodView, pod_view
from ddpjob.client.connection import ApiConnection, is_absent, path_of
from ddpjob.client.job import DDPJob
from ddpjob.client.volume import reader
from ddpjob.client.volume.contents import CutError, OnProgress, PullProgress, Volume, ignore, no_volume
from ddpjob.client.volume.pod_exec import output_of
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.evidence import FAILED_TO_SYNC, NO_IMAGE, NO_START
from ddpjob.engine.template import render
from ddpjob.errors import DDPJobError, InvalidJobError, JobExistsError, NotAllowedError, UnavailableError

LABEL_READER_OF = f"{names.GROUP}/reader-of"
"""Label of reader pods; its value is the uid of the job."""
SOURCE_ENV = "DDPJOB_READER"
SECONDS = 3600
"""After this time the pod ends, also if it is not deleted; a transfer that takes longer goes on in another one."""
START_SECONDS = 300.0
"""How long the pod may take to start: the image may have to be pulled."""
_PAUSE = 0.5
_STARTING = "the pod that reads the volume starts"
_USER = 1000
_OF_THE_JOB = ("imagePullSecrets", "serviceAccountName", "nodeSelector", "tolerations")
_SECURITY_OF_THE_JOB = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "seLinuxOptions")
_WITHOUT_SIDECAR = ("sidecar.istio.io/inject", "linkerd.io/inject")
# The text is in the environment, because a command is a part of a URL, which proxies limit to 8 KiB.
_PROGRAM = ("python3", "-I", "-S", "-c", f"import os; exec(os.environ['{SOURCE_ENV}'])")


class PodReader:
    """Runs ``reader`` in a pod. Use as a context manager, which returns the volume and deletes the pod.

    start_seconds: limit for the start of the pod.

    Raises:
        InvalidJobError: the job has no volume.
    """

    def __init__(self, connection: ApiConnection, job: DDPJob, on_progress: OnProgress | None) -> None:
        try:
            self._job = Job.of(job.manifest)
        except ValidationError as error:
            raise InvalidJobError(f"the DDPJob {job.name} is wrong", str(error), f"ddpjob why {job.name}") from error
        if self._job.spec.checkpoint is None:
            raise no_volume(job.name)
        self._directory = self._job.spec.checkpoint.mount_path
        self._connection, self._on_progress = connection, on_progress or ignore
        self._pod = ""
        self.start_seconds = START_SECONDS

    def __enter__(self) -> Volume:
        job = self._job
        return Volume(job.name, job.namespace, job.claim, self._directory, self.output, self._on_progress)

    def __exit__(self, *_: object) -> None:
        self._delete()

    def output(self, name: str, *arguments: str) -> Generator[bytes, None, None]:
        """Yield the output of ``list`` or ``send`` on the volume. Raises ``CutError``."""
        self._until_ready()
        words = command(name, self._directory, *arguments)
        yield from output_of(self._connection, self._job.namespace, self._pod, names.TRAINER_CONTAINER, words)

    def _until_ready(self) -> None:
        """Return when the pod runs; make another one if it has ended."""
        pod = self._read()
        if pod is None or pod.ended or pod.deleting:
            self._delete()
            self._create()
        begin = time.monotonic()
        while (pod := self._read()) is not None:
            if pod.state == "running" and not pod.deleting:
                return
            if (error := hopeless(pod, self._job.name)) is not None:
                raise error
            if pod.ended or pod.deleting:
                raise CutError(f"the pod {self._pod} has ended")
            why = pod.unschedulable or ": ".join(filter(None, pod.waiting or ()))  # of the scheduler or the kubelet
            if time.monotonic() - begin > self.start_seconds:
                raise self._late(why)
            self._on_progress(PullProgress(waiting=f"{_STARTING}: {why}" if why else _STARTING))
            time.sleep(_PAUSE)
        raise CutError(f"the pod {self._pod} was deleted")

    def _create(self) -> None:
        job, connection = self._job, self._connection
        connection.request("GET", path_of(names.DDPJOBS, job.namespace, job.name))  # it may have been deleted
        claim = connection.found(names.CLAIMS, job.namespace, job.claim) or {"status": {"phase": "absent"}}
        phase = (claim.get("status") or {}).get("phase", "Pending")
        if phase != "Bound":  # a pod would bind it where the job may not be able to run
            raise UnavailableError(
                f"the claim {job.claim} of {job.name} is {phase}, so it holds nothing",
                "it was deleted with its checkpoints, no pod of the job has mounted it yet, or nothing provisions its "
                "storage class",
                f"ddpjob why {job.name}; kubectl get pvc -n {job.namespace}",
            )
        pods = path_of(names.PODS, job.namespace)
        running = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
        node = node_for(claim, connection.request("GET", pods, running)["items"])
        self._on_progress(PullProgress(waiting=_STARTING))
        # The name is known before the request, so that the pod can be deleted also if the answer never comes.
        self._pod = f"{job.service}-reader-{secrets.token_hex(3)}"
        try:
            connection.request("POST", pods, body=reader_pod(job, self._pod, node))
        except JobExistsError:
            pass  # the answer to the first try was lost
        except NotAllowedError:
            self._pod = ""  # there is none to delete
            raise

    def _late(self, why: str) -> UnavailableError:
        why, seconds = why or "no scheduler answers", self.start_seconds
        return UnavailableError(
            f"the pod that reads the volume does not run after {seconds:g} s: {why}",
            "it needs 50m of CPU, 64Mi of memory, a node that can mount the claim, and the image of the job",
            f"kubectl get events -n {self._job.namespace} --field-selector involvedObject.name={self._pod}; "
            "then run the same command again",
        )

    def _read(self) -> PodView | None:
        """Return the pod, None if there is none. Raises ``CutError`` while the API server does not answer."""
        if not self._pod:
            return None
        try:
            found = self._connection.found(names.PODS, self._job.namespace, self._pod)
        except UnavailableError as error:
            raise CutError(error.error) from error
        return None if found is None else pod_view(found)

    def _delete(self) -> None:
        if not self._pod:
            return
        name, self._pod = self._pod, ""
        try:
            self._connection.request("DELETE", path_of(names.PODS, self._job.namespace, name))
        except DDPJobError as error:
            if not is_absent(error, names.PODS):
                self._on_progress(PullProgress(waiting=f"the pod {name} could not be deleted, and ends by itself"))


def command(*arguments: str) -> list[str]:
    """Return the command that runs ``reader`` in the pod."""
    return [*_PROGRAM, *arguments]


def reader_pod(job: Job, name: str, node: str | None) -> Json:
    """Return the pod. node: on which it must run, because only there the claim can be mounted; None for any."""
    model = desired_pods(job, 1, EngineSettings()).first
    given, trainer = model["spec"], model["spec"]["containers"][0]
    pod = render(
        "reader.yaml.j2",
        job=job,
        name=name,
        api_version=names.API_VERSION,
        seconds=SECONDS,
        container=names.TRAINER_CONTAINER,
        image=trainer["image"],
        command=command("wait"),
        source_env=SOURCE_ENV,
        source=inspect.getsource(reader),
        mount=element(trainer["volumeMounts"], "name", names.CHECKPOINT_VOLUME) | {"readOnly": True},
        volume=element(given["volumes"], "name", names.CHECKPOINT_VOLUME),
    )
    for kind in ("annotations", "labels"):
        found: Mapping[str, str] = model["metadata"].get(kind) or {}
        pod["metadata"][kind] = {key: found[key] for key in _WITHOUT_SIDECAR if key in found}
    pod["metadata"]["labels"] |= {LABEL_READER_OF: job.uid, names.LABEL_MANAGED_BY: "ddpjob"}
    pod["spec"] |= {key: given[key] for key in _OF_THE_JOB if key in given}
    pod["spec"]["containers"][0] |= {key: trainer[key] for key in ("imagePullPolicy",) if key in trainer}
    # What Pod Security ``restricted`` requires, with the ids of the job, but not as root.
    ids = (given.get("securityContext") or {}) | (trainer.get("securityContext") or {})
    pod["spec"]["securityContext"] |= {key: ids[key] for key in _SECURITY_OF_THE_JOB if ids.get(key) is not None}
    pod["spec"]["securityContext"]["runAsUser"] = ids.get("runAsUser") or _USER
    if ids.get("fsGroup") is not None:  # else each start changes the owner of every file
        pod["spec"]["securityContext"]["fsGroupChangePolicy"] = "OnRootMismatch"
    # The affinity to other pods is about the pods of the job.
    of_nodes = (given.get("affinity") or {}).get("nodeAffinity")
    if node is not None:
        # With the taints that the scheduler heeds, unlike nodeName; the job's own pod fits the rest already.
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        of_nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    if of_nodes:
        pod["spec"]["affinity"] = {"nodeAffinity": of_nodes}
    return pod


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
