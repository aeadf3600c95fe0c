"""Secrets and ConfigMaps that the user's file brings along: what ``valueFrom``, ``envFrom`` and volumes read.

They live in memory for the run alone; the state folder never holds them.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping

from ddpjob.cluster.base import Json
from ddpjob.local.errors import LocalError

_KEY = re.compile(r"[-._a-zA-Z0-9]+")


class ConfigError(Exception):
    """A container cannot be configured; ``str()`` is the message of CreateContainerConfigError."""


class Sources:
    """By kind and name, in one namespace."""

    def __init__(self, documents: Iterable[Json], namespace: str) -> None:
        self._data: dict[tuple[str, str], dict[str, bytes]] = {}
        self._namespace = namespace
        for document in documents:
            meta = document.get("metadata") or {}
            if meta.get("namespace", namespace) == namespace:
                kind, name = str(document.get("kind")), str(meta.get("name"))
                self._data[kind, name] = _data(document, f"{kind} {name}")

    def data(self, kind: str, reference: Mapping[str, object]) -> dict[str, bytes]:
        """Everything in the referenced object; nothing where it is optional and absent. Raises ``ConfigError``."""
        name = str(reference.get("name") or reference.get("secretName"))
        found = self._data.get((kind, name))
        if found is None and not reference.get("optional"):
            raise ConfigError(f'{kind.lower()} "{name}" not found')
        return found or {}

    def value(self, kind: str, reference: Mapping[str, object]) -> str | None:
        """The value of the referenced key; None where it is optional and absent. Raises ``ConfigError``."""
        key = str(reference["key"])
        found = self.data(kind, reference).get(key)
        if found is None and not reference.get("optional"):
            raise ConfigError(f"couldn't find key {key} in {kind} {self._namespace}/{reference['name']}")
        return None if found is None else found.decode(errors="replace")


def _data(document: Json, what: str) -> dict[str, bytes]:
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
            "values under data of a Secret are encoded",
            "encode it (base64 -w0), or write it as it is under stringData",
        ) from error
    for key, value in (document.get("stringData") or {}).items():
        data[key] = str(value).encode()
    return data


def _check_keys(part: object, what: str) -> None:
    """As an API server does: a key becomes the name of a file, so it must be one."""
    if not isinstance(part, dict):
        raise LocalError(f"{what} is no mapping", "it holds keys and their values", "write key: value")
    for key in map(str, part):
        if not _KEY.fullmatch(key) or key.startswith("..") or key == ".":
            raise LocalError(
                f'{what} has the key "{key}"',
                "a key may hold letters, digits, -, _ and . only, and is neither . nor begins with ..",
                "rename it; items in a volume give a file another path",
            )
