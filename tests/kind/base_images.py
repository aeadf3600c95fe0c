"""Base images where no registry is reachable: Debian bookworm by debootstrap, and Python 3.11 on it.

With a registry none of this runs: Dockerfiles then name public images. Used by images.py and node_image.py.
"""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from tests.kind import packages
from tests.kind.cache import cache_dir, digest, locked, scratch_folder
from tests.kind.command import run, step
from tests.kind.docker import Engine, docker, image_id

_HERE = Path(__file__).parent
_SUITE = "bookworm"
_REGISTRY_PROBE = "https://registry-1.docker.io/v2/"
_PROBE_SECONDS = 5.0


@cache
def registry_reachable() -> bool:
    """Whether Docker Hub answers within five seconds (asked once per process)."""
    try:
        with urllib.request.urlopen(_REGISTRY_PROBE, timeout=_PROBE_SECONDS) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401  # it wants credentials, and saying so is an answer
    except OSError:
        return False


def build_arguments(engine: Engine) -> list[str]:
    """Arguments of every `docker build`."""
    # A name server on the machine's own loopback is out of reach from the bridge network of an engine started here.
    return ["--network", "host"] if engine.started_by_us else []


def debian_image(engine: Engine) -> str:
    """The tag of a minimal Debian image, made now if need be."""
    tag = f"ddpjob/debian:{_SUITE}-{digest(_SUITE, 'minbase')}"
    with locked("debian-image"):
        if image_id(tag, engine=engine) is None:
            archive = _root_file_system(tag.rpartition(":")[2])
            docker("import", "--change", 'CMD ["bash"]', archive, tag, engine=engine, timeout=300)
    return tag


def python_image(engine: Engine) -> str:
    """The tag of that Debian with Python 3.11 and venv, made now if need be."""
    debian = debian_image(engine)
    dockerfile = _HERE / "base" / "python.Dockerfile"
    tag = f"ddpjob/python-base:{_SUITE}-{digest(debian, files=[dockerfile])}"
    with locked("python-image"):
        if image_id(tag, engine=engine) is None:
            with step("building the Python base image"), scratch_folder() as empty:
                arguments = ["--build-arg", f"DEBIAN={debian}", "--tag", tag, "--tag", f"ddpjob/python-base:{_SUITE}"]
                docker(
                    "build",
                    *build_arguments(engine),
                    *arguments,
                    "--file",
                    dockerfile,
                    empty,
                    engine=engine,
                    timeout=900,
                )
    return tag


def _root_file_system(name: str) -> Path:
    archive = cache_dir() / "rootfs" / f"debian-{name}.tar"
    if archive.exists():
        return archive
    archive.parent.mkdir(exist_ok=True)
    packages.require("debootstrap")
    with step(f"bootstrapping Debian {_SUITE}"), scratch_folder() as scratch:
        root = scratch / "root"
        run(["debootstrap", "--variant=minbase", _SUITE, root], timeout=1200)
        for superfluous in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / superfluous, ignore_errors=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        (root / "var/lib/apt/lists/partial").mkdir(parents=True)
        whole = scratch / "root.tar"
        run(["tar", "--numeric-owner", "--create", "--file", whole, "--directory", root, "."], timeout=300)
        whole.replace(archive)
    return archive
