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


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that every program inherits, with this Python's programs first in PATH."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _INHERITED or name.lower() in _PROXIES or name.startswith(_INHERITED_PREFIXES)
    }
    own = str(Path(sys.executable).parent)
    rest = [part for part in environment.get("PATH", os.defpath).split(os.pathsep) if part and part != own]
    # By default Gloo resolves the hostname, which may give an external address or none. As in this project's images,
    # output must reach the log even if the program is killed.
    return kept | {"PATH": os.pathsep.join([own, *rest]), "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


def declared(trainer: Json, references: References, ports: Mapping[str, int]) -> tuple[dict[str, str], set[str]]:
    """Return the variables of ``envFrom``, then of ``env`` in order, as the kubelet resolves them.

    Also return the names of those that hold a secret: they are not translated. ports: the values of the operator's
    variables that hold a port.

    Raises:
        LocalError: a variable refers to something that does not exist, or that local mode does not support.
    """
    values: dict[str, str] = {}
    secret: set[str] = set()
    for group in trainer.get("envFrom") or ():
        match group:
            case {"configMapRef": {"name": _} as source}:
                kind = "ConfigMap"
            case {"secretRef": {"name": _} as source}:
                kind = "Secret"
            case _:
                raise _unsupported("envFrom")
        data = references.data(kind, source)
        found = {f"{group.get('prefix') or ''}{key}": text.decode(errors="replace") for key, text in data.items()}
        values |= found
        secret = secret | found.keys() if kind == "Secret" else secret - found.keys()
    for variable in trainer.get("env") or ():
        name, kind = variable["name"], ""
        match variable.get("valueFrom"):
            case None:
                values[name] = str(ports.get(name) or expand(variable.get("value") or "", values))
            case {"configMapKeyRef": source}:
                kind = "ConfigMap"
            case {"secretKeyRef": source}:
                kind = "Secret"
            case _:
                raise _unsupported(f"the variable {name}")
        for text in references.data(kind, source).values() if kind else ():
            values[name] = text.decode(errors="replace")
        secret = secret | {name} if kind == "Secret" else secret - {name}
    return values, secret


def _unsupported(what: str) -> LocalError:
    return LocalError(
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
