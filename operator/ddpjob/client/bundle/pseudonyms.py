"""Pseudonyms: what replaces a name everywhere in a bundle, with ``--hide-names``."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddpjob.api.objects import Json

# By the key of a field, what it names. A name with several meanings has the pseudonym of the first.
_KEYS: Mapping[str, str] = {
    "namespace": "namespace",
    "nodeName": "node",
    "nominatedNodeName": "node",
    "claimName": "claim",
    "secretName": "secret",
    "serviceAccountName": "account",
    "serviceAccount": "account",
    "storageClassName": "storage-class",
    "runtimeClassName": "runtime-class",
    "priorityClassName": "priority-class",
    "queueName": "queue",
    "volumeName": "volume",
    "image": "image",
    "podIP": "address",
    "hostIP": "address",
    "ip": "address",
    "host": "host",
}
_PARENTS: Mapping[str, str] = {
    "configMapKeyRef": "config",
    "configMapRef": "config",
    "configMap": "config",
    "secretKeyRef": "secret",
    "secretRef": "secret",
    "imagePullSecrets": "secret",
}
"""The same for a field ``name``, by the key of the object around it."""
_NOT_HIDDEN = frozenset({"", "default", "kube-system", "ddpjob-system", "local", "localhost", "root"})
_TAG = re.compile(r"(@[\w:+.-]+|:[\w.-]+)$")
_SHORTEST = 3
"""A shorter name would also be found where it is no name."""


def pseudonyms(job: Json, objects: Iterable[Json], others: Iterable[str] = ()) -> dict[str, str]:
    """Return the pseudonym of each name in these objects.

    Names that begin with that of the job need none: those of its pods, its Service and its claim. Pseudonyms of one
    kind sort as the names do, so that what is sorted by name stays so.

    others: names of the user and of machines.
    """
    name, namespace = str(job["metadata"]["name"]), str(job["metadata"]["namespace"])
    found: dict[str, str] = {name: "job"}
    pairs = [(namespace, "namespace"), *((text, "host") for text in others), *_names([job, *objects], "", "")]
    for text, kind in pairs:
        if text in _NOT_HIDDEN or len(text) < _SHORTEST or text.startswith(f"{name}-"):
            continue
        found.setdefault(text, kind)
    made: dict[str, str] = {}
    for kind in dict.fromkeys(found.values()):
        own = sorted(text for text, given in found.items() if given == kind)
        made |= {text: f"{kind}-{number:0{len(str(len(own)))}}" for number, text in enumerate(own, start=1)}
    return made


def _names(value: Any, key: str, parent: str) -> Iterator[tuple[str, str]]:
    """Yield each name in a JSON value, with what it names."""
    if isinstance(value, str):
        kind = _PARENTS.get(parent) if key == "name" else _KEYS.get(key)
        if kind is not None:
            yield from _of_image(value) if kind == "image" else [(value, kind)]
    elif isinstance(value, list):
        for item in value:
            yield from _names(item, "", key)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _names(item, name, key or parent)


def _of_image(image: str) -> Iterator[tuple[str, str]]:
    """Yield the repository of an image and its registry; the tag stays."""
    repository = _TAG.sub("", _TAG.sub("", image))
    registry, slash, _ = repository.partition("/")
    yield repository, "image"
    if slash and ("." in registry or ":" in registry):
        yield registry, "registry"
