"""A job whose pods have files of this machine: a Secret with an archive, and an init container that unpacks it.

The archive is unpacked rather than mounted, because a mounted Secret is read-only, and programs write to their
working directory. The init container runs the job's own image, which each pod needs anyway and which has Python.
"""

import base64
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, element
from ddpjob.client.job import OF_FUNCTIONS, DDPJob
from ddpjob.client.workdir.archive import Archive, pack
from ddpjob.client.workdir.files import SourceFile, existing, files_of
from ddpjob.engine.merge import merge
from ddpjob.errors import InvalidJobError

_KEY = "files.tar.gz"
_ARCHIVE = f"{names.WORKDIR}-archive"  # volume
_ARCHIVE_PATH = f"/opt/{names.WORKDIR}"
_OF_THE_USER = ("runAsUser", "runAsGroup", "runAsNonRoot")
# For Python from 3.6. The owners in the archive do not exist in the pod, so they are not set.
_UNPACK = f"""\
import sys, tarfile
tarfile.TarFile.chown = lambda *_: None
with tarfile.open("{_ARCHIVE_PATH}/{_KEY}") as archive:
    archive.extractall(sys.argv[1], **({{"filter": "data"}} if hasattr(tarfile, "data_filter") else {{}}))
"""


def with_files(job: DDPJob, workdir: str | Path | None) -> DDPJob:
    """Return the job whose pods have a directory's files, or its script alone, in their working directory.

    ``others`` of the job has the Secret with the files. Without a directory and a script the job is unchanged.

    Raises:
        InvalidJobError: the files cannot be sent, the script is not among them, or a volume is in their place.
    """
    if workdir is not None:
        root = existing(workdir)
        archive = pack(root, [*files_of(root), *_of_function(job.script)])
    elif job.script is not None:
        path = job.script.resolve()
        root = path.parent
        archive = pack(root, _of_function(path) or [SourceFile(path.name, path, path.stat().st_size)])
    else:
        return job
    spec = dict(job.manifest["spec"])
    if job.script is not None:
        script = _sent_script(job.script, root, archive)
        spec["command"] = [script if word == str(job.script) else word for word in spec["command"]]
    place = _place(spec)
    name = names.workdir_name(job.name, archive.digest)
    spec |= {"workingDir": place, "template": _template(spec, place, name)}
    made = _changed(job, job.manifest | {"spec": spec})
    made.others = (*job.others, _secret(job, name, archive))
    return made


def at_directory(job: DDPJob, directory: str | Path) -> DDPJob:
    """Return the job as it runs in a directory of this machine, which takes the place of its ``workingDir``.

    Raises:
        InvalidJobError: there is no such directory.
    """
    path = existing(directory)
    manifest = deepcopy(job.manifest)
    for holder in (manifest["spec"], _trainer(manifest["spec"])):
        holder.pop("workingDir", None)
    made = _changed(job, manifest)
    made.directory = path
    return made


def _changed(job: DDPJob, manifest: Json) -> DDPJob:
    made = DDPJob.from_manifest(manifest)
    made.others, made.directory, made.script = job.others, job.directory, job.script
    return made


def _sent_script(script: Path, root: Path, archive: Archive) -> str:
    """Return the path of the script below the directory that is sent."""
    path = script.resolve()
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else None
    name = next((file.name for file in _of_function(script)), name)
    if name is None:
        raise InvalidJobError(
            f"{script} is not in --workdir {root}",
            "the pods have the files of that directory alone",
            "name the directory that holds the script",
        )
    if name not in archive.names:
        raise InvalidJobError(
            f"{script} is not sent with --workdir {root}", "a .gitignore names it", f"add !{name} to the .gitignore"
        )
    return name


def _of_function(script: Path | None) -> list[SourceFile]:
    """Return the file of ``DDPJob.from_function``, which is sent beside those of the directory."""
    if script is None or script.parent.name != OF_FUNCTIONS:
        return []
    return [SourceFile(f"{OF_FUNCTIONS}/{script.name}", script, script.stat().st_size)]


def _place(spec: Json) -> str:
    """Return where the trainer has the files: in its working directory."""
    trainer = _trainer(spec)
    path = str(spec.get("workingDir") or trainer.get("workingDir") or names.WORKDIR_PATH).rstrip("/")
    if path in _mounted(spec, trainer) or not path:
        raise InvalidJobError(
            f"the files cannot be put into {path or '/'}, the workingDir of the job",
            "a volume is mounted there" if path else "they would hide the programs of the image",
            f"set another workingDir, or none: it is then {names.WORKDIR_PATH}",
        )
    return path


def _mounted(spec: Json, trainer: Json) -> Iterator[str]:
    """Yield the paths of the trainer's other volumes."""
    yield from ("/dev/shm", names.LAUNCHER_PATH)
    for volume, default in (("checkpoint", "/checkpoints"), ("data", "/data")):
        if volume in spec:
            yield str(spec[volume].get("mountPath", default)).rstrip("/")
    for mount in trainer.get("volumeMounts") or ():
        if mount.get("name") != names.WORKDIR:
            yield str(mount.get("mountPath")).rstrip("/")


def _trainer(spec: Json) -> Json:
    pod = (spec.get("template") or {}).get("spec") or {}
    return element(pod.get("containers"), "name", names.TRAINER_CONTAINER)


def _template(spec: Json, path: str, secret: str) -> Json:
    trainer = _trainer(spec)
    context = {key: value for key, value in (trainer.get("securityContext") or {}).items() if key in _OF_THE_USER}
    policy = spec.get("imagePullPolicy") or trainer.get("imagePullPolicy")
    init = {
        "name": names.WORKDIR,
        "image": spec.get("image") or trainer.get("image"),
        **({"imagePullPolicy": policy} if policy else {}),
        "command": ["python3", "-I", "-c", _UNPACK, path],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # Limits equal requests, so that a pod of the class Guaranteed remains one; a quota may demand both.
        "resources": {kind: {"cpu": "250m", "memory": "64Mi"} for kind in ("requests", "limits")},
        # What Pod Security "restricted" demands, for every profile of the job, and the user of the trainer.
        "securityContext": context
        | {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": names.WORKDIR, "mountPath": path},
            {"name": _ARCHIVE, "mountPath": _ARCHIVE_PATH, "readOnly": True},
        ],
    }
    mount = {"name": names.TRAINER_CONTAINER, "volumeMounts": [{"name": names.WORKDIR, "mountPath": path}]}
    volumes = [{"name": names.WORKDIR, "emptyDir": {}}, {"name": _ARCHIVE, "secret": {"secretName": secret}}]
    added: Json = {"spec": {"initContainers": [init], "containers": [mount], "volumes": volumes}}
    # Before other init containers, which may need the files; and it replaces what an earlier submission added.
    return merge(merge(added, spec.get("template") or {}), added)


def _secret(job: DDPJob, name: str, archive: Archive) -> Json:
    metadata: dict[str, Any] = {"name": name, "labels": {names.LABEL_JOB_NAME: job.name}}
    if job.namespace:
        metadata["namespace"] = job.namespace
    head = {"apiVersion": names.SECRETS.api_version, "kind": names.SECRETS.kind, "metadata": metadata}
    return head | {"immutable": True, "data": {_KEY: base64.b64encode(archive.data).decode()}}
