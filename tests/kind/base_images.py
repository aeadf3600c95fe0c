"""Base images where no registry is reachable: Debian bookworm from debootstrap, and Python 3.11 on it.

Unused where a registry is reachable: the Dockerfiles then name public images. Used by images.py and node_image.py.
"""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from tests.kind import packages
from tests.kind.cache import cache_dir, digest, locked, scratch_folder
from tests.kind.command import CommandError, run, step
from tests.kind.docker import Engine, docker, image_id
from tests.kind.toolchain import ToolchainError

_PYTHON_DOCKERFILE = Path(__file__).parent / "base" / "python.Dockerfile"
_SUITE = "bookworm"
_REGISTRY_PROBE = "https://registry-1.docker.io/v2/"
_PROBE_SECONDS = 5.0


@cache
def registry_reachable() -> bool:
    """Return whether Docker Hub answers within five seconds. Probed once per process."""
    try:
        with urllib.request.urlopen(_REGISTRY_PROBE, timeout=_PROBE_SECONDS) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401  # it answers, and requires credentials
    except OSError:
        return False


def build_arguments(engine: Engine) -> list[str]:
    """Return the arguments that every `docker build` needs."""
    # A name server on this machine's loopback is unreachable from the bridge network of an engine started here.
    return ["--network", "host"] if engine.started_by_us else []


def debian_tag() -> str:
    """Return the tag of the minimal Debian image."""
    return f"ddpjob/debian:{_SUITE}-{digest(_SUITE, 'minbase')}"


def python_tag() -> str:
    """Return the tag of that Debian with Python 3.11 and venv."""
    return f"ddpjob/python-base:{_SUITE}-{digest(debian_tag(), files=[_PYTHON_DOCKERFILE])}"


def build_debian_image(engine: Engine) -> str:
    """Build the Debian image unless the engine has it, and return its tag."""
    tag = debian_tag()
    with locked("debian-image"):
        if image_id(tag, engine=engine) is None:
            archive = _root_file_system(tag.rpartition(":")[2])
            docker("import", "--change", 'CMD ["bash"]', archive, tag, engine=engine, timeout=300)
    return tag


def build_python_image(engine: Engine) -> str:
    """Build the Python image unless the engine has it, and return its tag."""
    debian = build_debian_image(engine)
    tag = python_tag()
    with locked("python-image"):
        if image_id(tag, engine=engine) is None:
            with step("building the Python base image"), scratch_folder() as empty:
                arguments = ["--build-arg", f"DEBIAN={debian}", "--tag", tag, "--tag", f"ddpjob/python-base:{_SUITE}"]
                docker(
                    "build",
                    *build_arguments(engine),
                    *arguments,
                    "--file",
                    _PYTHON_DOCKERFILE,
                    empty,
                    engine=engine,
                    timeout=3600,
                )
    return tag


def _root_file_system(name: str) -> Path:
    archive = cache_dir() / "rootfs" / f"debian-{name}.tar"
    if archive.exists():
        return archive
    archive.parent.mkdir(exist_ok=True)
    with step(f"bootstrapping Debian {_SUITE}"), scratch_folder() as scratch:
        root = scratch / "root"
        try:
            packages.require("debootstrap")
            run(["debootstrap", "--variant=minbase", _SUITE, root], timeout=3600)
        except CommandError as error:
            raise ToolchainError(f"Debian {_SUITE} could not be installed into a folder. {error}") from error
        for superfluous in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / superfluous, ignore_errors=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        (root / "var/lib/apt/lists/partial").mkdir(parents=True)
        whole = scratch / "root.tar"
        run(["tar", "--numeric-owner", "--create", "--file", whole, "--directory", root, "."], timeout=300)
        whole.replace(archive)
    return archive
