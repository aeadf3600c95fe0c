"""The Secrets and ConfigMaps of the user's file. They are kept in memory and never written to the state folder."""

import base64
import re
from collections.abc import Iterable

from ddpjob.api.objects import Json
from ddpjob.local import LocalError

_KEY = re.compile(r"(?!\.\.?$)[-._a-zA-Z0-9]+")


class References:
    """The Secrets and ConfigMaps of one namespace. Raises ``LocalError`` if one of them cannot be read."""

    def __init__(self, documents: Iterable[Json], namespace: str) -> None:
        self._data: dict[tuple[str, str], dict[str, bytes]] = {}
        for document in documents:
            meta = document.get("metadata") or {}
            if meta.get("namespace", namespace) == namespace:
                kind, name = str(document.get("kind")), str(meta.get("name"))
                self._data[kind, name] = _decoded(document, f"{kind} {name}")

    def data(self, kind: str, source: Json) -> dict[str, bytes]:
        """Return the data of the object that a source names, or only its ``key``; {} if it is optional and absent.

        Raises:
            LocalError: the object, or its key, is missing.
        """
        named, key, optional = f"{kind} {source['name']}", source.get("key"), source.get("optional")
        found = self._data.get((kind, str(source["name"])), {} if optional else None)
        if found is None:
            raise LocalError(
                f"the job refers to the {named}, which its file does not contain",
                "local mode reads Secrets and ConfigMaps only from the file of the job",
                "add it to that file, after a line with ---",
            )
        if key is None:
            return found
        if key not in found and not optional:
            raise LocalError(
                f"the job refers to the key {key} of the {named}, which has no such key",
                f"it has {', '.join(found) or 'none'}",
                f"add the key to the {kind}, or correct the reference",
            )
        return {key: found[key]} if key in found else {}


NO_REFERENCES = References((), "")


def _decoded(document: Json, what: str) -> dict[str, bytes]:
    encoded = ("data", "binaryData") if document.get("kind") == "Secret" else ("binaryData",)
    data: dict[str, bytes] = {}
    for part in ("data", "binaryData", "stringData"):
        values = document.get(part) or {}
        if not isinstance(values, dict):
            raise LocalError(f"{what}: {part} is not a mapping", "it maps keys to values", "write key: value")
        for key, value in values.items():
            if not _KEY.fullmatch(str(key)):
                rule = "a key consists of letters, digits, -, _ and ., because it can be the name of a file"
                raise LocalError(f'{what}: {part} has the key "{key}"', rule, "rename the key")
            try:
                data[key] = base64.b64decode(value, validate=True) if part in encoded else str(value).encode()
            except (TypeError, ValueError) as error:
                raise LocalError(
                    f"{what}: {part}.{key} is not base64",
                    "data of a Secret holds base64-encoded values",
                    "encode it (base64 -w0), or write it as plain text under stringData",
                ) from error
    return data
