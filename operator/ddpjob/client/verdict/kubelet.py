"""The verdict on a pod that its kubelet does not start: its image, configuration, volumes or network."""

import re
from collections.abc import Sequence

from ddpjob.api.names import LAUNCHER
from ddpjob.api.objects import Json, element, event_time
from ddpjob.api.pod_view import PodView
from ddpjob.client.verdict.explanation import Evidence, Explanation, Stage
from ddpjob.client.verdict.facts import Case, of_event
from ddpjob.client.verdict.images import image_advice
from ddpjob.engine.advice import (
    BY_ADMINISTRATOR,
    DESCRIBE_NODE,
    DISK_FULL,
    NO_OBJECT,
    OF_CONTAINERS,
    SYNCED_LATER,
    TOO_LITTLE_MEMORY,
    Row,
    advice,
)
from ddpjob.engine.evidence import FAILED_TO_SYNC, NO_IMAGE, NO_START

_STARTED = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started"})
"""Events of a pod that come after its volumes are mounted and its network is set up, or after it got its node."""
_NAMED_VOLUME = re.compile(r'volume "([^"]+)"')
_OF_DEVICES: Sequence[Row] = (
    Row(
        "",
        "the driver of a device of the pod does not work on this Kubernetes node",
        f"{DESCRIBE_NODE}, and to run kubectl get resourceclaims -n {{namespace}}",
    ),
)
_OF_VOLUMES: Sequence[Row] = (
    SYNCED_LATER,
    NO_OBJECT,
    Row(
        r"Multi-Attach|IN_USE_BY_ANOTHER",
        "another Kubernetes node uses the volume, and only one can at a time",
        "use a claim with the access mode ReadWriteMany, or end the other pod that uses the volume",
    ),
    Row(
        r"^VolumePermissionChangeInProgress",
        "the kubelet changes the owner of each file of the volume",
        "wait; set fsGroupChangePolicy: OnRootMismatch in podSecurity or in securityContext of spec.template",
    ),
    Row(
        r"access denied by server|PermissionDenied|Error 403|not authorized",
        "the storage refuses this Kubernetes node, or the service account of the pods",
        "give them the right: the export of the server, or the permission of the account",
    ),
    Row(
        r"helper program|registered CSI drivers|does not contain driver|executable file",
        "the Kubernetes node lacks the driver or the program that mounts the volume",
        f"the administrator of the nodes installs it; {DESCRIBE_NODE}",
    ),
    DISK_FULL,
    Row(
        r"hostPath type check failed",
        "the directory of a hostPath volume is not on this Kubernetes node",
        "correct the volume in spec.template, or use nodes that have the directory",
    ),
    Row(
        r"failed to fetch token",
        "the kubelet gets no token of the pods' service account",
        "create the ServiceAccount that the message names, or correct serviceAccountName in spec.template",
    ),
    Row(
        "",
        "the volume cannot be mounted on this Kubernetes node",
        "look at the volume that the message names, and at its claim if it has one: kubectl describe pvc -n "
        "{namespace}; " + DESCRIBE_NODE,
    ),
)
_OF_SANDBOXES: Sequence[Row] = (
    Row(
        r"no runtime for|RuntimeHandler",
        "the Kubernetes node does not have the runtime that runtimeClassName names",
        f"correct runtimeClassName in spec.template, or use other nodes; {DESCRIBE_NODE}",
    ),
    TOO_LITTLE_MEMORY,
    DISK_FULL,
    Row(
        r"get sandbox image",
        "the Kubernetes node cannot pull the image that its container runtime needs for each pod",
        f"the administrator of the nodes looks at their registry; {DESCRIBE_NODE}",
    ),
    Row(
        r"network-attachment-definition",
        "a network that the pods ask for in the annotation k8s.v1.cni.cncf.io/networks cannot be read",
        "correct the annotation in spec.template, or create the NetworkAttachmentDefinition in namespace {namespace}",
    ),
    Row(
        r"(?i)hostport|port is already allocated",
        "another pod of the Kubernetes node uses a port that the pod asks for",
        "remove hostPort from spec.template, or use other nodes",
    ),
    Row(
        r"(?i)\bcni\b|plugin type=|network ?plugin|network for (?:pod|sandbox)|pod network|network is not ready",
        "the network plugin of the Kubernetes node does not work, or has no addresses left",
        f"{BY_ADMINISTRATOR}kubectl get pods -n kube-system -o wide, which shows the network plugin of node {{node}}",
    ),
    Row(
        "",
        "the container runtime of the Kubernetes node cannot make the sandbox of the pod",
        f"{DESCRIBE_NODE}; the kubelet tries again",
    ),
)
OF_KUBELETS: Sequence[tuple[str, Stage, Sequence[Row]]] = (
    (
        r"Failed(?:Mount|AttachVolume|MapVolume)|VolumeResizeFailed|VolumePermissionChangeInProgress",
        *("Volume", _OF_VOLUMES),
    ),
    (r"FailedCreatePod(?:SandBox|Container)|NetworkNotReady", "Configuration", _OF_SANDBOXES),
    (r"FailedPrepareDynamicResources", "Configuration", _OF_DEVICES),
    ("|".join(sorted(NO_START)), "Configuration", OF_CONTAINERS),
)
"""Stage and advice by the reason of an event or of a container that waits. The text only chooses among these rows."""


def not_started(case: Case, pod: PodView) -> Explanation:
    """Explain a container that the kubelet does not start."""
    reason, message = pod.waiting or ("", "")
    container = pod.waiting_init or "trainer"
    statuses = "initContainerStatuses" if pod.waiting_init else "containerStatuses"
    field = f"status.{statuses}[{container}].state.waiting"
    image = _image(case.raw[pod.name], container)
    quoted = [Evidence(kind="Pod", name=pod.name, field=field, value=f"{reason}: {message}")]
    stage: Stage = "Image" if reason in NO_IMAGE else "Configuration"
    if stage == "Image":
        path = f"spec.{'initContainers' if pod.waiting_init else 'containers'}[{container}].image"
        quoted.append(Evidence(kind="Pod", name=pod.name, field=path, value=image))
        hint, todo, is_named = image_advice(message, image, pod.node_name)
        texts = [of_event(e) for e in case.events_of("Pod", pod.name) if e.get("reason") == "Failed"]
        if not is_named and (failed := [text for text in texts if image in text.value]):
            hint, todo, _ = image_advice(failed[-1].value, image, pod.node_name)
            quoted.append(failed[-1])  # a message "Back-off pulling image" alone says nothing
        what = f"the image {image} of {pod.where} cannot be pulled"
        if pod.waiting_init == LAUNCHER:
            hint, todo = f"this is the launcher image of the operator; {hint}", "ask the administrator of the operator"
    else:
        stage, known = _of_kubelet(case, pod, reason, message)
        hint, todo = known or ("", "")
        what = f"the kubelet does not start {pod.where}"
    is_known = reason in NO_IMAGE | NO_START and not message.startswith(FAILED_TO_SYNC)
    return case.verdict(
        stage,
        reason,
        f"{case.name} waits: {what}: {pod.waiting_text}",
        quoted,
        advice=(hint, _with_pod(case, pod, todo)),
        confidence="High" if is_known else "Medium",
        **case.place_of(pod),
    )


def _of_kubelet(case: Case, pod: PodView, reason: str, message: str) -> tuple[Stage, tuple[str, str] | None]:
    """Return the stage by the kubelet's reason, and hint and next by its text; None if the reason is not known."""
    for pattern, stage, rows in OF_KUBELETS:
        if re.fullmatch(pattern, reason):
            node = str(pod.node_name)
            text = f"{reason}: {message}"
            return stage, advice(text, rows, namespace=case.namespace, pod=pod.name, node=node)
    return "Configuration", None


def _with_pod(case: Case, pod: PodView, todo: str) -> str:
    return "; ".join(filter(None, (todo, f"kubectl describe pod {pod.name} -n {case.namespace}")))


def _image(pod: Json, container: str) -> str:
    spec = pod.get("spec") or {}
    found = element([*(spec.get("containers") or ()), *(spec.get("initContainers") or ())], "name", container)
    return str(found.get("image") or "")


def not_prepared(case: Case, pods: list[PodView], reason: str, message: str) -> Explanation:
    """Explain a pod whose volumes, network or image are not ready, from the events of its kubelet."""
    with_node = [pod for pod in pods if pod.node_name]
    found = [(_warnings(seen), seen, pod) for pod in with_node if (seen := case.events_of("Pod", pod.name))]
    # A pod with a warning first: the others wait for it.
    warnings, events, pod = min(found, key=lambda each: not each[0], default=([], [], with_node[0]))
    place = case.place_of(pod)
    if warnings:
        last, why, text = warnings[-1], str(warnings[-1].get("reason")), str(warnings[-1].get("message"))
        stage, known = _of_kubelet(case, pod, why, text)
        hint, todo = known or ("", "")
        return case.verdict(
            stage,
            why,
            f"{case.name} waits: {pod.where} does not start: {text}",
            [of_event(last), *(case.of_claims() if stage == "Volume" else ())],
            advice=(hint, _with_pod(case, pod, todo)),
            confidence="High" if known else "Medium",
            **place,
        )
    place["next"] = _with_pod(case, pod, "")
    if events and events[-1].get("reason") == "Pulling":
        sentence = f"{case.name} waits: {pod.where} pulls its image: {events[-1].get('message')}"
        return case.verdict("Image", "Pulling", sentence, [of_event(events[-1])], is_abnormal=False, **place)
    what = Evidence(kind="Pod", name=pod.name, field="status.phase", value="Pending")
    return case.verdict(
        "Starting", reason, f"{case.name} waits: {message}", [what], needs=["events"], confidence="Medium", **place
    )


def _warnings(events: list[Json]) -> list[Json]:
    """Return the warnings of a pod with a Kubernetes node that no later event of the pod disproves.

    In the first seconds a kubelet often warns of a volume or a network which it then has.
    """
    started = max((event_time(event) for event in events if event.get("reason") in _STARTED), default=None)
    attached = {
        name[1]: event_time(event)
        for event in events
        if event.get("reason") == "SuccessfulAttachVolume" and (name := _NAMED_VOLUME.search(str(event.get("message"))))
    }

    def holds(event: Json) -> bool:
        name = _NAMED_VOLUME.search(str(event.get("message")))
        until = attached.get(name[1]) if name is not None and event.get("reason") == "FailedAttachVolume" else None
        return all(end is None or event_time(event) > end for end in (started, until))

    return [event for event in events if event.get("type") == "Warning" and holds(event)]
