"""The command line in a fresh interpreter: speed, help, usage errors, and what it imports."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ddptrain import __version__
from ddptrain.cli import main

DDPTRAIN = [sys.executable, "-m", "ddptrain"]


def fresh(*argv: object, code: int = 0, **env: str) -> tuple[str, float]:
    """Return (output, seconds of CPU time) of a fresh interpreter; CPU time does not depend on the machine's load."""
    before = _children_seconds()
    done = subprocess.run(
        [*DDPTRAIN, *map(str, argv)], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr, _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_version_and_usage_errors_do_not_import_torch() -> None:
    program = (
        "import sys, contextlib, io\n"
        "from ddptrain.cli import main\n"
        "commands = '--help', 'train --help', '--version', 'train --epochs 0'\n"
        "for argv in map(str.split, commands):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(argv)\n"
        "print([m for m in ('torch', 'sklearn') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_help_does_without_what_takes_long_to_import() -> None:
    assert min(fresh("--help")[1] for _ in range(3)) < 1.0, "torch takes 2 s of CPU time"


def test_process_ends_without_the_interpreters_own_end_but_with_all_output() -> None:
    program = (
        "import atexit; from ddptrain import cli\n"
        "atexit.register(print, 'the interpreter ended'); cli.main = lambda: print('output') or 3; cli.run()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("output\n", 3)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=full, timeout=120, check=False)
    assert done.returncode not in (0, 3), "output that is lost is an error"


def test_version_is_printed() -> None:
    assert fresh("--version")[0] == f"ddptrain {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "env", "code", "wrong"),
    [
        (["train"], {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "m"}, 2, "node rank 2 does not exist among 2"),
        (["launch", "--nproc-per-node", "0"], {}, 2, "--nproc-per-node=0"),
        (["launch", "--master-port", "0"], {}, 2, "--master-port=0"),
        (["train"], {"RANK": "3", "WORLD_SIZE": "2"}, 2, "RANK=3"),
        (["train"], {"DDPTRAIN_EPOCS": "3"}, 2, "unknown environment variable DDPTRAIN_EPOCS"),
        (["train", "--batch-size", "many"], {}, 2, "--batch-size='many'"),
        (["launch", "--chaos", "melt:1:7"], {}, 2, "--chaos melt:1:7 is not ACTION:RANK:STEP"),
        (["launch", "--log-dir", "/dev/null/logs"], {}, 2, "--log-dir /dev/null/logs cannot be made"),
    ],
)  # fmt: skip
def test_a_usage_error_exits_at_once_and_writes_a_termination_report(
    tmp_path: Path, argv: list[str], env: dict[str, str], code: int, wrong: str
) -> None:
    output, seconds = fresh(*argv, code=code, DDPJOB_TERMINATION_LOG=str(tmp_path / "log"), **env)
    lines = output.splitlines()
    assert lines[0].startswith("error: ")
    assert wrong in lines[0]
    assert lines[-1].startswith("next:  ")
    assert len(lines) <= 3
    assert seconds < 1, "a usage error must not import torch"
    assert wrong in json.loads((tmp_path / "log").read_text())["message"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("lesson env --nproc-per-node 65", "argument --nproc-per-node: 65 is above 64"),
        ("eval --run 0", "argument --run: 0 is below 1"),
        ("eval --step -1", "argument --step: -1 is below 0"),
        ("eval --step 1.5", "argument --step: '1.5' is not a whole number"),
        ("launch --max-restarts -1", "argument --max-restarts/--max_restarts: -1 is below 0"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_bound(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDPJOB_TERMINATION_LOG", str(tmp_path / "log"))
    assert main(command.split()) == 2
    assert capsys.readouterr().err.splitlines()[0].endswith(said)


def test_a_training_imports_all_of_torch_before_it_forks_and_no_compiler(tmp_path: Path) -> None:
    # A new interpreter, because the fork server has imported more than a training does. It forks for each command.
    program = """
import os, sys
from ddptrain.cli import main
from ddptrain.config import Config
from ddptrain.program import TrainerProgram

class Refusal:
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo":
            print("imported", name, flush=True)
            raise AssertionError(name)

sys.meta_path.insert(0, Refusal())  # forked ranks inherit it
TrainerProgram(Config()).preload()
print("threads:", len(os.listdir("/proc/self/task")), "CUDA:", sys.modules["torch"].cuda.is_initialized(), flush=True)
before = set(sys.modules)
for verb in ("train", "launch --nproc-per-node 2"):
    if not os.fork():
        folder = ["--checkpoint-dir", os.path.join(sys.argv[1], verb.replace(" ", "-"))]
        code = main([*verb.split(), *"--data digits --epochs 1 --batch-size 500".split(), *folder])
        late = [name for name in sys.modules if name.startswith("torch") and name not in before]
        print("ended:", code, len(late) < 30, "torch._dynamo" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""
    env = {"DDPJOB_TERMINATION_LOG": str(tmp_path / "log"), "PATH": "/usr/bin", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("threads:", "ended:", "imported"))]
    # A forked child has none of its parent's threads, and CUDA does not survive a fork.
    assert lines == ["threads: 1 CUDA: False", *["ended: 0 True False"] * 2], done.stdout + done.stderr
