"""Tests that take too long for every run; `make soak` runs them.

Each repeats, with more ranks, steps or samples, what a test in this folder checks in seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ddptrain.lesson import SCRIPTS, lesson_names
from tests.ddptrain.runs import ForkServer
from tests.lessons.test_lessons import UNEVEN
from tests.processes import free_port


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in lesson_names() for ranks in ((1, 2, 3, 4, 7) if name in UNEVEN else (1, 2, 4))],
)
def test_lesson_holds_with_any_number_of_ranks(ddptrain: ForkServer, name: str, ranks: int) -> None:
    assert ddptrain.run("lesson", name, "--nproc-per-node", ranks).output().strip()


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with links to PyTorch and to what it requires, as after ``pip install torch`` elsewhere."""
    folder, found = tmp_path_factory.mktemp("packages"), {"torch"}
    waiting = [*found]
    while waiting:
        package = metadata.distribution(waiting.pop())
        for path in package.files or []:
            link = folder / path.parts[0]
            if path.parts[0] != ".." and not link.exists():
                link.symlink_to(package.locate_file(path.parts[0]))
        needed = [re.split(r"[^\w.-]", line)[0] for line in package.requires or [] if "extra ==" not in line]
        waiting += [name for name in needed if name not in found and list(metadata.distributions(name=name))]
        found |= {*needed}
    assert "numpy" not in found
    return folder


@pytest.mark.parametrize("name", sorted({*lesson_names()} - {"objects", "fsdp"}))  # which need NumPy
def test_copied_lesson_runs_where_pytorch_is_the_only_package(name: str, torch_alone: Path, tmp_path: Path) -> None:
    script = shutil.copy(SCRIPTS / f"{name}.py", tmp_path)
    flags = ["--standalone", "--nproc-per-node=2", f"--max-restarts={int(name == 'restart')}"]
    # -S: the packages of this environment are not found, by the agent and, as it is no file of Python, by the ranks.
    rank = ["--no-python", sys.executable, "-S", script]
    command = [sys.executable, "-S", "-m", "torch.distributed.run", *flags, *rank]
    env = {**os.environ, "PYTHONPATH": str(torch_alone), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_tutorials_launcher_passes_an_argument_that_lessons_accept(ddptrain: ForkServer) -> None:
    argv = ("--nproc-per-node", 2, "--master-port", free_port(), SCRIPTS / "start.py")
    run = ddptrain.run(*argv, module="torch.distributed.launch")
    assert run.output().count(": all_reduce of the ranks") == 3
