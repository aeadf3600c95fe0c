"""A cluster that runs, and what a test needs of it: kubectl, images on its nodes, volumes that all nodes share.

Made by cluster.py.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.kind import cluster_config
from tests.kind.cache import digest
from tests.kind.command import CommandError, run, step
from tests.kind.docker import Engine, docker, ensure_engine, image_id
from tests.kind.toolchain import binary


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    name: str
    kubeconfig: Path
    shared_dir: Path
    """On this machine; the nodes see it at cluster_config.SHARED_MOUNT."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the nodes that pods run on, which are also those of their containers."""
        return (f"{self.name}-worker", f"{self.name}-worker2")

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return (f"{self.name}-control-plane", *self.workers)

    def kubectl(
        self,
        *args: str | Path,
        input: str | None = None,  # noqa: A002 - what subprocess.run calls it
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl on this cluster, with ``input`` as its standard input. Raises CommandError (see command.run)."""
        return run(
            [binary("kubectl"), "--kubeconfig", self.kubeconfig, *args], timeout=timeout, stdin=input, check=check
        )

    def load_image(self, tag: str, *, timeout: float = 300) -> None:
        """Put a local image on every worker that does not have that very image yet. Raises CommandError."""
        engine = ensure_engine()
        wanted = image_id(tag, engine=engine)
        if wanted is None:
            raise CommandError(f"there is no local image {tag}; build it with: python -m tests.kind images")
        missing = [node for node in self.workers if self._loaded(engine, node, tag) != wanted]
        if not missing:
            return
        with step(f"loading {tag} into {len(missing)} workers"):
            command: list[str | Path] = [
                binary("kind"),
                "load",
                "docker-image",
                tag,
                "--name",
                self.name,
                "--nodes",
                ",".join(missing),
            ]
            run(command, env=engine.environment, timeout=timeout)
            for node in missing:
                docker(
                    "exec", "--interactive", node, "cp", "/dev/stdin", _loaded_note(tag), engine=engine, stdin=wanted
                )

    def _loaded(self, engine: Engine, node: str, tag: str) -> str:
        return docker("exec", node, "cat", _loaded_note(tag), engine=engine, check=False).stdout.strip()

    def shared_volume(
        self, name: str, *, storage_class: str = "", claim: tuple[str, str] | None = None, capacity: str = "10Gi"
    ) -> dict[str, object]:
        """Make an empty folder that every node sees and every user may write, and return the PersistentVolume for it.

        Still to be applied. It is ReadWriteMany and survives its claim. ``claim``, a namespace and a name, reserves it
        for that claim. To bind it, a claim names the volume's ``storage_class`` (the default, "", has to be written
        out: left away, the cluster's default class is filled in).
        """
        folder = self.shared_dir / name
        folder.mkdir(parents=True)
        # Trainers run as an unprivileged user, and kubelet changes no owner on a hostPath.
        folder.chmod(0o777)
        return cluster_config.shared_volume(name, storage_class=storage_class, claim=claim, capacity=capacity)


def _loaded_note(tag: str) -> str:
    return f"/kind/loaded-{digest(tag)}"
