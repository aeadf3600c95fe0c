"""The distributions: ``ddprun`` is usable without any installed package, and ``ddpjob`` has the lessons' scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddptrain.lesson import lesson_names
from tests.install.chart import ROOT

_BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('wheels'))"
# All modules of the launcher's side; the others belong to ranks, which import torch.
_IMPORT = """
import pkgutil, sys
sys.path.insert(0, sys.argv[1])
import ddprun
ranks = {"ddprun.distributed.rendezvous", "ddprun.distributed.peer_monitor", "ddprun.distributed.process_group"}
names = [found.name for found in pkgutil.walk_packages(ddprun.__path__, "ddprun.")]
for name in names:
    if name not in ranks and not name.endswith("__main__"):
        __import__(name)
print(len(names), sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built with it")
    source = tmp_path_factory.mktemp("ddprun") / "source"
    shutil.copytree(ROOT / "trainer_app", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    (source / "wheels").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _BUILD], cwd=source, text=True, capture_output=True, timeout=120, check=True
    )
    return source / "wheels" / done.stdout.splitlines()[-1]


def test_ddprun_is_pure_python_with_no_dependency(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        metadata = content.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "Requires-Dist" not in metadata
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ddprun"}
    assert "ddprun/py.typed" in names


def test_launcher_runs_on_the_standard_library_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path)
    # -I and -S: no installed package can be imported.
    command = [sys.executable, "-I", "-S", "-c", _IMPORT, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    count, imported = done.stdout.split(maxsplit=1)
    assert int(count) >= 20
    assert imported.strip() == "['__main__', 'ddprun']"


def test_lessons_are_installed_with_the_trainer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("operator", "trainer_app"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "wheels").mkdir()
    command = [sys.executable, "-c", _BUILD]
    done = subprocess.run(command, cwd=source, text=True, capture_output=True, timeout=120, check=True)
    with zipfile.ZipFile(source / "wheels" / done.stdout.splitlines()[-1]) as content:
        content.extractall(tmp_path / "installed")
    command = [sys.executable, "-c", "import ddptrain.lesson as run; print(run.SCRIPTS, *run.lesson_names())"]
    env = {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == [str(tmp_path / "installed" / "ddptrain" / "lessons"), *lesson_names()]


def test_a_folder_with_the_name_of_a_package_is_not_imported_in_its_place(tmp_path: Path) -> None:
    """As a clone named ddpjob is, beside the user's script."""
    names = ["ddpjob", "ddpjob_operator", "ddprun", "ddptrain", "ddpplot"]
    for name in names:
        (tmp_path / name / "operator").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(f"import {', '.join(names)}\nprint([one.__file__ for one in ({', '.join(names)})])")
    done = subprocess.run([sys.executable, script], text=True, capture_output=True, timeout=120, check=True)
    assert "None" not in done.stdout
