"""Build the operator's and the trainer's image, with or without a registry.

With a registry this is plain `docker build`. Without one, the base image is built here (base_images.py) and pip's
wheels are downloaded on this machine into the build context, because containers may have no network either.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ddpjob.version import __version__
from tests.kind.base_images import build_arguments, build_python_image, python_tag, registry_reachable
from tests.kind.cache import cache_dir, digest, forget_unused, locked, scratch_folder, source_files
from tests.kind.command import CommandError, run, step
from tests.kind.docker import Engine, docker, ensure_engine, image_id
from tests.kind.toolchain import ToolchainError

OPERATOR_TAG = f"ddpjob/operator:{__version__}"
TRAINER_TAG = f"ddpjob/trainer:{__version__}"
"""The names that the chart's defaults, the documents and the examples use."""
TORCH_TAG = "ddpjob/torch:dev"

_REPOSITORY = Path(__file__).resolve().parents[2]
_SHARED_WHEELS = _REPOSITORY.parent / "shared" / "wheels"
_LOCKS = _REPOSITORY / "requirements"
_BUILD_SECONDS = 3600.0


@dataclass(frozen=True)
class Image:
    """One of the project's images. code: the folder of its distributions; locks: the lock files that it installs."""

    name: str
    dockerfile: str
    code: str
    locks: tuple[str, ...]

    def lock_files(self) -> list[Path]:
        """Return the lock files; where torch comes from the package index, also that of CUDA's libraries."""
        cuda = ["cuda"] if "torch" in self.locks and not _torch_wheels() else []
        return [_LOCKS / f"{name}.txt" for name in [*self.locks, *cuda]]

    def context(self) -> list[Path]:
        """Return the files and folders that its build reads, of those that .dockerignore does not exclude."""
        return [_REPOSITORY / name for name in ("LICENSE", "images", "requirements", self.code)]


OPERATOR = Image("operator", "Dockerfile", "operator", ("build", "operator"))
TRAINER = Image("trainer", "images/trainer/Dockerfile", "trainer_app", ("build", "torch", "trainer"))


def build_images() -> tuple[str, str]:
    """Build both images from the working tree, unless they are up to date, and return their tags."""
    engine = ensure_engine()
    with locked("images"):
        build_image(engine, OPERATOR, OPERATOR_TAG)
        build_image(engine, TRAINER, TRAINER_TAG)
        if engine.started_by_us:  # images of an installed Docker are not ours to delete
            docker("image", "prune", "--force", "--filter", "until=72h", engine=engine, timeout=300)
    return OPERATOR_TAG, TRAINER_TAG


def require_images() -> None:
    """Raise ToolchainError unless both images are built from the present working tree."""
    engine = ensure_engine(install=False)
    for image, tag in ((OPERATOR, OPERATOR_TAG), (TRAINER, TRAINER_TAG)):
        if not _is_current(engine, image, tag):
            raise ToolchainError(
                f"the image {tag} is not built from the present working tree. "
                "Build it with: python -m tests.kind prepare images"
            )


def build_images_for_tests() -> None:
    """Build both images, and the one with Python and PyTorch alone, which is a layer on the trainer's."""
    build_images()
    engine, folder = ensure_engine(), Path(__file__).parent / "base"
    with locked("images"):
        command = ["build", *build_arguments(engine), "--build-arg", f"TRAINER={TRAINER_TAG}", "--tag", TORCH_TAG]
        docker(*command, "--file", folder / "torch.Dockerfile", folder, engine=engine, timeout=_BUILD_SECONDS)


def _base_image() -> str | None:
    """Return the base image to build on, or None for the Dockerfile's default."""
    return os.environ.get("DDPJOB_BASE_IMAGE") or (None if registry_reachable() else python_tag())


def _wheels(image: Image) -> Path | None:
    """Return the folder for the wheels that ``image`` is built from, or None where pip in the build downloads them."""
    if registry_reachable():
        return None
    key = digest(*(path.name for path in _torch_wheels()), platform.machine(), files=image.lock_files())
    return cache_dir() / "wheels" / f"{image.name}-{key}"


def _torch_wheels() -> list[Path]:
    """Return the CPU builds of torch for the images' Python that are on this machine."""
    return sorted(_SHARED_WHEELS.glob(f"torch-*+cpu-cp311-*_{platform.machine()}.whl"))


def _inputs(image: Image) -> str:
    wheels, sources = _wheels(image), _sources(image)
    names = [str(file.relative_to(_REPOSITORY)) for file in sources]
    return digest(image.name, _base_image() or "", wheels.name if wheels else "", *names, files=sources)


def _note(tag: str) -> Path:
    return cache_dir() / "images" / f"built-{digest(tag)}"


def _is_current(engine: Engine, image: Image, tag: str) -> bool:
    note = _note(tag)
    return note.exists() and note.read_text() == f"{_inputs(image)} {image_id(tag, engine=engine)}"


def build_image(engine: Engine, image: Image, tag: str) -> None:
    """Build one image unless it is up to date. Raises CommandError with the end of the build's output."""
    if _is_current(engine, image, tag):
        return
    inputs, base, wheels = _inputs(image), _base_image(), _wheels(image)
    if base == python_tag():
        build_python_image(engine)
    if wheels is not None:
        _download_wheels(image, wheels)
    with step(f"building the image {tag}"):
        command = ["build", *build_arguments(engine), "--tag", tag, "--file", str(_REPOSITORY / image.dockerfile)]
        if base is not None:
            command += ["--build-arg", f"BASE_IMAGE={base}"]
        if wheels is None:
            docker(*command, _REPOSITORY, engine=engine, timeout=_BUILD_SECONDS)
        else:
            if not _torch_wheels():
                command += ["--build-arg", "TORCH_INDEX_URL="]  # the wheels are those of the package index
            with scratch_folder() as context:
                _fill_context(image, context, wheels)
                docker(*command, context, engine=engine, timeout=_BUILD_SECONDS)
    note = _note(tag)
    note.parent.mkdir(exist_ok=True)
    note.write_text(f"{inputs} {image_id(tag, engine=engine)}")


def _sources(image: Image) -> list[Path]:
    """Return every file that a build reads: the build context and the Dockerfile."""
    listed = [*image.context(), _REPOSITORY / image.dockerfile]
    files = {file for path in listed for file in (source_files(path) if path.is_dir() else [path])}
    return sorted(file for file in files if file.suffix != ".pyc")


def _fill_context(image: Image, context: Path, wheels: Path) -> None:
    for source in image.context():
        if source.is_dir():
            shutil.copytree(source, context / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, context)
    # Hard links: the trainer's wheels take about 300 MB.
    shutil.copytree(wheels, context / "wheels", copy_function=os.link)


def _download_wheels(image: Image, target: Path) -> None:
    """Download every wheel that ``image`` is built from to ``target``, unless the cache has them."""
    with locked(f"wheels-{image.name}"):
        if not target.exists():
            with step(f"downloading the wheels of {image.name}"):
                _download(image.lock_files(), target)
            forget_unused(target.parent)
        os.utime(target)


def _download(lock_files: list[Path], target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with scratch_folder() as scratch:
        folder = scratch / "wheels"
        command = download_command(folder, platform.machine())
        try:
            for file in lock_files:
                # pip prefers a file of the package index to one of a folder.
                local = (
                    ["--no-index", "--find-links", str(_SHARED_WHEELS)]
                    if file.stem == "torch" and _torch_wheels()
                    else []
                )
                run([*command, *local, "--requirement", str(file)], timeout=_BUILD_SECONDS)
        except CommandError as error:
            raise ToolchainError(f"the images' wheels could not be downloaded. {error}") from error
        folder.rename(target)


def download_command(folder: Path, machine: str) -> list[str]:
    """Return pip's command line without the lock file: wheels for the images' Python 3.11 on Linux."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(folder),
        "--no-deps",
        "--require-hashes",
    ]
    command += ["--only-binary", ":all:", "--python-version", "3.11"]
    for glibc in ("2_28", "2_27", "2_26", "2_24", "2_17", "2_5"):
        command += ["--platform", f"manylinux_{glibc}_{machine}"]
    return [*command, "--platform", f"manylinux2014_{machine}"]
