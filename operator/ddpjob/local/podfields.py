"""What a pod tells its containers about itself: ``fieldRef`` and ``resourceFieldRef``.

https://kubernetes.io/docs/concepts/workloads/pods/downward-api/
"""

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from math import ceil

from ddpjob.cluster.base import Json
from ddpjob.cluster.memory.quantities import amount
from ddpjob.local.sources import ConfigError

_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")
_PLAIN = re.compile(
    r"metadata\.(name|namespace|uid)|spec\.(nodeName|serviceAccountName)|status\.(hostIP|podIP|hostIPs|podIPs)"
)


@cache
def capacity() -> Mapping[str, Decimal]:
    """What this machine has: the limit of a container that has none, as a node's allocatable is in a cluster."""
    return {
        "cpu": Decimal(len(os.sched_getaffinity(0))),
        "memory": Decimal(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def field_value(pod: Json, path: str) -> str:
    """The value of a field of the pod. Raises ``ConfigError`` for one that cannot be referred to."""
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
    """A limit or request of a container, in units of the divisor and rounded up. Raises ``ConfigError``."""
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
    """As Go's strconv.Quote does for ordinary text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'
