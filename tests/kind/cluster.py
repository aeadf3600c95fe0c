"""A kind cluster for tests and development: one control plane, workers, one host folder that all nodes share.

`up()` creates a cluster or finds a healthy one, `down()` deletes it. A `Cluster` runs kubectl, loads images into its
nodes and finds the folders of volumes. Programs and images must be prepared (prepare.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kind import cluster_config, node_store
from tests.kind.cache import cache_dir, digest, locked
from tests.kind.command import CommandError, run, step, wait_until
from tests.kind.docker import Engine, docker, ensure_engine, image_id, running_engine
from tests.kind.node_image import node_image
from tests.kind.toolchain import binary

DEFAULT_NAME = "ddpjob"
WORKERS = 2

_CREATE_SECONDS = 600.0
_READY_SECONDS = 240.0
# A healthy API server lists nodes in milliseconds; a cluster that needs longer is created again.
_HEALTH_SECONDS = 15.0


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    name: str
    kubeconfig: Path
    shared_dir: Path
    """The folder on this machine; nodes mount it at cluster_config.SHARED_MOUNT."""
    number_of_workers: int = WORKERS

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of the nodes that pods run on; their containers have the same names."""
        numbers = ("", *range(2, self.number_of_workers + 1))
        return tuple(f"{self.name}-worker{number}" for number in numbers)

    @property
    def control_plane(self) -> str:
        """Return the name of the node that no pods of tests run on."""
        return f"{self.name}-control-plane"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of all nodes."""
        return (self.control_plane, *self.workers)

    def kubectl(
        self,
        *args: str | Path,
        input: str | None = None,  # noqa: A002 - as in subprocess.run
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl on this cluster with ``input`` as standard input. Raises CommandError (see command.run)."""
        return run(
            [binary("kubectl"), "--kubeconfig", self.kubeconfig, *args], timeout=timeout, stdin=input, check=check
        )

    def load_image(self, tag: str) -> None:
        """Load a local image into every worker that does not have it under the same id. Raises CommandError."""
        engine = ensure_engine()
        wanted = image_id(tag, engine=engine)
        if wanted is None:
            raise CommandError(f"there is no local image {tag}. Build it with: python -m tests.kind images")
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
            run(command, env=engine.environment, timeout=300)
            for node in missing:
                docker(
                    "exec", "--interactive", node, "cp", "/dev/stdin", _loaded_note(tag), engine=engine, stdin=wanted
                )

    def _loaded(self, engine: Engine, node: str, tag: str) -> str:
        return docker("exec", node, "cat", _loaded_note(tag), engine=engine, check=False).stdout.strip()

    @property
    def initial(self) -> Path:
        """The folder on this machine whose content is copied into each new volume; it may not exist."""
        return self.shared_dir / "initial"

    def folder_of(self, volume: Mapping[str, Any]) -> Path:
        """Return the folder on this machine of a PersistentVolume of the default class."""
        return self.shared_dir / Path(volume["spec"]["hostPath"]["path"]).relative_to(cluster_config.SHARED_MOUNT)


def _loaded_note(tag: str) -> str:
    return f"{cluster_config.CONTAINERD}/{node_store.note_of(tag)}"


def up(name: str = DEFAULT_NAME, *, workers: int = WORKERS, images: Sequence[str] = ()) -> Cluster:
    """Return a cluster with all nodes Ready and DNS answering; create it unless a healthy one of that name exists.

    A cluster with another number of workers is replaced. images: tags of local images that the nodes of a new cluster
    begin with where that is possible; ``load_image`` loads what they lack. Raises DockerUnavailableError,
    ToolchainError or CommandError.
    """
    engine = ensure_engine(install=False)
    cluster = _described(name, workers)
    image = node_image(engine)
    cluster.shared_dir.mkdir(parents=True, exist_ok=True)
    is_built_here = image is not None and image.startswith("ddpjob/node:")
    stores = [_folder(name) / f"containerd-{node}" for node in cluster.nodes]
    if not (images and is_built_here and engine.started_by_us):
        stores = []
    config = cluster_config.kind_config(cluster.shared_dir, cluster_config.mnist_dir(), workers, stores)
    programs = [str(binary(name).parent.name) for name in ("kind", "provisioner")]
    inputs = digest(config, cluster_config.API_SERVER_PATCH, image or "", *programs, files=[cluster_config.PROVISIONER])
    note = _folder(name) / "inputs"
    with locked(f"cluster-{name}"):
        if note.exists() and note.read_text() == inputs and _healthy(cluster):
            return cluster
        with step(f"creating the kind cluster {name}"):
            _delete(engine, name)
            patches = cluster.shared_dir / cluster_config.POD_PATCHES
            patches.mkdir(parents=True)
            (patches / "kube-apiserver+strategic.yaml").write_text(cluster_config.API_SERVER_PATCH)
            if stores and image is not None:
                ids = {tag: image_id(tag, engine=engine) or "" for tag in images}
                store = node_store.filled(engine, image, ids)
                for target in stores:
                    node_store.copy(store, target)
            _create(engine, cluster, config, image)
            if is_built_here:
                _answer_only_cluster_names(cluster)
            _install_provisioner(engine, cluster)
            _wait_ready(engine, cluster)
        _workers_note(name).write_text(str(workers))
        note.write_text(inputs)
    return cluster


def down(name: str = DEFAULT_NAME) -> None:
    """Delete the cluster of that name and its shared folder, if they exist. The Docker engine keeps running."""
    engine = running_engine()
    with locked(f"cluster-{name}"):
        if engine is not None:
            with step(f"deleting the kind cluster {name}"):
                _delete(engine, name)
            # Docker refuses this while another cluster uses it. An installed engine keeps its network.
            if engine.started_by_us:
                docker("network", "rm", "kind", engine=engine, check=False)
        shutil.rmtree(_folder(name), ignore_errors=True)


def find(name: str = DEFAULT_NAME) -> Cluster | None:
    """Return the cluster of that name if it is healthy, else None. Starts nothing."""
    if running_engine() is None:
        return None
    note = _workers_note(name)
    cluster = _described(name, int(note.read_text()) if note.exists() else WORKERS)
    return cluster if _healthy(cluster) else None


def _folder(name: str) -> Path:
    return cache_dir() / "kind" / name


def _workers_note(name: str) -> Path:
    return _folder(name) / "workers"


def _described(name: str, workers: int) -> Cluster:
    return Cluster(name, _folder(name) / "kubeconfig", _folder(name) / "shared", workers)


def _healthy(cluster: Cluster) -> bool:
    if not cluster.kubeconfig.exists():
        return False
    try:
        listed = cluster.kubectl("get", "nodes", "--output=json", timeout=_HEALTH_SECONDS).stdout
    except CommandError:
        return False
    return cluster_config.ready_nodes(json.loads(listed)) == set(cluster.nodes)


def _delete(engine: Engine, name: str) -> None:
    # Also deletes what a killed `kind create` left: kind finds a cluster by the labels of its containers.
    kubeconfig = _folder(name) / "kubeconfig"
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
    """Remove forwarding from CoreDNS.

    The nodes' resolver is Docker's at 127.0.0.11, which inside a pod is the pod itself: CoreDNS would query itself,
    detect the loop and exit.
    """
    namespace = "--namespace=kube-system"
    config_map = json.loads(cluster.kubectl(namespace, "get", "configmap", "coredns", "--output=json").stdout)
    corefile = cluster_config.without_forwarding(config_map["data"]["Corefile"])
    cluster.kubectl(namespace, "patch", "configmap", "coredns", "--patch", json.dumps({"data": {"Corefile": corefile}}))
    # One replica is enough for tests. The restart makes CoreDNS read the new file if it runs already.
    cluster.kubectl(namespace, "scale", "deployment", "coredns", "--replicas=1")
    cluster.kubectl(namespace, "rollout", "restart", "deployment", "coredns")


def _install_provisioner(engine: Engine, cluster: Cluster) -> None:
    """Make the default StorageClass provide ReadWriteMany volumes. Claims wait until its pod runs."""
    docker("cp", binary("provisioner"), f"{cluster.control_plane}:/usr/local/bin/provisioner", engine=engine)
    image = "jsonpath={.spec.template.spec.containers[0].image}"
    present = cluster.kubectl("--namespace=kube-system", "get", "daemonset", "kube-proxy", f"--output={image}").stdout
    cluster.kubectl("apply", "--filename=-", input=cluster_config.provisioner(present))


def _wait_ready(engine: Engine, cluster: Cluster) -> None:
    wait_until(f"all nodes of {cluster.name} are Ready", lambda: _healthy(cluster), timeout=_READY_SECONDS)
    server = cluster.kubectl("-n=kube-system", "get", "service", "kube-dns", "-o=jsonpath={.spec.clusterIP}").stdout
    for node in cluster.workers:
        docker("cp", binary("lookup"), f"{node}:/usr/local/bin/lookup", engine=engine)
        # Through the service's address, which also checks kube-proxy's rules and the pod network.
        question = ["exec", node, "lookup", server, "kubernetes.default.svc.cluster.local."]
        wait_until(
            f"DNS answers on {node}",
            lambda: docker(*question, engine=engine, timeout=10).stdout,  # noqa: B023 - called before the next round
            timeout=_READY_SECONDS,
        )
