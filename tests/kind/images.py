"""Builds the operator's and the trainer's image, with or without a registry and a network inside containers.

Where a registry answers, this is plain `docker build`. Otherwise the base image is made here (base_images.py) and
pip's wheels are downloaded on this machine, into a folder that is part of the build context only.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.kind.base_images import build_arguments, python_image, registry_reachable
from tests.kind.cache import cache_dir, digest, forget_unused, locked, scratch_folder, source_files
from tests.kind.command import run, step
from tests.kind.docker import Engine, docker, ensure_engine, image_id

OPERATOR_TAG = "ddpjob/operator:dev"
TRAINER_TAG = "ddpjob/trainer:dev"

_REPOSITORY = Path(__file__).resolve().parents[2]
_SHARED_WHEELS = _REPOSITORY.parent / "shared" / "wheels"
# What .dockerignore lets through.
_CONTEXT = ("LICENSE", "README.md", "pyproject.toml", "operator", "trainer_app", "images")
_BUILD_SECONDS = 1800.0


@dataclass(frozen=True)
class Image:
    """One of the project's images: its Dockerfile, and where pyproject.toml says what it needs."""

    name: str
    dockerfile: str
    extra: str | None

    def requirements(self, pyproject: str) -> list[str]:
        """The packages it installs beside the project itself, and what builds the project."""
        project = tomllib.loads(pyproject)
        needed: list[str] = (
            project["project"]["optional-dependencies"][self.extra]
            if self.extra
            else project["project"]["dependencies"]
        )
        return [*needed, *project["build-system"]["requires"]]


OPERATOR = Image("operator", "Dockerfile", None)
TRAINER = Image("trainer", "images/trainer/Dockerfile", "trainer")


def build_images(operator_tag: str = OPERATOR_TAG, trainer_tag: str = TRAINER_TAG) -> tuple[str, str]:
    """Build both images from the working tree and return their tags. What has not changed is not built again."""
    engine = ensure_engine()
    with locked("images"):
        build_image(engine, OPERATOR, operator_tag)
        build_image(engine, TRAINER, trainer_tag)
        if engine.started_by_us:  # what an installed Docker keeps is its owner's affair
            docker("image", "prune", "--force", "--filter", "until=72h", engine=engine, timeout=300)
    return operator_tag, trainer_tag


def build_image(engine: Engine, image: Image, tag: str) -> None:
    """Build one image, unless it is there and of the very same inputs. Raises CommandError with the build's end."""
    base = os.environ.get("DDPJOB_BASE_IMAGE") or (None if registry_reachable() else python_image(engine))
    wheels = None if registry_reachable() else _downloaded_wheels(image)
    inputs = digest(image.name, base or "", wheels.name if wheels else "", *_names(), files=_sources())
    note = cache_dir() / "images" / f"built-{digest(tag)}"
    if note.exists() and note.read_text() == f"{inputs} {image_id(tag, engine=engine)}":
        return
    with step(f"building the image {tag}"):
        command = ["build", *build_arguments(engine), "--tag", tag, "--file", str(_REPOSITORY / image.dockerfile)]
        if base is not None:
            command += ["--build-arg", f"BASE_IMAGE={base}"]
        if wheels is None:
            docker(*command, _REPOSITORY, engine=engine, timeout=_BUILD_SECONDS)
        else:
            with scratch_folder() as context:
                _fill_context(context, wheels)
                docker(*command, context, engine=engine, timeout=_BUILD_SECONDS)
    note.parent.mkdir(exist_ok=True)
    note.write_text(f"{inputs} {image_id(tag, engine=engine)}")


def _sources() -> list[Path]:
    """Every file that a build reads: what .dockerignore lets through, and the operator's Dockerfile."""
    listed = [_REPOSITORY / name for name in (*_CONTEXT, OPERATOR.dockerfile)]
    files = [file for path in listed for file in (source_files(path) if path.is_dir() else [path])]
    return sorted(file for file in [*files, *_constraints()] if file.suffix != ".pyc" and ".egg-info" not in str(file))


def _names() -> list[str]:
    return [str(file.relative_to(_REPOSITORY)) for file in _sources()]


def _fill_context(context: Path, wheels: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for source in [*(_REPOSITORY / name for name in _CONTEXT), *_constraints()]:
        if source.is_dir():
            shutil.copytree(source, context / source.name, ignore=ignored)
        else:
            shutil.copy2(source, context)
    # Hard links: the trainer's wheels are some 300 MB.
    shutil.copytree(wheels, context / "wheels", copy_function=os.link)


def _constraints() -> list[Path]:
    return sorted(_REPOSITORY.glob("constraints*.txt"))


def _downloaded_wheels(image: Image) -> Path:
    """The folder with every wheel that ``image`` is made of, downloaded now unless the cache has it."""
    pyproject = (_REPOSITORY / "pyproject.toml").read_text()
    requirements = image.requirements(pyproject)
    local = sorted(path.name for path in _SHARED_WHEELS.glob("*.whl"))
    key = digest(*requirements, *local, platform.machine(), files=_constraints())
    target = cache_dir() / "wheels" / f"{image.name}-{key}"
    with locked(f"wheels-{image.name}"):
        if not target.exists():
            with step(f"downloading the wheels of {image.name}"):
                _download(requirements, target)
            forget_unused(target.parent)
        os.utime(target)
    return target


def _download(requirements: list[str], target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with scratch_folder() as scratch:
        folder = scratch / "wheels"
        run([*download_command(folder, platform.machine()), *requirements], timeout=_BUILD_SECONDS)
        folder.rename(target)


def download_command(folder: Path, machine: str) -> list[str]:
    """pip's command line, less the packages: wheels for the images' Python 3.11 on Linux, whatever runs here."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(folder),
        "--only-binary",
        ":all:",
        "--python-version",
        "3.11",
    ]
    for glibc in ("2_28", "2_27", "2_26", "2_24", "2_17", "2_5"):
        command += ["--platform", f"manylinux_{glibc}_{machine}"]
    command += ["--platform", f"manylinux2014_{machine}"]
    for constraints in _constraints():
        command += ["--constraint", str(constraints)]
    if _SHARED_WHEELS.is_dir():
        command += ["--find-links", str(_SHARED_WHEELS)]
    return command
