"""Values that a pod's spec refers to: Secrets, ConfigMaps, fields of the pod, resources, and ``$(VAR)``.

Secrets and ConfigMaps come from the user's file and are kept in memory; they are never written to the state folder.
"""

import base64
import binascii
import os
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import cache
from math import ceil

from ddpjob.api.objects import Json
from ddpjob.api.quantities import amount
from ddpjob.local import LocalError

_KEY = re.compile(r"[-._a-zA-Z0-9]+")


class ConfigError(Exception):
    """A container cannot be configured. ``str()`` is the message of CreateContainerConfigError."""


class References:
    """The Secrets and ConfigMaps of one namespace."""

    def __init__(self, documents: Iterable[Json], namespace: str) -> None:
        self._data: dict[tuple[str, str], dict[str, bytes]] = {}
        self._namespace = namespace
        for document in documents:
            meta = document.get("metadata") or {}
            if meta.get("namespace", namespace) == namespace:
                kind, name = str(document.get("kind")), str(meta.get("name"))
                self._data[kind, name] = _decoded(document, f"{kind} {name}")

    def data(self, kind: str, reference: Mapping[str, object]) -> dict[str, bytes]:
        """Return the data of the referenced object; {} if it is optional and absent. Raises ``ConfigError``."""
        name = str(reference.get("name") or reference.get("secretName"))
        found = self._data.get((kind, name))
        if found is None and not reference.get("optional"):
            raise ConfigError(f'{kind.lower()} "{name}" not found')
        return found or {}

    def value(self, kind: str, reference: Mapping[str, object]) -> str | None:
        """Return the value of the referenced key; None if it is optional and absent. Raises ``ConfigError``."""
        key = str(reference["key"])
        found = self.data(kind, reference).get(key)
        if found is None and not reference.get("optional"):
            raise ConfigError(f"couldn't find key {key} in {kind} {self._namespace}/{reference['name']}")
        return None if found is None else found.decode(errors="replace")


def _decoded(document: Json, what: str) -> dict[str, bytes]:
    for part in ("data", "binaryData", "stringData"):
        _check_keys(document.get(part) or {}, f"{what}: {part}")
    is_secret = document.get("kind") == "Secret"
    data: dict[str, bytes] = {}
    try:
        for key, value in (document.get("data") or {}).items():
            data[key] = base64.b64decode(value, validate=True) if is_secret else str(value).encode()
        for key, value in (document.get("binaryData") or {}).items():
            data[key] = base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise LocalError(
            f"{what}: data.{key} is not base64",
            "data of a Secret holds base64-encoded values",
            "encode it (base64 -w0), or write it as plain text under stringData",
        ) from error
    for key, value in (document.get("stringData") or {}).items():
        data[key] = str(value).encode()
    return data


def _check_keys(part: object, what: str) -> None:
    """Raise ``LocalError`` for a key that an API server refuses, because it cannot be a file name."""
    if not isinstance(part, dict):
        raise LocalError(f"{what} is not a mapping", "it maps keys to values", "write key: value")
    for key in map(str, part):
        if not _KEY.fullmatch(key) or key.startswith("..") or key == ".":
            raise LocalError(
                f'{what} has the key "{key}"',
                "a key consists of letters, digits, -, _ and ., is not . and does not begin with ..",
                "rename the key; items of a volume can give the file another path",
            )


_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")
_PLAIN = re.compile(
    r"metadata\.(name|namespace|uid)|spec\.(nodeName|serviceAccountName)|status\.(hostIP|podIP|hostIPs|podIPs)"
)


@cache
def capacity() -> Mapping[str, Decimal]:
    """Return CPUs and memory of this machine: the default of a missing limit, like a node's allocatable resources."""
    return {
        "cpu": Decimal(len(os.sched_getaffinity(0))),
        "memory": Decimal(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def field_value(pod: Json, path: str) -> str:
    """Return the value of a ``fieldRef``. Raises ``ConfigError`` for an unsupported field.

    https://kubernetes.io/docs/concepts/workloads/pods/downward-api/
    """
    if found := _SUBSCRIPT.fullmatch(path):
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        pairs = (pod["metadata"].get(path.removeprefix("metadata.")) or {}).items()
        return "\n".join(f"{key}={_quoted(value)}" for key, value in sorted(pairs))
    if not _PLAIN.fullmatch(path):
        raise ConfigError(f"unsupported fieldPath: {path}")
    part, field = path.split(".")
    value = (pod.get(part) or {}).get(field, "")
    return ",".join(item["ip"] for item in value) if isinstance(value, list) else str(value)


def resource_value(pod: Json, container: Json, reference: Mapping[str, object]) -> str:
    """Return the value of a ``resourceFieldRef``: limit or request in units of the divisor, rounded up."""
    if name := reference.get("containerName"):
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
        found = next((c for c in containers if c["name"] == name), None)
        if found is None:
            raise ConfigError(f"container {name} not found")
        container = found
    kind, _, resource = str(reference["resource"]).partition(".")
    if kind not in ("limits", "requests"):
        raise ConfigError(f"unsupported container resource: {reference['resource']}")
    stated = (container.get("resources") or {}).get(kind, {}).get(resource)
    default = capacity().get(resource, Decimal(0)) if kind == "limits" else Decimal(0)
    divisor = amount(str(reference.get("divisor") or 1)) or Decimal(1)
    return str(ceil((default if stated is None else amount(stated)) / divisor))


def _quoted(text: str) -> str:
    """Return the text quoted as by Go's strconv.Quote."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with every ``$(VAR)`` in ``values`` replaced; other references stay, and ``$$`` becomes ``$``.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return _REFERENCE.sub(lambda found: "$" if found[1] else values.get(found[2], found[0]), text)
