"""The usual cause of an image that cannot be pulled, by the message of the kubelet or of the registry."""

import re
from collections.abc import Sequence

from ddpjob.engine.advice import DISK_FULL, Row, advice

_OF_IMAGES: Sequence[Row] = (
    Row(
        r"(?i)toomanyrequests|too many requests|\b429\b|rate limit",
        "the registry limits how often it is pulled from; the kubelet tries again",
        "wait, or name the Secret of a user of the registry in spec.imagePullSecrets, or use a mirror",
    ),
    Row(
        r"(?i)no match for platform|no matching manifest|exec format error|wrong platform",
        "the image is not built for the architecture of this Kubernetes node",
        "build it for that architecture, or select nodes with kubernetes.io/arch in template.spec.nodeSelector",
    ),
    DISK_FULL,
    Row(
        r"(?i)x509:|certificate|gave HTTP response to HTTPS client",
        "the Kubernetes node does not trust the certificate of the registry, or the registry has none",
        "the administrator of the nodes adds the registry to the configuration of the container runtime",
    ),
    Row(
        r"(?i)\b50\d \w+|unexpected (?:commit|EOF)|context canceled|connection reset",
        "the registry answers with an error, or the connection to it breaks",
        "wait: the kubelet tries again; if it lasts, push the image again, or ask the administrator of the registry",
    ),
    Row(
        r"(?i)no such host|timeout|connection re(?:fused|set)|unreachable|deadline exceeded",
        "the Kubernetes node cannot reach the registry",
        "correct the host in spec.image, or the DNS, proxy or firewall of node {node}",
    ),
    Row(
        r"(?i)may require|insufficient_scope",
        "the name is wrong, or the image is private: the registry answers the same for both",
        "correct spec.image, or name the Secret in spec.imagePullSecrets",
    ),
    Row(
        r"(?i)unauthorized|authentication|credentials|denied|forbidden|\b40[13]\b",
        "the registry got no credentials, or refuses them",
        "name a Secret with valid credentials in spec.imagePullSecrets",
    ),
    Row(
        r"(?i)not found|(?:manifest|name) unknown|does not exist|invalid reference format",
        "the name or the tag is wrong",
        "correct spec.image",
    ),
    Row(
        r"(?i)pull policy of Never",
        "the pull policy is Never, and this Kubernetes node does not have the image",
        "load the image onto the nodes, or correct spec.image or spec.imagePullPolicy",
    ),
)
"""Hint and next by the message of the kubelet or of the registry; the first that matches.

https://github.com/containerd/containerd/blob/v2.1.0/core/remotes/docker has most of the texts."""

_NO_CAUSE = re.compile(r'(?:\w+: )*(?:|Back-off pulling image "[^"]*"|ErrImagePull|ImagePullBackOff)')
"""A message that has no other text of the registry or of the container runtime."""


def image_advice(message: str, image: str, node: str | None = None) -> tuple[str, str, bool]:
    """Return hint and next for an image that cannot be pulled, and whether the message names the cause.

    node: the Kubernetes node of the pod, if it is known.
    """
    text = re.sub(r'https?://[^\s"]+', "", message.replace(image, ""))  # a tag may be 429, also in a URL
    if (found := advice(text, _OF_IMAGES, node=node or "NODE")) is not None:
        return *found, True
    if not _NO_CAUSE.fullmatch(message.strip()):
        return "", "correct what the message names", False
    hint = "the name or the tag is wrong, the registry needs a Secret, or the node cannot reach the registry"
    return hint, "correct spec.image, or name the Secret in spec.imagePullSecrets", False
