"""The file of a bundle: a zip with a manifest, written whole or not at all, and read without unpacking it."""

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.api.times import parse_time
from ddpjob.client.bundle.manifest import FORMAT, BundledFile, Manifest, Redaction
from ddpjob.client.bundle.recording import (
    Recording,
    Unread,
    log_failure_of,
    settings_of,
    to_wire,
)
from ddpjob.errors import DDPJobError, InvalidJobError

MANIFEST = "manifest.json"
_JOB, _PODS, _FORMER, _SERVICE, _POLICY = (
    "job.json",
    "pods.json",
    "former-pods.json",
    "service.json",
    "networkpolicy.json",
)
_CLAIMS, _EVENTS, _OPERATORS, _INPUTS = "claims.json", "events.json", "operators.json", "plan-inputs.json"
_WHAT = {
    _JOB: "the DDPJob with its status",
    _PODS: "its pods",
    _FORMER: "pods of a deleted job of the same name",
    _SERVICE: "its Service",
    _POLICY: "its NetworkPolicy",
    _CLAIMS: "its PersistentVolumeClaims, by name; null for one that does not exist",
    _EVENTS: "Kubernetes Events about the job, its pods and claims",
    _OPERATORS: "the Deployments of the operator",
    _INPUTS: "time, settings and what logs say, for ddpjob replay",
    "operator.log": "what the operator logged about the job",
    "events.log": "events of the last run",
    "logs/": "the end of the log of a pod",
    "metrics/": "metrics that the trainer wrote",
}
_MOST_FILES, _MOST_BYTES = 10_000, 256 * 2**20
"""Of a bundle: a zip of 10 MB once took 10.7 GiB of memory."""
_MOST_OF_DOCUMENT = 64 * 2**20  # bytes of JSON, whose objects take up to 30 times as much memory


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read."""

    manifest: Manifest
    recording: Recording


def write(path: str | Path, recording: Recording, redaction: Redaction) -> Manifest:
    """Write a bundle whole or not at all, and return its manifest. An existing file is not overwritten."""
    content, manifest = encode(recording, redaction)
    try:
        target = Path(path).expanduser()
        with target.open("xb") as file:  # fails for a link, too
            try:
                file.write(content)
                file.flush()
            except BaseException:
                target.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise DDPJobError(
            f"{path} exists", "a bundle is not written over another file", "remove it, or name another file"
        ) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name, and there is no such user
        raise DDPJobError(
            f"{path} cannot be written: {_reason(error)}",
            "the directory does not exist, or is not yours",
            "name another file",
        ) from error
    return manifest


def encode(recording: Recording, redaction: Redaction) -> tuple[bytes, Manifest]:
    """Return the bytes of the zip, and its manifest."""
    files = dict(_files(recording))
    status = recording.job.get("status") or {}
    manifest = Manifest(
        format=FORMAT,
        recorded=_exact(recording.now),
        place=recording.place,
        job=recording.name,
        namespace=recording.namespace,
        state=str(status.get("state") or "Pending"),
        versions=dict(recording.versions),
        redaction=redaction,
        files=[BundledFile(path=path, what=_what(path), bytes=len(content)) for path, content in files.items()],
        unread=list(recording.unread),
    )
    target = BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {MANIFEST: _json(manifest.wire()), **files}.items():
            info = zipfile.ZipInfo(path, recording.now.timetuple()[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return target.getvalue(), manifest


def read(path: str | Path) -> Bundle:
    """Return a bundle. Raises ``InvalidJobError`` if the file is none, or is of a later release."""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = [info.file_size for info in archive.infolist()]
            if len(sizes) > _MOST_FILES or sum(sizes) > _MOST_BYTES:
                limit = f"at most {_MOST_BYTES:,} bytes in {_MOST_FILES:,} files are read"
                raise _unreadable(path, f"it holds {sum(sizes):,} bytes in {len(sizes):,} files, {limit}")
            found = _document(archive, MANIFEST)
            if isinstance(found, dict) and isinstance(found.get("format"), int) and found["format"] > FORMAT:
                raise _unreadable(path, f"it has format {found['format']}, and this release reads {FORMAT}")
            manifest = Manifest.model_validate(found, by_alias=True)
            return Bundle(manifest, _recording(archive, manifest))
    except InvalidJobError:
        raise
    except (OSError, ValidationError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, _reason(error)) from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
        EOFError,
    ) as error:  # also: it has a password
        raise _unreadable(path, str(error)) from error


def _files(recording: Recording) -> Iterator[tuple[str, bytes]]:
    yield _JOB, _json(recording.job)
    lists = ((_PODS, recording.pods), (_FORMER, recording.former), (_EVENTS, recording.events))
    for path, objects in (*lists, (_OPERATORS, recording.operators)):
        if objects or (path == _PODS and objects is not None):
            yield path, _json({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    for path, one in ((_SERVICE, recording.service), (_POLICY, recording.policy), (_CLAIMS, dict(recording.claims))):
        if one:
            yield path, _json(one)
    inputs: Json = {
        "now": _exact(recording.now),
        "round": recording.round,
        "assumed": sorted(recording.assumed),
        "settings": to_wire(recording.settings),
        "logs": {uid: log and to_wire(log) for uid, log in recording.logs.items()},
    }
    yield _INPUTS, _json(inputs)
    for path, text in recording.texts.items():
        yield path, text.encode(errors="replace")


def _recording(archive: zipfile.ZipFile, manifest: Manifest) -> Recording:
    there = set(archive.namelist())

    def document(path: str) -> Any:
        return _document(archive, path) if path in there else None

    def items(path: str) -> Sequence[Json]:
        return [_object(item) for item in (document(path) or {"items": []})["items"]]

    def item(path: str) -> Json | None:
        return _object(document(path)) if path in there else None

    inputs = document(_INPUTS)
    now = parse_time(inputs["now"])
    if now.tzinfo is None:
        raise ValueError(f"the time in {_INPUTS} has no zone")
    pods, former = items(_PODS), items(_FORMER)
    for pod in (*pods, *former):
        pod_view(pod)  # raises for what no API server stores
    return Recording(
        job=_object(document(_JOB), ("name", "namespace", "uid")),
        now=now,
        place=manifest.place,
        settings=settings_of(inputs["settings"]),
        round=inputs["round"],
        pods=pods if _PODS in there else None,
        former=former,
        service=item(_SERVICE),
        policy=item(_POLICY),
        assumed=inputs["assumed"],
        claims={name: claim and _object(claim) for name, claim in (document(_CLAIMS) or {}).items()},
        events=items(_EVENTS),
        operators=items(_OPERATORS),
        logs={uid: log_failure_of(log) for uid, log in inputs["logs"].items()},
        texts={path: archive.read(path).decode(errors="replace") for path in sorted(there) if _is_text(path)},
        versions=manifest.versions,
        unread=[Unread(what=one.what, reason=one.reason) for one in manifest.unread],
    )


def _object(value: Any, required: Sequence[str] = ("name",)) -> Json:
    """Return an API object. Raises an error for one without required metadata or with parts that are no objects."""
    "".join(value["metadata"][key] for key in required)
    for part in ("spec", "status"):
        if not isinstance(value.get(part) or {}, dict):
            raise TypeError(f"the {part} of {value['metadata']['name']} is no object")
    found: Json = value
    return found


def _document(archive: zipfile.ZipFile, path: str) -> Any:
    if archive.getinfo(path).file_size > _MOST_OF_DOCUMENT:
        raise ValueError(f"{path} in it is larger than {_MOST_OF_DOCUMENT:,} bytes")
    return json.loads(archive.read(path))


def _is_text(path: str) -> bool:
    return path in ("operator.log", "events.log") or path.startswith(("logs/", "metrics/"))


def _what(path: str) -> str:
    return next(text for prefix, text in _WHAT.items() if path == prefix or path.startswith(prefix))


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(errors="replace")


def _exact(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValidationError):
        return f"its {MANIFEST} has another form"
    return f"{type(error).__name__}: {error}"


def _unreadable(path: str | Path, why: str) -> InvalidJobError:
    return InvalidJobError(
        f"{path} cannot be read as a bundle: {why}",
        "a bundle is the zip that `ddpjob bundle` writes; another program may have changed it",
        "ddpjob bundle JOB makes a new one; a later release of ddpjob reads bundles of this one",
    )
