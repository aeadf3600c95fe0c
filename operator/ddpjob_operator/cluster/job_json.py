"""Large DDPJobs, read without the values of their specs.

A spec of 1.4 MB can hold 450,000 objects, which take 33 MB of memory and 50 ms of CPU time. In a large response or
event, a job therefore has only the fields that the operator uses, and its spec is not decoded:

    "spec": "{...}"    the spec as JSON text
    "spec": 1365056    the number of bytes of a spec above ``MAX_BYTES``, which is not kept
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, cast

import aiohttp
import msgspec

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.spec import MAX_BYTES

LARGE_BYTES: Final = 64 * 1024
"""A smaller response or event is decoded as it is."""

MAX_FINALIZERS: Final = 3


class _Metadata(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    labels: dict[str, str] = {}
    finalizers: list[str] = []


METADATA: Final = tuple(field.encode_name for field in msgspec.structs.fields(_Metadata))
"""The metadata of a job that the operator uses; of labels and finalizers only those in use (see below)."""


def labels_in_use(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a job that plans read: a user may set many and long ones."""
    return {key: labels[key] for key in names.LABELS_OF_QUEUES if key in labels}


def finalizers_in_use(meta: Json) -> list[str]:
    """Return the finalizers of a deleted job, at most ``MAX_FINALIZERS``, those of the garbage collector first."""
    given = map(str, meta.get("finalizers") or ()) if meta.get("deletionTimestamp") else ()
    return sorted(given, key=lambda name: name not in names.GARBAGE_COLLECTION)[:MAX_FINALIZERS]


class _Job(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    api_version: str | None = None
    kind: str | None = None
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: Any = None


class _List(msgspec.Struct):
    metadata: Json
    items: list[_Job]


class _Event(msgspec.Struct):
    type: str
    object: _Job


def read_job(body: bytes) -> Json | None:
    """Return a large job without the values of its spec; None if the JSON is small, or is no job."""
    job = _read(body, _JOB)
    return None if job is None else _slim(job)


def read_list(body: bytes) -> Json | None:
    """Return a large list of jobs without the values of their specs; None if the JSON is small, or is no such list."""
    found = _read(body, _LIST)
    return None if found is None else {"metadata": found.metadata, "items": [_slim(job) for job in found.items]}


_JOB, _LIST, _EVENT = (msgspec.json.Decoder(kind) for kind in (_Job, _List, _Event))


def _read(body: bytes, decoder: Any) -> Any:
    if len(body) <= LARGE_BYTES:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):  # another object, or a number that only Python's json reads
        return None


def _slim(job: _Job) -> Json:
    size = len(memoryview(job.spec))
    job.metadata.labels = labels_in_use(job.metadata.labels)
    body = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": msgspec.to_builtins(job.metadata),
        "spec": size if size > MAX_BYTES else bytes(job.spec).decode(),
        "status": job.status,
    }
    return {key: value for key, value in body.items() if value is not None}


async def middleware(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Give every reader of an HTTP session, such as kopf, the lists and watch events of jobs without large specs."""
    response = await handler(request)
    if response.status == 200:
        response.content = cast(aiohttp.StreamReader, _SlimContent(response.content))
    return response


class _SlimContent:
    """The body of a response; everything except the two ways of reading is the original's."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self) -> bytes:
        """Return the whole body: a list."""
        body = await self._content.read()
        found = read_list(body)
        return body if found is None else msgspec.json.encode(found)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield whole lines: events."""
        rest: list[bytes] = []
        async for chunk in self._content.iter_chunked(size):
            *lines, last = chunk.split(b"\n")
            if lines:
                lines[0] = b"".join([*rest, lines[0]])
                rest.clear()
                for line in lines:
                    yield _slim_event(line) + b"\n"
            rest.append(last)
        if any(rest):
            yield b"".join(rest)


def _slim_event(line: bytes) -> bytes:
    event = _read(line, _EVENT)
    return line if event is None else msgspec.json.encode({"type": event.type, "object": _slim(event.object)})
