"""The programs that tests run: Kubernetes, etcd, CoreDNS, Helm, kind and more, built from pinned Go modules.

`build("kube-apiserver")` builds an executable into the cache; `binary("kube-apiserver")` only looks it up, so that no
test waits for a build. Each folder below go/ is a separate module with a committed go.sum: all sources are pinned, and
the dependency versions of one project do not affect another.
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
GANGS_VERSION = "v1.36.3"
"""The Kubernetes with PodGroups, of long tests."""

_GO_MODULES = Path(__file__).parent / "go"
# The largest program takes five minutes on two idle cores, and several times as long beside other work.
_BUILD_TIMEOUT_SECONDS = 7200.0


class ToolchainError(RuntimeError):
    """Something that a test needs is not built, or cannot be built here. The message says what to do next."""


@dataclass(frozen=True)
class Module:
    """A Go module below go/ and the commands built from it."""

    folder: str
    packages: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    """Go string variables set by the linker, as in the project's release build."""
    in_layers: bool = True
    """Whether a test layer needs it: `prepare all` builds only these."""

    @property
    def path(self) -> Path:
        return _GO_MODULES / self.folder

    @property
    def linker_flags(self) -> str:
        # -s -w: without symbol tables the binaries are a third smaller, and they are copied into three nodes.
        return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in sorted(self.variables.items()))])


def _stamps(version: str) -> dict[str, str]:
    """Return the variables of a Kubernetes version. Unstamped, the API server calls itself v0.0.0."""
    stamp = "k8s.io/component-base/version"
    major, minor, _ = version.removeprefix("v").split(".")
    return {f"{stamp}.gitVersion": version, f"{stamp}.gitMajor": major, f"{stamp}.gitMinor": minor}


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
        _stamps(KUBERNETES_VERSION),
    ),
    Module(
        "kubernetes-1.36",
        {
            f"{name}-1.36": f"k8s.io/kubernetes/cmd/{name}"
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
        },
        _stamps(GANGS_VERSION),
        in_layers=False,
    ),
    Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Module("coredns", {"coredns": "github.com/coredns/coredns"}),
    Module("helm", {"helm": "helm.sh/helm/v3/cmd/helm"}, {"helm.sh/helm/v3/internal/version.version": "v3.19.0"}),
    Module("kind", {"kind": "sigs.k8s.io/kind"}),
    Module(
        "coscheduling",
        {
            "coscheduling": "sigs.k8s.io/scheduler-plugins/cmd/scheduler",
            "coscheduling-controller": "sigs.k8s.io/scheduler-plugins/cmd/controller",
        },
        in_layers=False,
    ),
    Module("kueue", {"kueue": "sigs.k8s.io/kueue/cmd/kueue"}, in_layers=False),
    # Written for these tests: programs of the node image, the DNS check of a new cluster, and its provisioner.
    Module("node", {"pause": "./pause", "runc-reduced": "./runc-reduced"}),
    Module("lookup", {"lookup": "."}),
    Module("provisioner", {"provisioner": "."}),
)

BINARIES = tuple(name for module in MODULES for name in module.packages)
IN_LAYERS = tuple(name for module in MODULES if module.in_layers for name in module.packages)


def installed(name: str) -> Path | None:
    """Return the program of PATH in place of a pinned one, for the names in ``DDPJOB_INSTALLED``, as in the demo."""
    found = shutil.which(name) if name in os.environ.get("DDPJOB_INSTALLED", "").split() else None
    return Path(found) if found else None


def binary(name: str) -> Path:
    """Return the path of the executable ``name`` in the cache, or of the ``installed`` one.

    Raises ToolchainError for an unknown name, without Go, and if it is not built for the current inputs.
    """
    if found := installed(name):
        return found
    target = _target(_module_of(name), name)
    if not target.exists():
        raise ToolchainError(f"{name} is not built. Build it with: python -m tests.kind prepare {name}")
    os.utime(target.parent)
    return target


def build(name: str) -> Path:
    """Build the executable ``name`` unless the cache has it for the current inputs, and return its path.

    Raises ToolchainError for an unknown name, without Go, and if the build fails.
    """
    if installed(name):
        return binary(name)
    module = _module_of(name)
    target = _target(module, name)
    if not target.exists():
        # One lock for all programs: two builds at once would compile the same packages twice.
        with locked("go-build"):
            if not target.exists():
                with step(f"building {name}"):
                    _build(module, name, target)
                    forget_unused(target.parent.parent)
    os.utime(target.parent)
    return target


def _target(module: Module, name: str) -> Path:
    if not shutil.which("go"):
        raise ToolchainError(
            "Go is not installed. The programs that the tests run are built with it: "
            "install Go 1.25 or newer (https://go.dev/doc/install)."
        )
    key = module_key(module, _go_version(module.path))
    return cache_dir() / "bin" / f"{module.folder}-{key}" / name


def source_of(module: Module, path: str) -> Path:
    """Return the folder of one of a module's requirements in Go's module cache, downloaded if absent."""
    run(["go", "mod", "download", path], cwd=module.path, env=_go_environment(), timeout=_BUILD_TIMEOUT_SECONDS)
    found = run(["go", "list", "-m", "-f", "{{.Dir}}", path], cwd=module.path, env=_go_environment(), timeout=300)
    return Path(found.stdout.strip())


def module_key(module: Module, go_version: str) -> str:
    """Return the digest of everything that a module's binaries depend on."""
    return digest(module.folder, module.linker_flags, go_version, files=source_files(module.path))


def _module_of(name: str) -> Module:
    for module in MODULES:
        if name in module.packages:
            return module
    raise ToolchainError(f"unknown program {name!r}; known programs: {', '.join(BINARIES)}")


def _build(module: Module, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # At normal priority: half of the test layers wait for these programs, and a lower one starves on a busy machine.
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", module.linker_flags]
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
        # Renamed only when complete, so a killed build never leaves a partial file under the final name.
        output.replace(target)


def _go_environment() -> dict[str, str]:
    # The caller's GOFLAGS or workspace would change what is built without changing the key.
    return {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "HOME": str(Path.home())}


@cache
def _go_version(folder: Path) -> str:
    # Run inside the module: Go may download the newer toolchain that the module's go line requires.
    try:
        done = run(["go", "env", "GOVERSION", "GOOS", "GOARCH"], cwd=folder, env=_go_environment(), timeout=300)
    except CommandError as error:
        raise ToolchainError(f"`go env` failed; is Go 1.25 or newer installed?\n{error}") from error
    return done.stdout
