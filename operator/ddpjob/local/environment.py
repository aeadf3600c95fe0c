"""The environment of a pod's trainer: selected variables of this machine, defaults of local mode, and the pod's own."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.local import LocalError
from ddpjob.local.references import References

# Variables by which a program finds libraries, language, GPUs and the network; nothing else of the user's session.
_INHERITED = frozenset(
    ("LD_LIBRARY_PATH", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR")
)
_PROXIES = frozenset(("http_proxy", "https_proxy", "no_proxy", "all_proxy"))
_INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_")
# By default gloo resolves the hostname, which may give an external address or none, and NCCL takes another interface.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that every program inherits, with this Python's programs first in PATH."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _INHERITED or name.lower() in _PROXIES or name.startswith(_INHERITED_PREFIXES)
    }
    own = str(Path(sys.executable).parent)
    rest = [part for part in environment.get("PATH", os.defpath).split(os.pathsep) if part and part != own]
    # As in this project's images, output must reach the log even if the program is killed.
    return kept | {"PATH": os.pathsep.join([own, *rest]), **_LOOPBACK, "PYTHONUNBUFFERED": "1"}


def declared(trainer: Json, references: References, ports: Mapping[str, int]) -> tuple[dict[str, str], set[str]]:
    """Return the variables of ``envFrom``, then of ``env`` in order, as the kubelet resolves them.

    Also return the names of those that hold a secret: they are not translated. ports: the values of the operator's
    variables that hold a port.

    Raises:
        LocalError: a variable refers to something that does not exist, or that local mode does not support.
    """
    values: dict[str, str] = {}
    secret: set[str] = set()

    def take(found: Mapping[str, str], kind: str = "") -> None:
        nonlocal secret
        values.update(found)
        secret = secret | found.keys() if kind == "Secret" else secret - found.keys()

    for group in trainer.get("envFrom") or ():
        kind, data = _referenced(group, "Ref", "envFrom", references)
        take({f"{group.get('prefix') or ''}{key}": text for key, text in data.items()}, kind)
    for variable in trainer.get("env") or ():
        name = variable["name"]
        if variable.get("valueFrom") is None:
            take({name: str(ports.get(name) or expand(variable.get("value") or "", values))})
        else:
            kind, data = _referenced(variable["valueFrom"], "KeyRef", f"the variable {name}", references)
            take({name: text} if (text := next(iter(data.values()), None)) is not None else {}, kind)
    return values, secret


def _referenced(holder: Json, suffix: str, what: str, references: References) -> tuple[str, dict[str, str]]:
    """Return the kind and the data of the object that a source of variables names."""
    for kind, field in (("ConfigMap", f"configMap{suffix}"), ("Secret", f"secret{suffix}")):
        if isinstance(source := holder.get(field), dict) and "name" in source:
            return kind, {key: value.decode(errors="replace") for key, value in references.data(kind, source).items()}
    raise LocalError(
        f"{what} has a source that local mode does not support, such as a field of the pod",
        "local mode reads values, Secrets and ConfigMaps",
        "give the variable a value, or run the job in a cluster",
    )


_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with every ``$(VAR)`` in ``values`` replaced; other references stay, and ``$$`` becomes ``$``.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return _REFERENCE.sub(lambda found: "$" if found[1] else values.get(found[2], found[0]), text)
