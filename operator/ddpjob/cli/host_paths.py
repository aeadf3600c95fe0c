"""Directories of this machine that serve as a job's claims, mounts and checkpoint directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ddpjob.engine.desired import Job
from ddpjob.local.state import JobFolder, StateFolder


@dataclass(frozen=True)
class HostPaths:
    """Paths of one job. volumes: claim name to the directory that the user named for it."""

    job: Job
    folder: StateFolder
    volumes: Mapping[str, Path] = field(default_factory=dict)

    @property
    def record(self) -> JobFolder:
        """The job's folder in the state folder."""
        return self.folder.job(self.job.namespace, self.job.name)

    def claim(self, name: str) -> Path:
        """Return the directory that serves as a claim."""
        return self.volumes[name] if name in self.volumes else self.folder.volume(self.job.namespace, name)

    def checkpoints(self) -> Path | None:
        """Return the directory that the trainer sees as DDPJOB_CHECKPOINT_DIR; None without ``checkpoint``."""
        checkpoint = self.job.spec.checkpoint
        return self.claim(self.job.claim) / (checkpoint.sub_path or "") if checkpoint is not None else None

    def mounts(self) -> dict[str, Path]:
        """Return mount path to directory, for ``checkpoint`` and ``data``."""
        found: dict[str, Path] = {}
        checkpoint, data, directory = self.job.spec.checkpoint, self.job.spec.data, self.checkpoints()
        if checkpoint is not None and directory is not None:
            found[checkpoint.mount_path] = directory
        if data is not None:
            found[data.mount_path] = self.claim(data.claim_name)
        return found

    def on_host(self, path: str) -> Path:
        """Return where a path of the trainer is on this machine."""
        for mount, directory in self.mounts().items():
            if PurePosixPath(path).is_relative_to(mount):
                return directory / PurePosixPath(path).relative_to(mount)
        return Path(path)
