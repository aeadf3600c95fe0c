"""What to do about jobs that no queue admits, pods that the API server refuses, and pods that a kubelet does not start.

By the text: the first row applies. Texts: Kueue 0.14, kube-apiserver and kubelet 1.29 to 1.36, containerd 2.1, drivers
of volumes and network plugins; tests/situations has them.
"""

from collections.abc import Sequence

from ddpjob.api import names
from ddpjob.engine.advice import Row, advice

_DESCRIBE_NODE = "kubectl describe node {node}"
OF_REFUSALS: Sequence[Row] = (
    (
        r"failed quota|must specify",
        "a quota of the namespace counts limits or requests that the pods do not have",
        "set them in spec.resources; kubectl describe quota -n {namespace}",
    ),
    (
        r"violates PodSecurity",
        "Pod Security of the namespace forbids what the pods ask for",
        "correct podSecurity, or securityContext, volumes and host namespaces in spec.template; kubectl get namespace "
        "{namespace} --show-labels",
    ),
    (
        r"admission webhook|ValidatingAdmissionPolicy",
        "a policy of the cluster refuses the pods",
        "correct what the message names, in the spec or in spec.template, or ask the owner of the policy",
    ),
    (
        r"(?i)service ?account \S+ not found",
        "the pods name a service account that does not exist",
        "create the ServiceAccount, or correct serviceAccountName in spec.template",
    ),
    (
        r"no PriorityClass",
        "the priority class does not exist",
        "correct priorityClassName; kubectl get priorityclasses",
    ),
    (r"RuntimeClass", "the runtime class does not exist", "correct runtimeClassName in spec.template"),
    (
        r"\bcannot \w+ resource",
        "the operator lacks the right",
        "the administrator of the operator installs the chart's roles for this namespace",
    ),
    (r"is being terminated", "the namespace is being deleted", "use another namespace"),
    (
        r"per (?:Container|Pod)\b|LimitRange",
        "a LimitRange of the namespace does not allow such resources",
        "correct spec.resources; kubectl describe limitrange -n {namespace}",
    ),
    (r" is invalid: ", "the API server does not accept the pod", "correct the field that the message names"),
)
# https://github.com/kubernetes-sigs/kueue/blob/v0.14.0/pkg/scheduler/flavorassigner/flavorassigner.go
OF_QUEUES: Sequence[Row] = (
    (
        r"maximum capacity",
        "the job asks for more than its whole queue has",
        "request less in spec.resources, use fewer nodes, or another queue",
    ),
    (
        r"node affinity|untolerated taint|unavailable in ClusterQueue",
        "no flavor of the queue fits what the job asks for",
        "correct spec.resources, or nodeSelector, affinity and tolerations in spec.template, or use another queue",
    ),
    (
        r"is inactive|is stopped|doesn't exist",
        "the queue is stopped or does not exist",
        f"correct the label {names.LABEL_QUEUE} or use another queue; its administrator may start it again",
    ),
)
OF_KUBELETS: Sequence[Row] = (
    (
        r"failed to sync \w+ cache",
        "the kubelet has not read the Secret or ConfigMap yet",
        "nothing: the kubelet tries again; if it lasts, " + _DESCRIBE_NODE,
    ),
    (
        r"runAsNonRoot",
        "the pod may not run as root, and the image does",
        "set runAsUser in podSecurity or in securityContext of spec.template, or a numeric USER in the image",
    ),
    (
        r"prepare subPath",
        "the directory of subPath cannot be created on the volume",
        "correct subPath, or the owner and the rights of the volume",
    ),
    (r"no command specified", "the image has no command", "set command in the spec"),
    (
        r"^CrashLoopBackOff",
        "an init container fails again and again",
        "kubectl logs {pod} -n {namespace} --all-containers; correct initContainers in spec.template",
    ),
    (
        r'(?:secret|configmap) "[^"]+" not found|couldn\'t find key|references non-existent',
        "the Secret, ConfigMap or key that the message names does not exist",
        "create it, or correct env, envFrom, volumes or template and create the job again",
    ),
    (r"(?i)signature", "a policy of the nodes requires an image that is signed", "sign the image, or use a signed one"),
    (
        r"executable file",
        "the command is not in the image",
        "correct command, args or image and create the job again",
    ),
    (
        r"^FailedPrepareDynamicResources",
        "the driver of a device of the pod does not work on this Kubernetes node",
        f"{_DESCRIBE_NODE}; kubectl get resourceclaims -n {{namespace}}",
    ),
    (
        r"^PostStartHookError",
        "the command that lifecycle.postStart runs in the container failed",
        "correct lifecycle in spec.template",
    ),
    (
        r"^CreateContainerError|^RunContainerError",
        "the container runtime of the Kubernetes node cannot create the container",
        f"{_DESCRIBE_NODE}; the kubelet tries again",
    ),
    (
        r"Multi-Attach",
        "another Kubernetes node uses the volume, and only one can at a time",
        "use a claim with the access mode ReadWriteMany, or end the other pod that uses the volume",
    ),
    (
        r"^VolumePermissionChangeInProgress",
        "the kubelet changes the owner of each file of the volume",
        "wait; set fsGroupChangePolicy: OnRootMismatch in podSecurity or in securityContext of spec.template",
    ),
    (
        r"access denied by server|PermissionDenied|Error 403|not authorized",
        "the storage refuses this Kubernetes node, or the service account of the pods",
        "give them the right: the export of the server, or the permission of the account",
    ),
    (
        r"helper program|registered CSI drivers",
        "the Kubernetes node lacks the driver of the volume",
        f"the administrator of the nodes installs it; {_DESCRIBE_NODE}",
    ),
    (
        r"^Failed(?:Mount|AttachVolume|MapVolume)|^VolumeResizeFailed",
        "the volume cannot be mounted on this Kubernetes node",
        f"look at the claim and the server of its volume: kubectl get pvc,pv -n {{namespace}}; {_DESCRIBE_NODE}",
    ),
    (
        r"no runtime for|RuntimeHandler",
        "the Kubernetes node does not have the runtime that runtimeClassName names",
        f"correct runtimeClassName in spec.template, or use other nodes; {_DESCRIBE_NODE}",
    ),
    (
        r"^FailedCreatePodSandBox|^NetworkNotReady",
        "the network plugin or the container runtime of the Kubernetes node does not work, or has no addresses left",
        f"{_DESCRIBE_NODE}; kubectl get pods -n kube-system -o wide shows its network plugin",
    ),
)


def advice_on(text: str, rows: Sequence[Row], **names: str) -> tuple[str, str] | None:
    """Return hint and next for a text, which begins with the reason; None if it is not known.

    names: values for {namespace}, {pod} and {node} in next.
    """
    found = advice(text, rows)
    return found and (found[0], found[1].format(**names))
