"""A copy of ``ddprun`` beside an image that lacks it, made by the command of the operator's init container.

A virtual environment that has torch and nothing of this project takes the place of the image.
"""

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddpjob.api.names import LAUNCHER_PATH
from ddpjob.api.report import end_report
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from ddprun import injected
from ddprun.errors import RanksError
from tests.builders import a_job

SCRIPT = """
    import os, sys
    import ddprun, torch
    ddprun.report(step=1)
    model = torch.nn.Linear(1, 1)
    torch.optim.SGD(model.parameters()).step()
    print(ddprun.__file__, sys.prefix, os.environ["PYTHONPATH"], os.environ["PATH"], *sys.argv[1:], sep="|")
"""


def folder_with(folder: Path, *, torch_in: Path | None = None) -> Path:
    """Make a virtual environment; with torch it has torchrun, whose first line names the environment's Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    if torch_in is not None:
        [packages] = folder.glob("lib/python3*/site-packages")
        (packages / "torch.pth").write_text(f"{torch_in}\n")
        torchrun = folder / "bin" / "torchrun"
        torchrun.write_text(f"#!{folder}/bin/python3\nfrom torch.distributed.run import main\nmain()\n")
        torchrun.chmod(0o755)
    return folder


def run(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it with no variable of this process, so that nothing of this repository is importable."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder)} | variables
    return subprocess.run(command, env=env, cwd=folder, text=True, capture_output=True, timeout=120, check=False)


def pod_commands(copy: Path, *command: str) -> tuple[list[str], list[str]]:
    """Return what the init container and the trainer of a job run, with ``copy`` in place of the mounted volume."""
    job = Job.of(a_job(launcher="Injected", command=[*command], numNodes=1))
    spec = desired_pods(job, 1, EngineSettings())[0].body["spec"]
    containers = (spec["initContainers"][0], spec["containers"][0])
    init, trainer = ([w.replace(LAUNCHER_PATH, str(copy)) for w in container["command"]] for container in containers)
    return init, trainer


@pytest.mark.timeout(300)
def test_copy_runs_a_script_under_the_python_of_torchrun(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    init, trainer = pod_commands(copy, "torchrun", "train.py", "--lr", "1")
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    copy.mkdir()
    for _ in range(2):  # the kubelet may run an init container again
        done = run(init, tmp_path, PATH=str(Path(sys.executable).parent))
        assert done.returncode == 0, done.stderr
    other, image = folder_with(tmp_path / "other"), tmp_path / "image"
    folder_with(image, torch_in=Path(torch.__file__).parents[1])
    report = tmp_path / "report"
    report.touch()

    path = f"{other}/bin:{image}/bin:/usr/bin:/bin"
    done = run(trainer, tmp_path, PATH=path, PYTHONPATH="/mine", DDPJOB_TERMINATION_LOG=str(report))

    assert done.returncode == 0, done.stderr
    package, prefix, python_path, program_path, *arguments = done.stdout.strip().split("|")
    assert package == f"{copy}/lib/ddprun/__init__.py"
    assert prefix == str(image), "python3 of PATH has no torch"
    assert (python_path, program_path) == (f"{copy}/lib:/mine", f"{copy}/bin:{path}")
    assert arguments == ["--lr", "1"]
    assert json.loads(report.read_text())["outcome"] == "succeeded"
    imported = {entry.name for entry in (copy / "lib").iterdir()}
    assert imported == {"ddprun"}, "nothing else may hide a module of the image"


def test_python_without_torch_is_named_in_the_report(tmp_path: Path) -> None:
    folder, report = folder_with(tmp_path / "image"), tmp_path / "report"
    report.touch()
    program = str(Path(injected.__file__))
    done = run([f"{folder}/bin/python3", program, "train.py"], tmp_path, DDPJOB_TERMINATION_LOG=str(report))
    found = end_report(report.read_text())
    assert found is not None and found.message is not None
    assert (done.returncode, found.code, found.kind) == (RanksError.code, RanksError.code, RanksError.kind)
    assert found.message.endswith("has no torch") and f"{folder}/bin/python3" in found.message
    assert done.stderr.splitlines()[0] == f"error: {found.message}"


def test_python_that_is_too_old_is_named_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.touch()
    older = (
        f"import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path({injected.__file__!r}, run_name='__main__')"
    )
    done = run([sys.executable, "-I", "-c", older], tmp_path, DDPJOB_TERMINATION_LOG=str(report))
    found = end_report(report.read_text())
    assert done.returncode == RanksError.code and found is not None
    assert "(Python 3.9.18) is too old for ddprun, which needs Python 3.10" in str(found.message)


def test_program_of_the_copy_has_the_syntax_of_python_3_6() -> None:
    ast.parse(Path(injected.__file__).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("#!{0}/bin/python3.11\n", "python3.11"),
        ("#! {0}/bin/python3 -E\n", "python3"),
        ("#!/usr/bin/env python3\n", "python3"),
        ("#!/usr/bin/env -S python3 -u\n", "python3"),
        ("#!/bin/sh\n'''exec' \"{0}/bin/python\" \"$0\" \"$@\"\n' '''\n", "python"),
        ("#!/bin/sh\n'''exec' {0}/bin/python \"$0\" \"$@\"\n' '''\n", "python"),
        ("#!/bin/bash\nexec somewhere\n", "python3"),  # beside the program
        ("#!{0}/gone/python3\n", "python3"),
        ("\x7fELF", "python3"),
    ],
    ids=["path", "option", "env", "env -S", "long path", "pip's long path", "shell", "gone", "binary"],
)
def test_interpreter_of_a_program_is_found(
    header: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "python3", "python3.11"):
        (folder / name).symlink_to(sys.executable)
    program = folder / "torchrun"
    program.write_text(header.format(tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin:/bin")
    assert injected.python_of("torchrun") == injected.python_of(str(program)) == folder / names


def test_program_that_does_not_exist_has_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert injected.python_of("torchrun") is None
    (tmp_path / "torchrun").write_text("#!/bin/sh\n")
    (tmp_path / "torchrun").chmod(0o755)
    assert injected.python_of("torchrun") is None, "no Python is beside it"
