"""The image of a cluster's nodes: kind's default, or one built here where no registry is reachable.

The image built here contains everything that a cluster starts with (see node/): Debian's containerd, the Kubernetes
programs built from source, and the control plane's images as archives.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from tests.kind.base_images import build_arguments, build_debian_image, debian_tag, registry_reachable
from tests.kind.cache import cache_dir, digest, forget_unused, locked, scratch_folder, source_files
from tests.kind.command import step
from tests.kind.docker import Engine, docker, image_id
from tests.kind.toolchain import KUBERNETES_VERSION, ToolchainError, binary

_NODE = Path(__file__).parent / "node"

# The image names that kubeadm 1.34 uses (cmd/kubeadm/app/constants), and the program in each image.
_KUBE_PROXY = f"registry.k8s.io/kube-proxy:{KUBERNETES_VERSION}"
_PAUSE = "registry.k8s.io/pause:3.10.1"
_COREDNS = "registry.k8s.io/coredns/coredns:v1.12.1"
_STATIC_IMAGES = {
    _PAUSE: "pause",
    _COREDNS: "coredns",
    "registry.k8s.io/etcd:3.6.5-0": "etcd",
    **{
        f"registry.k8s.io/{name}:{KUBERNETES_VERSION}": name
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    },
}
_ON_ALL_NODES = (_PAUSE, _KUBE_PROXY, _COREDNS)
_ON_CONTROL_PLANE = tuple(tag for tag in _STATIC_IMAGES if tag not in _ON_ALL_NODES)
_NODE_PROGRAMS = ("kubeadm", "kubelet", "kubectl", "runc-reduced")


def node_image(engine: Engine) -> str | None:
    """Return the node image for kind, or None for kind's default.

    Raises ToolchainError if the image has to be built here and is not.
    """
    chosen = os.environ.get("DDPJOB_NODE_IMAGE")
    if chosen:
        return chosen
    if registry_reachable():
        return None
    tag = f"ddpjob/node:{KUBERNETES_VERSION}-{_key(_programs())}"
    if image_id(tag, engine=engine) is None:
        raise ToolchainError("the node image is not built. Build it with: python -m tests.kind prepare node-image")
    return tag


def node_programs() -> list[str]:
    """Return the names of the programs that the node image is built from; none if it is not built here."""
    if os.environ.get("DDPJOB_NODE_IMAGE") or registry_reachable():
        return []
    return sorted({*_NODE_PROGRAMS, *_STATIC_IMAGES.values(), "kube-proxy"})


def _programs() -> dict[str, Path]:
    return {name: binary(name) for name in node_programs()}


def _key(programs: dict[str, Path]) -> str:
    # A program's path contains the digest of its inputs.
    paths = (str(path.relative_to(cache_dir())) for path in programs.values())
    return digest(debian_tag(), *paths, files=[*source_files(_NODE), Path(__file__)])


def build_node_image(engine: Engine) -> None:
    """Build the node image or load it from the cache, if it is needed and the engine does not have it.

    Its programs must be built already. Raises ToolchainError or CommandError.
    """
    programs = _programs()
    if not programs:
        return
    debian = build_debian_image(engine)
    key = _key(programs)
    tag = f"ddpjob/node:{KUBERNETES_VERSION}-{key}"
    archive = cache_dir() / "images" / f"node-{key}.tar"
    with locked("node-image"):
        if archive.exists():
            archive.touch()
        if image_id(tag, engine=engine) is not None:
            return
        if archive.exists():
            with step("loading the node image from the cache"):
                docker("load", "--input", archive, engine=engine, timeout=1200)
            if image_id(tag, engine=engine) is not None:
                return
        with step("building the node image"):
            _build(engine, debian, programs, tag)
            _save(engine, [tag], archive)
        forget_unused(archive.parent)
        _remove_other_tags(engine, tag)


def _remove_other_tags(engine: Engine, kept: str) -> None:
    # A gigabyte each. An older checkout loads its image from the archive again.
    for tag in docker("images", "--format", "{{.Repository}}:{{.Tag}}", "ddpjob/node", engine=engine).stdout.split():
        if tag != kept:
            docker("rmi", tag, engine=engine, check=False)  # refused while a cluster runs on it


def _build(engine: Engine, debian: str, programs: dict[str, Path], tag: str) -> None:
    with scratch_folder() as context:
        for source in _NODE.iterdir():
            shutil.copy(source, context)
        cni = context / "default-cni.yaml"
        cni.write_text(cni.read_text().replace("KUBERNETES_VERSION", KUBERNETES_VERSION))
        (context / "version").write_text(KUBERNETES_VERSION)
        for image, program in _STATIC_IMAGES.items():
            _import_static_image(engine, image, programs[program], context)
        _build_kube_proxy(engine, debian, programs["kube-proxy"])
        (context / "images").mkdir()
        _save(engine, _ON_ALL_NODES, context / "images" / "all-nodes.tar")
        _save(engine, _ON_CONTROL_PLANE, context / "images" / "control-plane.tar")
        (context / "bin").mkdir()
        for name in _NODE_PROGRAMS:
            shutil.copy(programs[name], context / "bin")
        docker(
            "build",
            *build_arguments(engine),
            "--build-arg",
            f"DEBIAN={debian}",
            "--tag",
            tag,
            context,
            engine=engine,
            timeout=3600,
        )


def _import_static_image(engine: Engine, image: str, program: Path, scratch: Path) -> None:
    """Import an image that contains one static program and nothing else."""
    # kubeadm's manifests name the program without a path, CoreDNS's give arguments only: set PATH and ENTRYPOINT.
    archive = scratch / "image.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(program, arcname=f"usr/local/bin/{program.name}")
    changes = ["--change", "ENV PATH=/usr/local/bin", "--change", f'ENTRYPOINT ["/usr/local/bin/{program.name}"]']
    docker("import", *changes, archive, image, engine=engine, timeout=120)
    archive.unlink()


def _build_kube_proxy(engine: Engine, debian: str, program: Path) -> None:
    with scratch_folder() as context:
        shutil.copy(program, context)
        dockerfile = str(_NODE / "kube-proxy.Dockerfile")
        arguments = ["--build-arg", f"DEBIAN={debian}", "--tag", _KUBE_PROXY, "--file", dockerfile]
        docker("build", *build_arguments(engine), *arguments, context, engine=engine, timeout=3600)


def _save(engine: Engine, tags: list[str] | tuple[str, ...], archive: Path) -> None:
    archive.parent.mkdir(exist_ok=True)
    unfinished = archive.with_suffix(".unfinished")
    docker("save", "--output", unfinished, *tags, engine=engine, timeout=600)
    unfinished.replace(archive)
