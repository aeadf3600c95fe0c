"""The file of a bundle: a zip with a manifest, written whole or not at all."""

import json
import os
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from ddpjob.api.model import WireModel
from ddpjob.client.bundle.redaction import Redaction
from ddpjob.client.snapshot import Snapshot
from ddpjob.errors import DDPJobError

MANIFEST = "manifest.json"
FORMAT = 2
"""Of the files in a bundle."""


class Manifest(WireModel):
    """What a bundle holds."""

    format: int
    """Version of the form of the bundle."""
    recorded: str
    """When the job was read, by the clock of the API server."""
    place: Literal["machine", "cluster"]
    """Where the job is: a job of this machine, or of a cluster."""
    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    state: str
    """State of the job."""
    versions: dict[str, str]
    """Versions of programs and of the cluster."""
    redaction: Redaction
    """What was removed."""
    files: dict[str, int]
    """The bytes of each other file, by its path."""
    unread: dict[str, str]
    """Why something is missing, by what it is: no right, no answer, or it does not exist."""
    file: str | None = None
    """Path of the bundle; in the output of the command, not in the bundle."""


def write(path: str | Path, snapshot: Snapshot, redaction: Redaction) -> Manifest:
    """Write a bundle whole or not at all, and return its manifest. An existing file is not overwritten."""
    content, manifest = _encoded(snapshot, redaction)
    try:
        target = Path(path).expanduser()
        with open(target, "xb", opener=_private) as file:  # fails for a link, too
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
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}",
            "the directory does not exist, or is not yours",
            "name another file",
        ) from error
    return manifest


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _encoded(snapshot: Snapshot, redaction: Redaction) -> tuple[bytes, Manifest]:
    """Return the bytes of the zip, and its manifest."""
    files = dict(_files(snapshot))
    meta, status = snapshot.job["metadata"], snapshot.job.get("status") or {}
    manifest = Manifest(
        format=FORMAT,
        recorded=snapshot.now.isoformat().replace("+00:00", "Z"),
        place="cluster" if snapshot.is_run is None else "machine",
        job=str(meta["name"]),
        namespace=str(meta["namespace"]),
        state=str(status.get("state") or "Pending"),
        versions=dict(snapshot.versions),
        redaction=redaction,
        files={path: len(content) for path, content in files.items()},
        unread=dict(sorted(snapshot.unread.items())),
    )
    target = BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {MANIFEST: _json(manifest.wire()), **files}.items():
            info = zipfile.ZipInfo(path, snapshot.now.timetuple()[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o600 << 16
            archive.writestr(info, content)
    return target.getvalue(), manifest


def _files(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    yield "job.json", _json(snapshot.job)
    lists = {
        "pods": snapshot.pods,
        "others": snapshot.others,
        "events": snapshot.events,
        "operators": snapshot.operators,
    }
    for name, objects in lists.items():
        if objects:
            yield f"{name}.json", _json({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    if snapshot.claims:
        yield "claims.json", _json(dict(snapshot.claims))
    if snapshot.operator_log:
        yield "operator.log", snapshot.operator_log.encode(errors="replace")
    for pod, text in snapshot.logs.items():
        yield f"logs/{pod}.log", text.encode(errors="replace")


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(errors="replace")
