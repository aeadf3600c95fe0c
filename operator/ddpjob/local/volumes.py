"""The volumes of one pod as directories of this machine.

Nothing is mounted, so no privilege is needed: ``translate`` replaces mount paths by these directories.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.local import LocalError
from ddpjob.local.references import References
from ddpjob.local.state import make_private

_SHARED_MEMORY = "/dev/shm"


class Volumes:
    """The directories of the volumes that a pod's trainer mounts; the machine's own /dev/shm serves as the pod's.

    folder: the directory for volumes that belong to the pod alone. claim_directory: returns the directory of a claim.
    paths: mount path to directory.

    Raises:
        LocalError: a volume needs a cluster, or refers to an object that does not exist.
    """

    def __init__(
        self, spec: Json, folder: Path, references: References, claim_directory: Callable[[str], Path]
    ) -> None:
        self._folder = folder
        self._references = references
        self._claim_directory = claim_directory
        self._directories: list[Path] = []
        self._files: dict[Path, tuple[bytes, int]] = {}  # once each, also if the volume has several mounts
        self.paths: dict[str, str] = {}
        volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
        mounts = spec["containers"][0].get("volumeMounts") or ()
        try:
            for mount in (mount for mount in mounts if mount["mountPath"].rstrip("/") != _SHARED_MEMORY):
                self.paths[mount["mountPath"]] = str(self._mounted(mount, volumes.get(mount.get("name"), {})))
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # the schema does not declare these fields
            raise _refusal(f"the volumes of spec.template cannot be read: {error!r}") from error

    def prepare(self) -> None:
        """Create and fill the directories."""
        for target, (content, mode) in self._files.items():
            make_private(target.parent)
            target.touch(mode=0o600)
            target.write_bytes(content)
            target.chmod(mode)
        for path in self._directories:
            make_private(path)  # a subPath can be a file; another job may share the claim

    def _mounted(self, mount: Json, volume: Json) -> Path:
        if "subPathExpr" in mount:
            raise _refusal(f"the mount of the volume {mount.get('name')} has a subPathExpr, not a subPath")
        path = _below(self._directory(str(mount.get("name")), volume), mount.get("subPath") or "")
        if "hostPath" not in volume or volume["hostPath"].get("type") == "DirectoryOrCreate":
            self._directories.append(path)
        return path

    def _directory(self, name: str, volume: Json) -> Path:
        own = self._folder / name
        match volume:
            case {"persistentVolumeClaim": {"claimName": str(claim)}}:
                return self._claim_directory(claim)
            case {"hostPath": {"path": str(path)}}:
                return Path(path)
            case {"configMap": {"name": str()} as source}:
                self._files |= _files(own, "ConfigMap", source, self._references)
            case {"secret": {"secretName": str(name)} as source}:
                self._files |= _files(own, "Secret", source | {"name": name}, self._references)
            case {"emptyDir": _}:
                pass
            case _:
                kinds = ", ".join(key for key in volume if key != "name")
                fault = f"is of a kind that needs a cluster: {kinds}" if kinds else "does not exist"
                raise _refusal(f"the volume {name} {fault}")
        return own


def _files(
    directory: Path, kind: str, source: Json, references: References
) -> Iterator[tuple[Path, tuple[bytes, int]]]:
    """Yield path, and content with mode, of the files of a ConfigMap or Secret."""
    data, mode = references.data(kind, source), int(source.get("defaultMode", 0o644))
    mask = 0o700 if kind == "Secret" else 0o777  # all processes of the job belong to this user
    for item in source.get("items") or ({"key": key, "path": key} for key in data):
        for content in references.data(kind, source | {"key": item["key"]}).values():
            yield _below(directory, item["path"]), (content, int(item.get("mode", mode)) & mask)


def _below(directory: Path, path: str) -> Path:
    if path.startswith("/") or ".." in path.split("/"):
        raise _refusal(f"the path {path} leads out of its volume")
    return directory / path


def _refusal(fault: str) -> LocalError:
    return LocalError(
        fault,
        "local mode has the volumes of spec.template.spec.volumes: claims, emptyDir, hostPath, configMap and secret",
        "correct the template, or run the job in a cluster",
    )
