"""Where on this machine the things are that a job knows by its own names: claims, mounts, checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ddpjob.api import names
from ddpjob.local.state import JobFolder, StateFolder

Json = dict[str, Any]


def in_template(job: Json, part: str) -> list[Json]:
    """A list of the job's pod template. The API takes anything there; what is no object is left out."""
    spec = (job["spec"].get("template") or {}).get("spec") or {}
    found = spec.get(part)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def claim_of(volume: Json) -> str | None:
    """The claim that a volume of a pod is, if it is one."""
    source = volume.get("persistentVolumeClaim")
    name = source.get("claimName") if isinstance(source, dict) else None
    return name if isinstance(name, str) else None


@dataclass(frozen=True)
class HostPaths:
    """Paths of one job. volumes: claim name to the directory that the user gave in its place."""

    job: Json
    folder: StateFolder
    volumes: Mapping[str, Path] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.job["metadata"].get("namespace") or "default")

    @property
    def record(self) -> JobFolder:
        return self.folder.job(self.namespace, self.name)

    def claim(self, name: str) -> Path:
        """The directory that serves as a claim."""
        return self.volumes[name] if name in self.volumes else self.folder.volume(self.namespace, name)

    def own_claim(self) -> str | None:
        """The claim that is made for the job, where it asks for one."""
        checkpoint = self.job["spec"].get("checkpoint") or {}
        return names.claim_name(self.name) if checkpoint.get("claimTemplate") is not None else None

    def claims(self) -> list[str]:
        """Every claim that the job mounts, in order of mention."""
        found = [claim_of(volume) for volume in in_template(self.job, "volumes")]
        found += [(self.job["spec"].get(part) or {}).get("claimName") for part in ("checkpoint", "data")]
        return list(dict.fromkeys(name for name in [self.own_claim(), *found] if name))

    def checkpoints(self) -> Path | None:
        """The directory that the trainer knows as DDPJOB_CHECKPOINT_DIR."""
        checkpoint = self.job["spec"].get("checkpoint")
        if not checkpoint:
            return None
        claim = checkpoint.get("claimName") or names.claim_name(self.name)
        return self.claim(claim) / (checkpoint.get("subPath") or "")

    def mounts(self) -> dict[str, Path]:
        """Mount path to directory, for the volumes of the job's short fields."""
        found: dict[str, Path] = {}
        checkpoints, data = self.checkpoints(), self.job["spec"].get("data")
        if checkpoints is not None:
            found[self.job["spec"]["checkpoint"].get("mountPath", names.DEFAULT_CHECKPOINT_PATH)] = checkpoints
        if data:
            found[data.get("mountPath", names.DEFAULT_DATA_PATH)] = self.claim(data["claimName"])
        return found

    def on_host(self, path: str) -> Path:
        """Where a path of the trainer lies here."""
        for mount, directory in self.mounts().items():
            if PurePosixPath(path).is_relative_to(mount):
                return directory / PurePosixPath(path).relative_to(mount)
        return Path(path)
