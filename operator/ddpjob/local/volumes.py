"""The volumes of one pod as directories of this machine.

Nothing is mounted, so no privilege is needed: ``translate`` replaces mount paths by these directories.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.local.references import ConfigError, References, expand, field_value, resource_value

SHARED_MEMORY = Path("/dev/shm")
_FILES = ("configMap", "secret", "downwardAPI", "projected")
_EMPTY, _FILLED = "emptydir-", "volume-"


class Volumes:
    """The directories of one pod's volumes.

    folder: the pod's own folder. claim_directory: returns the directory of a claim.
    """

    def __init__(self, pod: Json, folder: Path, references: References, claim_directory: Callable[[str], Path]) -> None:
        self._pod = pod
        self._folder = folder
        self._references = references
        self._claim_directory = claim_directory
        self._directories: dict[str, Path] = {}
        self._own: list[Path] = []

    def prepare(self) -> None:
        """Create and fill the directories. Raises ``ConfigError`` for a volume that needs a cluster."""
        for volume in self._pod["spec"].get("volumes") or ():
            if self._is_needed(volume["name"]):
                self._directories[volume["name"]] = self._directory(volume)

    def clean_up(self) -> None:
        """Remove the volumes that belong to the pod alone; claims and host paths stay."""
        for path in self._own:
            shutil.rmtree(path, ignore_errors=True)

    def paths(self, container: Json, values: Mapping[str, str]) -> dict[str, str]:
        """Return mount path to directory. Raises ``ConfigError`` for a subPath that leads out of its volume."""
        found: dict[str, str] = {}
        for mount in container.get("volumeMounts") or ():
            if Path(mount["mountPath"]) != SHARED_MEMORY:
                found[mount["mountPath"]] = str(self._mounted(mount, values))
        return found

    def _is_needed(self, name: str) -> bool:
        """Return whether a volume is mounted anywhere but at /dev/shm, for which the machine's own is used."""
        containers = [*self._pod["spec"]["containers"], *self._pod["spec"].get("initContainers", ())]
        mounts = [m for c in containers for m in c.get("volumeMounts") or () if m["name"] == name]
        return any(Path(mount["mountPath"]) != SHARED_MEMORY for mount in mounts)

    def _mounted(self, mount: Json, values: Mapping[str, str]) -> Path:
        directory = self._directories.get(mount["name"])
        if directory is None:
            raise ConfigError(f'volume mount "{mount["name"]}": the pod has no volume of that name')
        below = mount.get("subPath") or expand(mount.get("subPathExpr") or "", values)
        if not below:
            return directory
        path = directory / below
        is_inside = path.resolve().is_relative_to(directory.resolve())
        if below.startswith("/") or ".." in below.split("/") or not is_inside:
            raise ConfigError(
                f'failed to prepare subPath "{below}" of volume "{mount["name"]}": it leads out of the volume'
            )
        if not path.exists():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _directory(self, volume: Json) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self._created(self._claim_directory(claim["claimName"]), volume)
        if "emptyDir" in volume:
            return self._empty_directory(volume)
        if host := volume.get("hostPath"):
            path = Path(host["path"])
            return self._created(path, volume) if host.get("type") == "DirectoryOrCreate" else path
        if kind := next((kind for kind in _FILES if kind in volume), None):
            return self._files(volume, kind)
        kinds = ", ".join(key for key in volume if key != "name")
        raise ConfigError(f'volume "{volume["name"]}": {kinds} is not supported in local mode: use a claim or hostPath')

    def _created(self, path: Path, volume: Json) -> Path:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{path} cannot be created: {error.strerror}"
            raise ConfigError(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {reason}') from error
        return path

    def _empty_directory(self, volume: Json) -> Path:
        path = self._folder / f"{_EMPTY}{volume['name']}"
        if volume["emptyDir"].get("medium") == "Memory" and os.access(SHARED_MEMORY, os.W_OK):
            path = SHARED_MEMORY / f"{memory_prefix()}{os.getpid()}-{self._pod['metadata']['uid']}-{volume['name']}"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._own.append(path)
        return path

    def _files(self, volume: Json, kind: str) -> Path:
        path = self._folder / f"{_FILLED}{volume['name']}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)
        self._own.append(path)
        source = volume[kind]
        parts = source.get("sources") or () if kind == "projected" else ({kind: source},)
        try:
            for part in parts:
                for name, content, mode in self._contents(part):
                    target = path / name
                    if ".." in Path(name).parts or (target.is_absolute() and not target.is_relative_to(path)):
                        raise ConfigError(f"{name} leads out of the volume")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
                    target.chmod(mode if mode is not None else source.get("defaultMode", 0o644))
        except ConfigError as error:
            raise ConfigError(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}') from error
        return path

    def _contents(self, part: Json) -> Iterator[tuple[str, bytes, int | None]]:
        """Yield name, content and mode of every file of one source."""
        ((kind, source),) = part.items()
        if kind == "downwardAPI":
            for item in source.get("items") or ():
                yield item["path"], self._field(item).encode(), item.get("mode")
            return
        if kind not in ("configMap", "secret"):
            raise ConfigError(f"{kind} needs a cluster")
        data = self._references.data("Secret" if kind == "secret" else "ConfigMap", source)
        if "items" not in source:
            yield from ((key, value, None) for key, value in data.items())
            return
        for item in source["items"]:
            if item["key"] in data:
                yield item["path"], data[item["key"]], item.get("mode")
            elif not source.get("optional"):
                raise ConfigError(f"references non-existent config key: {item['key']}")

    def _field(self, item: Json) -> str:
        if "fieldRef" in item:
            return field_value(self._pod, item["fieldRef"]["fieldPath"])
        return resource_value(self._pod, {}, item["resourceFieldRef"])


def memory_prefix() -> str:
    """Return the prefix of local mode's directories in /dev/shm.

    It names the PID namespace, because a container that shares /dev/shm has its own pids.
    """
    return f"ddpjob-{Path('/proc/self/ns/pid').stat().st_ino}-"


def remove_private_volumes(folder: Path) -> None:
    """Remove a pod's own volumes, secrets among them, after a run that was killed."""
    for prefix in (_EMPTY, _FILLED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def sweep_shared_memory() -> None:
    """Remove the directories that killed runs left in /dev/shm; those of other users cannot be removed and stay."""
    prefix = memory_prefix()
    for path in SHARED_MEMORY.glob(f"{prefix}*-*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
