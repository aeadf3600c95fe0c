"""Write the lock files, `requirements/*.txt`: ``make lock``. Images and tests install from these alone, with hashes.

The source is what the distributions and the group ``test`` of the root's pyproject.toml ask for. uv resolves all of it
together, for all platforms and all Pythons from 3.11. ``make lock UPGRADE=--upgrade`` takes newer versions.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.install.chart import ROOT

FOLDER = ROOT / "requirements"
DISTRIBUTIONS = {
    "ddpjob": ROOT / "operator" / "ddpjob",
    "ddpjob-operator": ROOT / "operator" / "ddpjob_operator",
    "ddprun": ROOT / "trainer_app" / "ddprun",
    "ddpplot": ROOT / "trainer_app" / "ddpplot",
    "ddptrain": ROOT / "trainer_app" / "ddptrain",
}
HEADS = {
    "build": "what builds the wheels of this project",
    "operator": "what ddpjob and ddpjob-operator need: the operator's image",
    "trainer": "what ddprun and ddptrain need besides torch: the trainer's image",
    "plot": "what ddpplot needs, which no image has",
    "torch": "torch, from the package index or PyTorch's own index of CPU builds",
    "cuda": "what torch of the package index needs in addition on Linux; CPU builds do not",
    "test": "what the tests need in addition",
}
_COVERED = """\
# The hashes are those of all files of a version in the package index; of torch also those of the CPU builds that
# `make lock` found in the wheels folder (Python 3.11 on Linux x86-64).
"""
_CUDA = ("nvidia-", "cuda-", "triton")
_COMMAND = ["pip", "compile", "-", "--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet"]


def project(folder: Path) -> dict[str, Any]:
    """Return the table ``project`` of a distribution's pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


def asked() -> dict[str, list[str]]:
    """Return what each group of packages asks for, without this project's own distributions."""
    needs: dict[str, list[str]] = {}
    for name, folder in DISTRIBUTIONS.items():
        listed = project(folder)["dependencies"]
        needs[name] = [line for line in listed if re.split(r"[^\w-]", line)[0] not in DISTRIBUTIONS]
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = tomllib.loads((DISTRIBUTIONS["ddprun"] / "pyproject.toml").read_text())["build-system"]["requires"]
    return {
        "build": build,
        "operator": [*needs["ddpjob"], *needs["ddpjob-operator"]],
        "trainer": [*needs["ddprun"], *needs["ddptrain"]],
        "plot": needs["ddpplot"],
        "test": root["dependency-groups"]["test"],
    }


def pinned(group: str) -> dict[str, str]:
    """Return the lines of a lock file by the name of the package, each with its hashes."""
    file = FOLDER / f"{group}.txt"
    return _blocks(file.read_text()) if file.exists() else {}


def _blocks(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for block in re.findall(r"^[\w.-]+==.*(?:\n +.*)*", text, re.MULTILINE):
        name = block.partition("==")[0]
        found[name] = f"{found[name]}\n{block}" if name in found else block  # a version for each of several markers
    return found


def _compile(uv: str, lines: Iterable[str], *arguments: str) -> str:
    done = subprocess.run(
        [uv, *_COMMAND, *arguments], input="\n".join(lines), text=True, stdout=subprocess.PIPE, timeout=600, check=True
    )
    return done.stdout


def _with_cpu_builds(block: str, wheels: list[Path]) -> str:
    """Return the lines of torch with the hashes of the wheels of its version, and those that the file has by now."""
    version = block.split(maxsplit=1)[0].removeprefix("torch==")
    known = pinned("torch").get("torch", "")
    same = known if known.startswith(f"torch=={version} ") else ""
    hashes = set(re.findall(r"sha256:[0-9a-f]{64}", f"{block}\n{same}"))
    hashes |= {
        f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        for wheel in wheels
        if wheel.name.startswith(f"torch-{version}+cpu-")
    }
    return " \\\n".join([f"torch=={version}", *(f"    --hash={one}" for one in sorted(hashes))])


def lock(uv: str, wheels: list[Path], *, upgrade: bool) -> None:
    """Resolve all groups together, then write the file of each."""
    groups = asked()
    with tempfile.TemporaryDirectory() as scratch:
        together = Path(scratch) / "together.txt"
        if not upgrade:
            together.write_text("\n".join(block for group in HEADS for block in pinned(group).values()))
        _compile(uv, (line for lines in groups.values() for line in lines), "--output-file", str(together))
        locked = {
            name: _blocks(_compile(uv, lines, "--generate-hashes", "--constraint", str(together)))
            for name, lines in groups.items()
        }
    trainer = locked["trainer"]
    locked["torch"] = {"torch": _with_cpu_builds(trainer.pop("torch"), wheels)}
    locked["cuda"] = {name: trainer.pop(name) for name in list(trainer) if name.startswith(_CUDA)}
    FOLDER.mkdir(exist_ok=True)
    for name, head in HEADS.items():
        text = f"# Written by `make lock`: {head}.\n{_COVERED}" + "".join(f"{one}\n" for one in locked[name].values())
        (FOLDER / f"{name}.txt").write_text(text)


def main() -> None:
    """Read the command line, and write the files."""
    parser = argparse.ArgumentParser(prog="python -m tests.install.lock", description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that the distributions allow")
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL", help="CPU builds of torch")
    options = parser.parse_args()
    lock(str(Path(sys.executable).with_name("uv")), options.wheels, upgrade=options.upgrade)


if __name__ == "__main__":
    main()
