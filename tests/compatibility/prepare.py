"""Prepares what the programs need: an environment with their packages, checkouts of repositories, small inputs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tests.compatibility.programs import PROGRAMS, Checkout

CACHE = Path.home() / ".cache" / "ddpjob" / "compatibility"
PYTHON = CACHE / "venv" / "bin" / "python"
"""The interpreter of the programs' environment."""
INPUTS = CACHE / "inputs"
"""Folders that a program finds in its working directory."""
_HERE = Path(__file__).parent
_TRAINER_APP = _HERE.parents[1] / "trainer_app"
_MINUTES = 60


def checkout(source: Checkout) -> Path:
    """Return the checkout of a repository."""
    return CACHE / "sources" / source.folder


def prepare() -> None:
    """Install, fetch and write what is not there yet, and the launcher of this checkout."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        _run(sys.executable, "-m", "venv", CACHE / "venv")
    _run(PYTHON, "-m", "pip", "install", "--quiet", "-r", _HERE / "requirements.txt")
    _install_own()
    sources = {program.source for program in PROGRAMS if isinstance(program.source, Checkout)}
    for folder in {source.folder for source in sources}:
        _fetch([source for source in sources if source.folder == folder], CACHE / "sources" / folder)
    if not INPUTS.exists():
        unfinished = CACHE / "inputs.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        _run(PYTHON, _HERE / "inputs.py", unfinished)
        unfinished.rename(INPUTS)
    for source in sources:
        _link_data(source)


def _install_own() -> None:
    """Make ddprun of this checkout, which needs no other package, and the fault importable in the environment."""
    answer = _run(PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    packages = Path(answer.strip())
    (packages / "ddprun.pth").write_text(f"{_TRAINER_APP}\n")
    shutil.copy(_HERE / "inject.py", packages / "compatibility_inject.py")
    (packages / "compatibility_inject.pth").write_text("import compatibility_inject\n")


def _fetch(sources: Sequence[Checkout], folder: Path) -> None:
    """Check out the folders of these scripts of one repository, without its history and its other files."""
    commit = sources[0].commit
    if all((folder / source.script).exists() for source in sources) and _git(folder, "rev-parse", "HEAD") == commit:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _git(folder, "init", "--quiet")
    if "origin" not in _git(folder, "remote"):
        _git(folder, "remote", "add", "origin", f"https://github.com/{sources[0].repository}")
    _git(folder, "sparse-checkout", "set", "--no-cone", *map(_pattern, sources))
    _git(folder, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", commit)
    _git(folder, "checkout", "--quiet", "--force", commit)


def _pattern(source: Checkout) -> str:
    folder = PurePosixPath(source.script).parent.as_posix()
    return "/*" if folder == "." else f"/{folder}/"


def _git(folder: Path, *words: str) -> str:
    return _run("git", "-C", folder, *words).strip()


def _link_data(source: Checkout) -> None:
    """Put MNIST where Lightning's example looks for it: beside the script, and not in the working directory."""
    link = checkout(source) / "examples" / "Datasets"
    if source.repository.startswith("Lightning-AI/") and not link.exists():
        link.symlink_to(INPUTS / "data")


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, timeout=_MINUTES * 60, check=True)
    return done.stdout
