"""The environment of one container: selected variables of this machine, defaults of local mode, and the pod's own.

Values are resolved as by the kubelet and translated last (``translate``); values of Secrets are not translated.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.local.references import ConfigError, References, expand, field_value, resource_value
from ddpjob.local.resources import CUDA_VISIBLE_DEVICES
from ddpjob.local.translate import Translator, marked_port

# Variables by which a program finds libraries, language, GPUs and the network; nothing else of the user's session.
_INHERITED = frozenset(
    ("LD_LIBRARY_PATH", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR")
)
_PROXIES = frozenset(("http_proxy", "https_proxy", "no_proxy", "all_proxy"))
_INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_")
_PORT_VARIABLES = frozenset(
    {names.ENV_MASTER_PORT, f"PET_{names.ENV_MASTER_PORT}", names.ENV_PROGRESS_PORT},
)


@dataclass(frozen=True)
class Declared:
    """The variables of a container as in a cluster. verbatim: names of variables that hold a secret."""

    values: Mapping[str, str]
    verbatim: frozenset[str]


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that every container inherits, with this Python's programs first in PATH."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _INHERITED or name.lower() in _PROXIES or name.startswith(_INHERITED_PREFIXES)
    }
    own = str(Path(sys.executable).parent)
    rest = [part for part in environment.get("PATH", os.defpath).split(os.pathsep) if part and part != own]
    return kept | {"PATH": os.pathsep.join([own, *rest])}


def declared(pod: Json, container: Json, references: References) -> Declared:
    """Return the variables of ``envFrom``, then of ``env`` in order. Raises ``ConfigError`` for a missing reference."""
    values: dict[str, str] = {}
    secret: set[str] = set()
    for source in container.get("envFrom") or ():
        kind = "Secret" if "secretRef" in source else "ConfigMap"
        reference = source.get("secretRef") or source.get("configMapRef") or {}
        found = {f"{source.get('prefix', '')}{key}": text for key, text in references.data(kind, reference).items()}
        values |= {key: text.decode(errors="replace") for key, text in found.items()}
        secret = secret | found.keys() if kind == "Secret" else secret - found.keys()
    for variable in container.get("env") or ():
        name, source = variable["name"], variable.get("valueFrom")
        value = _read(pod, container, source, references) if source else expand(variable.get("value") or "", values)
        if value is None:
            continue
        is_secret = source is not None and "secretKeyRef" in source
        is_port = name in _PORT_VARIABLES and value.isdecimal() and not is_secret
        values[name] = marked_port(value) if is_port else value
        secret = secret | {name} if is_secret else secret - {name}
    return Declared(values, frozenset(secret))


def complete(
    pod: Json, declared: Declared, translator: Translator, termination_log: Path, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Return all variables of the process. gpus: the GPUs assigned to it."""
    own = {
        "HOSTNAME": str(pod["spec"].get("hostname") or pod["metadata"]["name"]),
        # By default Gloo resolves the hostname, which may give an external address or none.
        "GLOO_SOCKET_IFNAME": "lo",
        "DDPJOB_TERMINATION_LOG": str(termination_log),
        # As in this project's images: output must reach the log even if the program is killed.
        "PYTHONUNBUFFERED": "1",
    }
    if gpus:
        own[CUDA_VISIBLE_DEVICES] = ",".join(gpus)
    theirs = {
        name: value if name in declared.verbatim else translator.text(value) for name, value in declared.values.items()
    }
    return inherited() | own | theirs


def _read(pod: Json, container: Json, source: Json, references: References) -> str | None:
    """Return the value of a ``valueFrom``; None if it is optional and absent."""
    if "fieldRef" in source:
        return field_value(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource_value(pod, container, source["resourceFieldRef"])
    if "secretKeyRef" in source:
        return references.value("Secret", source["secretKeyRef"])
    if "configMapKeyRef" in source:
        return references.value("ConfigMap", source["configMapKeyRef"])
    raise ConfigError(f"environment variables from {', '.join(source)} need a cluster")
