"""A kind cluster for tests and development: one control plane, two workers, one host folder shared by all of them.

`up()` returns a cluster that is ready for pods, reusing a healthy one; `down()` leaves nothing of it.
A `Cluster` runs kubectl, loads images into its nodes and makes volumes that all nodes share.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kind import cluster_config
from tests.kind.cache import cache_dir, digest, locked
from tests.kind.command import CommandError, run, step, wait_until
from tests.kind.docker import Engine, docker, ensure_engine, image_id, running_engine
from tests.kind.node_image import node_image
from tests.kind.toolchain import binary

DEFAULT_NAME = "ddpjob"

_CREATE_SECONDS = 600.0
_READY_SECONDS = 240.0
# A live API server lists nodes in milliseconds; a cluster that needs longer is not worth keeping.
_HEALTH_SECONDS = 15.0


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


def up(name: str = DEFAULT_NAME, *, install: bool | None = None) -> Cluster:
    """A cluster of that name that is ready: nodes Ready, DNS answering.

    ``install`` as in docker.ensure_engine(). Raises DockerUnavailableError, ToolchainError or CommandError.
    """
    engine = ensure_engine(install=install)
    cluster = _described(name)
    image = node_image(engine)
    cluster.shared_dir.mkdir(parents=True, exist_ok=True)
    config = cluster_config.kind_config(cluster.shared_dir, cluster_config.mnist_dir())
    inputs = digest(config, image or "", str(binary("kind").parent.name))
    note = _folder(name) / "inputs"
    with locked(f"cluster-{name}"):
        if note.exists() and note.read_text() == inputs and _healthy(cluster):
            return cluster
        with step(f"creating the kind cluster {name}"):
            _delete(engine, name)
            cluster.shared_dir.mkdir(parents=True)
            _create(engine, cluster, config, image)
            if image is not None and image.startswith("ddpjob/node:"):
                _answer_only_cluster_names(cluster)
            _wait_ready(engine, cluster)
        note.write_text(inputs)
    return cluster


def down(name: str = DEFAULT_NAME) -> None:
    """Delete the cluster of that name and its shared folder, if there is one. The Docker engine goes on."""
    engine = running_engine()
    with locked(f"cluster-{name}"):
        if engine is not None:
            _delete(engine, name)
            # Docker refuses while another cluster is in it. On an installed engine it may be of use to its owner.
            if engine.started_by_us:
                docker("network", "rm", "kind", engine=engine, check=False)
        shutil.rmtree(_folder(name), ignore_errors=True)


def find(name: str = DEFAULT_NAME) -> Cluster | None:
    """The cluster of that name if it is up and healthy; starts nothing."""
    if running_engine() is None:
        return None
    cluster = _described(name)
    return cluster if _healthy(cluster) else None


def _folder(name: str) -> Path:
    return cache_dir() / "kind" / name


def _described(name: str) -> Cluster:
    return Cluster(name, _folder(name) / "kubeconfig", _folder(name) / "shared")


def _healthy(cluster: Cluster) -> bool:
    if not cluster.kubeconfig.exists():
        return False
    try:
        listed = cluster.kubectl("get", "nodes", "--output=json", timeout=_HEALTH_SECONDS).stdout
    except CommandError:
        return False
    return cluster_config.ready_nodes(json.loads(listed)) == set(cluster.nodes)


def _delete(engine: Engine, name: str) -> None:
    # Also what a killed `kind create` left: kind finds a cluster by its containers' labels, whole or not.
    kubeconfig = _described(name).kubeconfig
    run(
        [binary("kind"), "delete", "cluster", "--name", name, "--kubeconfig", kubeconfig],
        env=engine.environment,
        timeout=180,
    )
    shutil.rmtree(_folder(name), ignore_errors=True)


def _create(engine: Engine, cluster: Cluster, config: str, image: str | None) -> None:
    command: list[str | Path] = [
        binary("kind"),
        "create",
        "cluster",
        "--name",
        cluster.name,
        "--kubeconfig",
        cluster.kubeconfig,
        "--config",
        "-",
        "--retain",
    ]
    if image is not None:
        command += ["--image", image]
    with _logs_on_failure(engine, cluster):
        run(command, env=engine.environment, stdin=config, timeout=_CREATE_SECONDS)


@contextmanager
def _logs_on_failure(engine: Engine, cluster: Cluster) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        logs = cache_dir() / "kind" / f"{cluster.name}-failed"
        shutil.rmtree(logs, ignore_errors=True)
        for node in cluster.nodes:
            (logs / node).mkdir(parents=True)
            docker("cp", f"{node}:/var/log", logs / node, engine=engine, timeout=60, check=False)
            (logs / node / "container.log").write_text(docker("logs", node, engine=engine, check=False).stdout)
        raise CommandError(
            f"the kind cluster {cluster.name} did not start; its nodes' logs are in {logs}\n{error}"
        ) from error


def _answer_only_cluster_names(cluster: Cluster) -> None:
    """Take forwarding out of CoreDNS.

    Our nodes' resolver is Docker's at 127.0.0.11, which inside a pod is the pod itself: CoreDNS would ask itself,
    notice the loop and exit.
    """
    namespace = "--namespace=kube-system"
    config_map = json.loads(cluster.kubectl(namespace, "get", "configmap", "coredns", "--output=json").stdout)
    corefile = cluster_config.without_forwarding(config_map["data"]["Corefile"])
    cluster.kubectl(namespace, "patch", "configmap", "coredns", "--patch", json.dumps({"data": {"Corefile": corefile}}))
    # One replica is enough for tests. The restart makes one read the new file where the first has begun already.
    cluster.kubectl(namespace, "scale", "deployment", "coredns", "--replicas=1")
    cluster.kubectl(namespace, "rollout", "restart", "deployment", "coredns")


def _wait_ready(engine: Engine, cluster: Cluster) -> None:
    wait_until(f"all nodes of {cluster.name} are Ready", lambda: _healthy(cluster), timeout=_READY_SECONDS)
    server = cluster.kubectl("-n=kube-system", "get", "service", "kube-dns", "-o=jsonpath={.spec.clusterIP}").stdout
    for node in cluster.workers:
        docker("cp", binary("lookup"), f"{node}:/usr/local/bin/lookup", engine=engine)
        # Through the service's address: that shows kube-proxy's rules and the pod network on the way.
        question = ["exec", node, "lookup", server, "kubernetes.default.svc.cluster.local."]
        wait_until(
            f"DNS answers on {node}",
            lambda: docker(*question, engine=engine, timeout=10).stdout,  # noqa: B023 - called before the next round
            timeout=_READY_SECONDS,
        )
