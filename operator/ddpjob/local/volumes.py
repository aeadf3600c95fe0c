"""The volumes of one pod as directories of this machine, and where each container finds its mounts.

Nothing is mounted: containers are told the directories instead (``translate``), so that no privilege is needed.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ddpjob.cluster.base import Json
from ddpjob.local.references import ConfigError, Sources, expand, field_value, resource_value

SHARED_MEMORY = Path("/dev/shm")
_FILES = ("configMap", "secret", "downwardAPI", "projected")
_EMPTY, _FILLED = "emptydir-", "volume-"


class Volumes:
    """Directories of one pod's volumes. ``folder``: the pod's own; ``claim_directory``: of a claim by name."""

    def __init__(self, pod: Json, folder: Path, sources: Sources, claim_directory: Callable[[str], Path]) -> None:
        self._pod = pod
        self._folder = folder
        self._sources = sources
        self._claim_directory = claim_directory
        self._places: dict[str, Path] = {}
        self._own: list[Path] = []

    def prepare(self) -> None:
        """Make and fill what is not there yet. Raises ``ConfigError`` for what this machine cannot offer."""
        for volume in self._pod["spec"].get("volumes") or ():
            if self._is_needed(volume["name"]):
                self._places[volume["name"]] = self._place(volume)

    def clean_up(self) -> None:
        """Remove what belongs to the pod alone; what lies on claims and host paths stays."""
        for path in self._own:
            shutil.rmtree(path, ignore_errors=True)

    def paths(self, container: Json, values: Mapping[str, str]) -> dict[str, str]:
        """Mount paths of a container and what they stand for. Raises ``ConfigError`` for a subPath that leads out."""
        found: dict[str, str] = {}
        for mount in container.get("volumeMounts") or ():
            if Path(mount["mountPath"]) != SHARED_MEMORY:
                found[mount["mountPath"]] = str(self._mounted(mount, values))
        return found

    def _is_needed(self, name: str) -> bool:
        """Shared memory is the machine's own: a volume that is mounted there and nowhere else needs no place."""
        containers = [*self._pod["spec"]["containers"], *self._pod["spec"].get("initContainers", ())]
        mounts = [m for c in containers for m in c.get("volumeMounts") or () if m["name"] == name]
        return any(Path(mount["mountPath"]) != SHARED_MEMORY for mount in mounts)

    def _mounted(self, mount: Json, values: Mapping[str, str]) -> Path:
        place = self._places.get(mount["name"])
        if place is None:
            raise ConfigError(f'volume mount "{mount["name"]}": the pod has no volume of that name')
        below = mount.get("subPath") or expand(mount.get("subPathExpr") or "", values)
        if not below:
            return place
        path = place / below
        if below.startswith("/") or ".." in below.split("/") or not path.resolve().is_relative_to(place.resolve()):
            raise ConfigError(f'failed to prepare subPath "{below}" of volume "{mount["name"]}": it leads out of it')
        if not path.exists():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _place(self, volume: Json) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self._made(self._claim_directory(claim["claimName"]), volume)
        if "emptyDir" in volume:
            return self._empty_directory(volume)
        if host := volume.get("hostPath"):
            path = Path(host["path"])
            return self._made(path, volume) if host.get("type") == "DirectoryOrCreate" else path
        if kind := next((kind for kind in _FILES if kind in volume), None):
            return self._files(volume, kind)
        kinds = ", ".join(key for key in volume if key != "name")
        raise ConfigError(f'volume "{volume["name"]}": {kinds} cannot be had on one machine: use a claim or hostPath')

    def _made(self, path: Path, volume: Json) -> Path:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{path} cannot be made: {error.strerror}"
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
        """Name, content and mode of every file of one source."""
        ((kind, source),) = part.items()
        if kind == "downwardAPI":
            for item in source.get("items") or ():
                yield item["path"], self._field(item).encode(), item.get("mode")
            return
        if kind not in ("configMap", "secret"):
            raise ConfigError(f"{kind} needs a cluster")
        data = self._sources.data("Secret" if kind == "secret" else "ConfigMap", source)
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
    """Of our directories in memory, with the PID namespace: a container that shares /dev/shm counts its own pids."""
    return f"ddpjob-{Path('/proc/self/ns/pid').stat().st_ino}-"


def remove_own(folder: Path) -> None:
    """The volumes that a pod had for itself, secrets among them, after a run that could not clean up."""
    for prefix in (_EMPTY, _FILLED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def sweep_shared_memory() -> None:
    """Remove what runs that were killed left in memory; directories of other users stay where they are."""
    prefix = memory_prefix()
    for path in SHARED_MEMORY.glob(f"{prefix}*-*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
