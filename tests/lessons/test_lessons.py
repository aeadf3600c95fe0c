"""Every lesson runs by itself, and notices an error in its key line.

``make soak`` runs each with 1, 2 and 4 ranks, some with 3 and 7, and with PyTorch as the only package.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ddprun.distributed.topology import WORKER_VARIABLES
from ddptrain.lesson import SCRIPTS, lesson_names
from tests.ddptrain.mutants import LESSONS
from tests.ddptrain.runs import ForkServer, Lesson, Run
from tests.processes import free_port

DOCS = Path(__file__).parents[2] / "docs"
GLOSSARY = DOCS / "concepts" / "torch-distributed" / "glossary.md"
CORRECTIONS = DOCS / "concepts" / "torch-distributed" / "corrections.md"
NAMED = (DOCS / "develop" / "coverage.md").read_text() + CORRECTIONS.read_text()

# The guide runs these with two ranks, and the others with four, the default.
OF_TWO = ["ddp", "env", "sampler", "start", "tutorial"]
# Their ranks have parts of different sizes if the number of ranks divides nothing.
UNEVEN = ["collectives", "fsdp", "groups", "mesh3d", "p2p", "tensor", "vocab"]


@pytest.mark.parametrize("name", [name for name in lesson_names() if name != "restart"])  # which has its own test
def test_lesson_holds(lesson: Lesson, name: str) -> None:
    assert lesson(name, *(["--nproc-per-node", "2"] if name in OF_TWO else [])).strip()


def test_a_number_of_ranks_in_the_environment_that_is_none_is_refused(ddptrain: ForkServer) -> None:
    run = ddptrain.run("lesson", "objects", env={"NPROC_PER_NODE": "two"}, code=2)
    assert "error: NPROC_PER_NODE=two is not a whole number" in run.output()


@pytest.mark.parametrize(
    ("name", "given", "missing"),
    [
        ("env", ["RANK", "WORLD_SIZE"], "MASTER_ADDR, MASTER_PORT, LOCAL_RANK, "),
        ("restart", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], "LOCAL_RANK, GROUP_RANK, "),
        ("start", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], "LOCAL_RANK, LOCAL_WORLD_SIZE "),
        ("objects", ["RANK", "WORLD_SIZE"], "MASTER_ADDR, MASTER_PORT "),
        ("p2p", ["RANK"], "WORLD_SIZE, MASTER_ADDR, MASTER_PORT "),
        ("ddp", ["RANK", "WORLD_SIZE", "MASTER_PORT"], "MASTER_ADDR "),
    ],
)
def test_rank_started_by_hand_without_its_variables_is_refused(
    ddptrain: ForkServer, name: str, given: list[str], missing: str
) -> None:
    lines = ddptrain.run("lesson", name, env=dict.fromkeys(given, "1"), code=2).output().splitlines()
    assert f"{lines[0]} ".startswith(f"error: RANK is set, but not {missing}"), lines
    assert lines[1].startswith("hint:  torchrun sets") and len(lines) == 3
    assert f"`env -u RANK -u WORLD_SIZE ddptrain lesson {name}`" in lines[2]


def test_rank_started_by_hand_with_an_impossible_number_is_refused(ddptrain: ForkServer) -> None:
    env = {"RANK": 2, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    assert "error: RANK=2 does not exist" in ddptrain.run("lesson", "objects", env=env, code=2).output()


# The errors that the documents name; `make mutants` has all, against the tests above.
@pytest.mark.soak
@pytest.mark.parametrize("mutant", [name for name in LESSONS if name in NAMED])
def test_lesson_notices_an_error(ddptrain: ForkServer, mutant: str) -> None:
    argv = ("lesson", mutant.partition(":")[0], "--nproc-per-node", 2)
    # On a busy machine, what nobody waited for may have arrived all the same.
    runs = (ddptrain.start(*argv, mutant=mutant) for _ in range(5 if "not waited for" in mutant else 1))
    noticed = next((run for run in runs if run.wait() == 1), None)
    assert noticed is not None and "Error" in noticed.output()


@pytest.mark.parametrize("script", [*SCRIPTS.glob("*.py")], ids=lambda script: script.stem)
def test_lesson_can_be_copied_because_it_imports_only_torch(script: Path) -> None:
    modules = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." if node.level else str(node.module).partition(".")[0])
    assert modules <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("argument", ["--local-rank=1", "--local_rank=1"])
def test_both_spellings_of_the_local_rank_are_read(argument: str) -> None:
    assert runpy.run_path(str(SCRIPTS / "start.py"))["local_rank"]([argument]) == 1


@pytest.mark.soak
def test_no_group_outlives_a_data_parallel_program() -> None:
    """A group that stays after destroy_process_group can abort the process at its exit, once in a while."""
    # A new interpreter, which has not imported torch._dynamo, forks a process for each program.
    program = """
import os, runpy, torch, torch.distributed
from ddptrain.cli import main
from ddptrain.lesson import SCRIPTS

def train():
    main("train --data digits --batch-size 500 --epochs 1 --backend gloo --sync ddp".split())

def lesson():
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    runpy.run_path(str(SCRIPTS / "ddp.py"), run_name="__main__")

for name, work in {"train": train, "ddp": lesson}.items():
    if not (pid := os.fork()):
        torch.set_num_threads(1)
        work()
        threads = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
        print(name, "left a group" if any("gloo" in thread for thread in threads) else "left none", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    left = re.findall(r"^(\w+) left (a group|none)$", done.stdout, re.MULTILINE)
    assert left == [("train", "none"), ("ddp", "none")], done.stdout + done.stderr


@pytest.mark.soak
def test_lesson_starts_its_own_ranks_by_mp_spawn(ddptrain: ForkServer) -> None:
    assert "2 of 3 ranks started: " in ddptrain.run(module=SCRIPTS / "start.py").output()


def test_restarted_workers_continue_from_the_checkpoint(ddptrain: ForkServer, tmp_path: Path) -> None:
    checkpoints = {"DDPJOB_CHECKPOINT_DIR": tmp_path}
    said = ddptrain.run("lesson", "restart", "--nproc-per-node", 1, env=checkpoints).output()
    assert said.index("rank 0 is killed while it writes the checkpoint of step 6") < said.index("start 2: ")
    assert "continues after step 5\nfinished after step 10, 1 restart" in said
    assert not list(tmp_path.iterdir())


def test_lesson_restart_ignores_what_an_interrupted_run_has_left(ddptrain: ForkServer, tmp_path: Path) -> None:
    port = free_port()
    of_agent = dist.TCPStore("127.0.0.1", port, is_master=True)  # which stays through the restart
    env = {"DDPJOB_CHECKPOINT_DIR": tmp_path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}

    def start(number: int) -> list[Run]:
        of_start = env | {"TORCHELASTIC_RESTART_COUNT": number}
        return [ddptrain.start(module=SCRIPTS / "restart.py", env=of_start | {"RANK": rank}) for rank in (0, 1)]

    (tmp_path / f"restart-{ddptrain.pid}.pt").write_text("old")  # of a run whose agent had this number
    killed, without_peer = start(0)
    assert (killed.wait(), without_peer.wait()) == (-signal.SIGKILL, 1), killed.output() + without_peer.output()
    again, beside = start(1)
    assert (again.wait(), beside.wait()) == (0, 0), again.output() + beside.output()
    assert "finished after step 10, 1 restart" in again.output()
    del of_agent


def test_lesson_runs_on_two_nodes(ddptrain: ForkServer) -> None:
    nodes = {"NNODES": 2, "NPROC_PER_NODE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    runs = [ddptrain.start("lesson", "collectives", env=nodes | {"NODE_RANK": rank}) for rank in (0, 1)]
    assert [run.wait() for run in runs] == [0, 0], runs[0].output() + runs[1].output()
    assert "  rank 3: " in runs[0].output() and not runs[1].output()


@pytest.mark.soak
def test_glossary_is_true_in_the_workers_of_two_nodes(ddptrain: ForkServer) -> None:
    port = free_port()
    env: dict[str, object] = {"NNODES": 2, "NPROC_PER_NODE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_RDZV_ID": "job-7"}
    runs = [ddptrain.start("lesson", "env", env=env | {"NODE_RANK": rank}) for rank in (0, 1)]
    assert [run.wait() for run in runs] == [0, 0], runs[0].output() + runs[1].output()
    rows = [line.split() for run in runs for line in run.output().splitlines() if line.split()[0] in WORKER_VARIABLES]
    variables = dict(re.findall(r"^\| `([A-Z_]+)` \|.*\| (.*) ?\|$", GLOSSARY.read_text(), re.MULTILINE))
    assert [name for name, *_ in rows] == list(WORKER_VARIABLES) == list(variables)
    shared = {name for name, *values in rows if len(values) == 4 and len(set(values)) == 1}
    assert shared == {*WORKER_VARIABLES} - {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"}
    for worker in range(4):
        values = {name: int(all_of[worker]) for name, *all_of in rows if all_of[worker].isdecimal()}
        assert values["RANK"] == worker
        for name, formula in variables.items():
            assert not formula or eval(formula.strip("` "), dict(values)) == values[name], (name, formula)  # noqa: S307
    assert {name: values[0] for name, *values in rows}["TORCHELASTIC_RUN_ID"] == "job-7"
