"""The programs the tests run for real: Kubernetes, etcd, CoreDNS, Helm and kind, built from pinned Go modules.

`binary("kube-apiserver")` returns the path of an executable, building it on first use. Each folder below go/ is a
module of its own with a committed go.sum, so every byte that is compiled is pinned, and no project's versions pull at
another's.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.kind.cache import cache_dir, digest, forget_unused, locked, scratch_folder, source_files
from tests.kind.command import CommandError, run, step

KUBERNETES_VERSION = "v1.34.4"

_GO_MODULES = Path(__file__).parent / "go"
# A cold build of the largest one takes some five minutes on two cores; this is for far slower machines.
_BUILD_TIMEOUT_SECONDS = 3600.0


class ToolchainError(RuntimeError):
    """Go is missing, or a binary could not be built. The message says what to do next."""


@dataclass(frozen=True)
class Module:
    """A Go module below go/ and the commands built from it."""

    folder: str
    packages: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    """Go string variables set by the linker: what a project's own release build stamps into its binaries."""

    @property
    def path(self) -> Path:
        return _GO_MODULES / self.folder

    @property
    def linker_flags(self) -> str:
        # -s -w: without symbol tables the binaries are a third smaller, and they are copied into three nodes.
        return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in sorted(self.variables.items()))])


_STAMP = "k8s.io/component-base/version"
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.removeprefix("v").split(".")

MODULES = (
    Module(
        "kubernetes",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kube-proxy",
                "kubelet",
                "kubeadm",
                "kubectl",
            )
        },
        # Unstamped, the API server calls itself v0.0.0 and kubeadm refuses to work with it.
        {f"{_STAMP}.gitVersion": KUBERNETES_VERSION, f"{_STAMP}.gitMajor": _MAJOR, f"{_STAMP}.gitMinor": _MINOR},
    ),
    Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Module("coredns", {"coredns": "github.com/coredns/coredns"}),
    Module("helm", {"helm": "helm.sh/helm/v3/cmd/helm"}, {"helm.sh/helm/v3/internal/version.version": "v3.19.0"}),
    Module("kind", {"kind": "sigs.k8s.io/kind"}),
    # Our own: what a node image needs beside Debian's packages, and what shows that a cluster's DNS answers.
    Module("node", {"pause": "./pause", "runc-reduced": "./runc-reduced"}),
    Module("lookup", {"lookup": "."}),
)

BINARIES = tuple(name for module in MODULES for name in module.packages)


def binary(name: str) -> Path:
    """The path of the executable ``name``, built now if the cache has none for the current inputs.

    Raises ToolchainError for an unknown name, without Go, and when the build fails.
    """
    module = _module_of(name)
    if not shutil.which("go"):
        raise ToolchainError(
            "Go is not installed: the test cluster's binaries are built with it. Install Go 1.25 or newer (https://go.dev/doc/install)."
        )
    return _built(module, name)


def _built(module: Module, name: str) -> Path:
    key = module_key(module, _go_version(module.path))
    target = cache_dir() / "bin" / f"{module.folder}-{key}" / name
    if target.exists():
        os.utime(target.parent)
        return target
    # One lock for all: two builds at once would compile the same packages twice and gain nothing.
    with locked("go-build"):
        if not target.exists():
            with step(f"building {name} (first time: minutes)"):
                _build(module, name, target)
                forget_unused(target.parent.parent)
    return target


def module_key(module: Module, go_version: str) -> str:
    """The digest of all that decides what a module's binaries are made of."""
    return digest(module.folder, module.linker_flags, go_version, files=source_files(module.path))


def _module_of(name: str) -> Module:
    for module in MODULES:
        if name in module.packages:
            return module
    raise ToolchainError(f"no binary is called {name!r}; there are: {', '.join(BINARIES)}")


def _build(module: Module, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", module.linker_flags]
    if shutil.which("nice"):
        command = ["nice", *command]
    with scratch_folder() as scratch:
        output = scratch / name
        try:
            run(
                [*command, "-o", output, module.packages[name]],
                cwd=module.path,
                env=_go_environment(),
                timeout=_BUILD_TIMEOUT_SECONDS,
            )
        except CommandError as error:
            raise ToolchainError(
                f"{name} could not be built from {module.path}. Is the Go module proxy reachable?\n{error}"
            ) from error
        # Only a whole file ever has the final name, whenever this process dies.
        output.replace(target)


def _go_environment() -> dict[str, str]:
    # The caller's GOFLAGS or workspace would change what is built without changing the key.
    return {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "HOME": str(Path.home())}


@cache
def _go_version(folder: Path) -> str:
    # Asked inside the module: Go may fetch the newer toolchain that the module's go line demands.
    try:
        done = run(["go", "env", "GOVERSION", "GOOS", "GOARCH"], cwd=folder, env=_go_environment(), timeout=300)
    except CommandError as error:
        raise ToolchainError(f"`go env` failed; is Go 1.25 or newer installed?\n{error}") from error
    return done.stdout
