"""``ddprun`` with scripts of users: how they run, and what is reported of their faults."""

from __future__ import annotations

import json
import os
import signal
import zipapp
from pathlib import Path
from typing import Any

import pytest
import torch

import ddprun
from ddprun import script_interface
from ddprun.cli import node_of, parse, resolve, starts
from ddprun.diagnostics import collective_of
from ddprun.errors import UsageError
from ddprun.heartbeat import Heartbeat
from ddprun.reporting.progress import Progress
from ddprun.script import _SET_BEFORE_IMPORT, Script
from ddprun.settings import Settings
from tests.processes import free_port
from tests.trainer.runs import ForkServer, Run, wait_until

pytestmark = pytest.mark.together

STEPS = 8
TRAINING = f"""
import os, sys, time
import torch
import torch.distributed as dist

def fail(fault):
    if fault == "raise":
        raise ValueError("sample 17 has 3 channels, expected 1")
    if fault == "exit":
        sys.exit(3)
    if fault == "leave":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), 9)
    if fault == "hang":
        time.sleep(1000)

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, {STEPS} + 1):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if len(sys.argv) > 2 and (step, rank) == (5, int(sys.argv[2])):
        fail(sys.argv[1])
print("rank", rank, "of", dist.get_world_size(), os.environ["TORCHELASTIC_RUN_ID"], __name__, sys.argv[1:])
dist.destroy_process_group()
"""
WAITING = """
import signal, sys, time
import ddprun
print("ready", flush=True)
while not ddprun.should_stop():
    time.sleep(0.05)
if sys.argv[1:] == ["save"]:
    ddprun.report(step=7, checkpoint="model.pt")
"""

# Sends what the KubeflowCallback of transformers 5.23 sends, in the same way.
REPORTING = """
import json, os, signal, sys, time, urllib.request
from datetime import datetime, timezone

def send(percent, left=None, **metrics):
    status = {"lastUpdatedTime": datetime.now(timezone.utc).isoformat(), "progressPercentage": percent}
    if left is not None:
        status["estimatedRemainingSeconds"] = left
    status["metrics"] = [{"name": str(k), "value": str(v)} for k, v in metrics.items()]
    token = open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"], encoding="utf-8").read().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    url, data = os.environ["KUBEFLOW_TRAINER_SERVER_URL"], json.dumps({"trainerStatus": status}).encode("utf-8")
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=5, context=None) as answer:
        assert answer.status == 200

if "catch" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: None)
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
send(0, total_steps=200)
if life < 1 and "fail" in sys.argv:
    sys.exit(1)
send(60, 80, loss=0.25, grad_norm=float("nan"), current_step=120, total_steps=200, current_epoch=1.2)
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
send(100, 0, loss=0.25, train_loss=0.5, epoch=1.2, train_samples_per_second=12.5)
"""
ADVICE = "this Hugging Face Trainer does not save when it is stopped"


def written(folder: Path, text: str = TRAINING) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TRAINING.splitlines(), start=1) if text in line)


def run(server: ForkServer, *argv: object, code: int = 0, first: str = "", **env: object) -> Run:
    return server.run(*argv, code=code, env=env, module="ddprun", first=first)


def test_plain_script_runs_with_the_variables_of_torchrun(ddptrain: ForkServer, tmp_path: Path) -> None:
    done = run(ddptrain, "--nproc-per-node", 2, written(tmp_path), "--lr", 3, PET_RDZV_ID="job-7")
    for rank in (0, 1):
        assert f"[n0r{rank}] rank {rank} of 2 job-7 __main__ ['--lr', '3']\n" in done.output()
    message = done.message()
    assert (message["code"], message["outcome"], message["progress"]["step"]) == (0, "succeeded", STEPS)


@pytest.mark.parametrize(
    ("fault", "code", "kind", "said", "where"),
    [
        ("raise", 1, "ValueError", "sample 17 has 3 channels, expected 1", "raise ValueError"),
        ("exit", 3, "SystemExit", "rank 1 called sys.exit(3)", "sys.exit(3)"),
        ("leave", 1, "ExitedEarly", "rank 1 exited with code 0 and no report, and its peers lost it", ""),
        ("kill", 137, "Killed", "rank 1 was killed by SIGKILL", ""),
    ],
)
def test_rank_that_fails_is_named_and_not_its_peers(
    ddptrain: ForkServer, tmp_path: Path, *, fault: str, code: int, kind: str, said: str, where: str
) -> None:
    message = run(ddptrain, "--nproc-per-node", 3, written(tmp_path), fault, 1, code=code).message()
    assert (message["rank"], message["step"], message["cause"]) == (1, 5, "own")
    assert (message["kind"], message["message"]) == (kind, said)
    assert message["where"] == (f"train.py:{line_of(where)}" if where else None)


def test_traceback_begins_in_the_script(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(tmp_path)
    failed = run(ddptrain, "--nproc-per-node", 2, script, "raise", 0, code=1)
    lines = [line for line in failed.output().splitlines() if "Traceback" in line or "File" in line]
    assert lines[0] == "[n0r0] Traceback (most recent call last):"
    assert lines[1].startswith(f'[n0r0]   File "{script}", line ')
    assert failed.output().splitlines()[-3].startswith("root cause: rank 0, exit code 1, ValueError: sample 17")


def test_rank_that_hangs_is_named_and_not_those_that_wait_for_it(ddptrain: ForkServer, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    argv = ("--nproc-per-node", 3, "--hang-timeout", 5, "--log-dir", logs)
    message = run(ddptrain, *argv, written(tmp_path), "hang", 2, code=76).message()
    assert (message["rank"], message["step"], message["kind"]) == (2, 5, "Hang")
    assert message["where"] == f"train.py:{line_of('time.sleep(1000)')}"
    assert "rank 0 waits in all_reduce of step 5" in message["message"]
    stacks = [(logs / "reports" / "local-0" / f"rank-{rank}.stacks.txt").read_text() for rank in range(3)]
    assert all("train.py" in text for text in stacks)
    assert "root cause: rank 2, exit code 76" in run(ddptrain, "--why", logs).output()


def test_without_the_flag_no_pause_counts_as_a_hang() -> None:
    assert resolve(parse(["train.py"], {}), {}).hang_timeout == 0
    assert resolve(parse(["--hang-timeout", "60", "train.py"], {}), {}).hang_timeout == 60
    assert resolve(parse(["train.py"], {}), {"DDPRUN_HANG_TIMEOUT": "30"}).hang_timeout == 30
    with pytest.raises(UsageError, match="DDPRUN_HANG"):
        resolve(parse(["train.py"], {}), {"DDPRUN_HANG": "30"})


def test_two_nodes_meet_by_torchruns_variables(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(tmp_path)
    common = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 1, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": free_port()}
    runs = [ddptrain.start(script, env=common | {"PET_NODE_RANK": node}, module="ddprun") for node in (0, 1)]
    for node, started in enumerate(runs):
        assert started.wait() == 0, started.output()
        assert f"[n{node}r{node}] rank {node} of 2 " in started.output()


def test_ranks_of_a_module_and_of_an_executable(ddptrain: ForkServer, tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("import sys; print('module', __name__, sys.argv[1:])")
    done = run(ddptrain, "--nproc-per-node", 2, "-m", "mine.main", "-x", PYTHONPATH=tmp_path, code=1)
    assert "No module named 'mine'" in done.output()  # PYTHONPATH is read at the start of an interpreter, not of a fork
    spawned = run(ddptrain, "--start", "spawn", "--nproc-per-node", 2, "-m", "mine.main", "-x", PYTHONPATH=tmp_path)
    assert "[n0r1] module __main__ ['-x']" in spawned.output()
    shell = ("--nproc-per-node", 2, "--no-python", "sh", "-c")
    assert "[n0r1] 1 of 2" in run(ddptrain, *shell, "echo $RANK of $WORLD_SIZE").output()
    failed = run(ddptrain, *shell, "sleep $RANK; test $RANK = 0 && exit 4", code=4).message()
    assert (failed["rank"], failed["code"]) == (0, 4)


IMPORTS = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("imported by", "launcher" if os.getpid() == launcher else "rank", flush=True)
launcher = os.getpid()
sys.meta_path.insert(0, Watch())
forgotten = [sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "torch"]
"""


def test_a_single_rank_imports_torch_itself(ddptrain: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    done = run(ddptrain, written(tmp_path, "import torch\n"), first=IMPORTS)
    assert done.output() == "imported by rank\n"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "import torch\ntorch.set_num_threads(2)\ntorch.ones(2**18).add_(1.0)\n",
            "after the import of torch, mine a forked process hangs in its first operation on several threads",
        ),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
            "the import of torch, mine has started 1 thread(s), which a fork would not have",
        ),
        (
            "import socket\nopened = socket.socket()\n",
            "the import of torch, mine has opened socket, which a fork would share",
        ),
        (
            "import os\nis_first = os.environ.get('LOCAL_RANK', '0') == '0'\n",
            "the import of torch, mine has read LOCAL_RANK, which is set only in a rank",
        ),
    ],
)
def test_ranks_are_not_forked_after_an_import_that_forks_do_not_survive(
    ddptrain: ForkServer, tmp_path: Path, module: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(module)
    argv = ("--preload", "mine", "--nproc-per-node", 2)
    done = run(ddptrain, *argv, written(tmp_path, "print('ran')\n"))
    assert done.output().splitlines()[0] == f"each rank starts in an interpreter of its own: {said}"
    assert done.output().count("] ran\n") == 2
    refused = run(ddptrain, "--start", "fork", *argv, tmp_path / "train.py", code=2)
    assert refused.message()["message"] == f"--start fork: {said}"


def test_preloaded_module_is_imported_once_and_from_the_folder_of_the_script(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("print('imported', flush=True)\n")
    script = written(tmp_path, "import mine\nimport torch\nprint(int(torch.ones(2**18).add_(1.0).sum()))\n")
    done = run(ddptrain, "--nproc-per-node", 2, script, DDPRUN_PRELOAD="mine")
    assert sorted(done.output().splitlines()) == [f"[n0r{rank}] {2**19}" for rank in (0, 1)] + ["imported"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "--preload mine: there is no module mine"),
        ("import absent\n", "--preload mine: its import failed with ModuleNotFoundError: No module named 'absent'"),
        ("import os\nos.environ['RANK']\n", "--preload mine: its import failed with KeyError: 'RANK'"),
        ("import sys\nsys.exit('no')\n", "--preload mine: its import failed with SystemExit: no"),
    ],
)
def test_module_that_cannot_be_preloaded_is_refused(
    ddptrain: ForkServer, tmp_path: Path, module: str | None, said: str
) -> None:
    if module is not None:
        (tmp_path / "mine.py").write_text(module)
    refused = run(ddptrain, "--preload", "mine", written(tmp_path), code=2)
    assert (refused.message()["kind"], refused.message()["message"]) == ("UsageError", said)


def test_ways_to_start_the_ranks() -> None:
    def chosen(*flags: str, ranks: int = 2, **env: str) -> tuple[str, tuple[str, ...]]:
        return starts(parse([*flags, "train.py"], env), ranks)

    assert chosen() == ("auto", ("torch",))
    assert chosen(ranks=1) == ("auto", ())
    assert chosen("--start", "fork", ranks=1) == ("fork", ("torch",))
    assert chosen("--preload", "a,b.c", ranks=1, DDPRUN_START="fork") == ("fork", ("torch", "a", "b.c"))
    assert resolve(parse(["train.py"], {}), {"DDPRUN_START": "spawn"}) == resolve(parse(["train.py"], {}), {})
    for flags, said in (
        (["--start", "span"], "--start span is not one of auto, fork, spawn"),
        (["--start", "spawn", "--preload", "a"], "--preload has no effect with --start spawn"),
        (["--no-python", "--preload", "a"], "--preload has no effect with --no-python"),
    ):
        with pytest.raises(UsageError, match=said):
            chosen(*flags)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_have_the_variables_of_torchruns_workers_and_no_others(
    ddptrain: ForkServer, tmp_path: Path, ranks: int
) -> None:
    script = written(tmp_path, "import os, json\nprint(json.dumps(sorted(os.environ)))\n")
    own = {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
        "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT",
    }  # fmt: skip
    for how in ("auto", "fork", "spawn"):
        first = "import os; del os.environ['OMP_NUM_THREADS']"
        done = run(ddptrain, "--start", how, "--nproc-per-node", ranks, script, first=first)
        for line in done.output().splitlines():
            found = set(json.loads(line[line.index('["') :]))
            given = {"PATH", "TMPDIR", "DDPJOB_TERMINATION_LOG", "DDPJOB_PROGRESS_PORT"}
            assert found - given - {"LC_CTYPE"} == own | ({"OMP_NUM_THREADS"} if ranks > 1 else set()), how


def test_interpreter_ends_as_usual(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'handler ran')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread ended'))).start()\n"
        "sys.exit(0)\n",
    )
    slow = "import ddprun.launcher.node_reports as reports; reports._VOLUME = 0.0"  # a child of the launcher stays
    done = ddptrain.run("--log-dir", tmp_path / "logs", script, module="ddprun", first=slow)
    assert "thread ended\nhandler ran\n" in done.output()
    assert "Exception" not in done.output()


@pytest.mark.parametrize("saves", [True, False])
def test_script_that_asks_saves_after_sigterm(ddptrain: ForkServer, tmp_path: Path, saves: bool) -> None:
    arguments = ("--nproc-per-node", 2, written(tmp_path, WAITING), *(["save"] if saves else []))
    started = ddptrain.start(*arguments, module="ddprun")
    wait_until(lambda: started.output().count("ready") == 2, "both ranks")
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 75, started.output()
    message = started.message()
    assert (message["outcome"], message["saved"]) == ("stopped", saves)


def test_script_without_a_handler_ends_by_sigterm_and_that_is_no_failure(ddptrain: ForkServer, tmp_path: Path) -> None:
    started = ddptrain.start(written(tmp_path, "import time\nprint('ready')\ntime.sleep(1000)\n"), module="ddprun")
    wait_until(lambda: "ready" in started.output(), "the rank")
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 75, started.output()
    assert (started.message()["outcome"], started.message()["saved"]) == ("stopped", False)


def test_script_that_reports_shows_its_progress(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import ddprun, time\n"
        "ddprun.report(step=30, total_steps=90, loss=0.5, checkpoint='{0}/v1/model.pt')\ntime.sleep(1000)\n"
    )
    script = written(tmp_path, text.format(tmp_path))
    started = ddptrain.start(script, env={"DDPJOB_CHECKPOINT_DIR": tmp_path}, module="ddprun")
    progress = started.at_step(30)
    assert (progress["totalSteps"], progress["loss"]) == (90, 0.5)
    assert progress["checkpoint"] == {"step": 30, "path": "v1/model.pt"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rdzv-backend", "c10d"], "ddprun does not support --rdzv-backend"),
        (["--rdzv-endpoint=host:29400"], "ddprun does not support --rdzv-endpoint"),
        (["--logs-specs", "mine"], "ddprun does not support --logs-specs"),
        (["--event_log_handler", "mine"], "ddprun does not support --event_log_handler"),
        (["-t", "3"], "ddprun does not support -t"),
        (["--nnodes", "1:4"], "ddprun does not support --nnodes 1:4"),
        (["--nproc-per-nod", "2"], "ddprun has no flag --nproc-per-nod"),
        (["--nproc-per-node", "many"], "--nproc-per-node=many is not a whole number"),
    ],
)
def test_flag_that_is_not_supported_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        node_of(parse([*flags, "train.py"], {}), {})
    assert refused.value.hint


def test_flags_of_torchrun_give_the_place_and_win_over_variables() -> None:
    env = {"PET_NNODES": "3", "PET_NODE_RANK": "1", "NPROC_PER_NODE": "4", "MASTER_ADDR": "a", "PET_STANDALONE": "0"}
    flags = ["--nnodes=2:2", "--nproc_per_node", "8", "--master-addr", "b", "--rdzv_backend=static", "--run-path"]
    ranks = node_of(parse([*flags, "train.py", "--nnodes", "9"], env), env)
    assert (ranks.nnodes, ranks.node_rank, ranks.nproc_per_node, ranks.master_addr) == (2, 1, 8, "b")
    alone = node_of(parse(["--standalone", "train.py"], {}), {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "a"})
    assert (alone.nnodes, alone.node_rank, alone.master_addr) == (1, 0, "127.0.0.1")
    with pytest.raises(UsageError, match="PET_RDZV_BACKEND=c10d"):
        parse(["train.py"], {"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2"})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "4"', "OMP_NUM_THREADS"),
        ("os.environ.setdefault('PYTORCH_ALLOC_CONF', 'x')", "PYTORCH_ALLOC_CONF"),
        ('run = os.environ["TORCHELASTIC_RUN_ID"]', None),
        ('if os.environ["OMP_NUM_THREADS"] == "4":', None),
        ('os.environ["OMPI_RANK"] = "1"', None),
    ],
)
def test_script_that_sets_variables_for_the_import_of_torch_is_recognised(line: str, name: str | None) -> None:
    found = _SET_BEFORE_IMPORT.search(line.encode())
    assert (found and found[1].decode()) == name


def test_variables_are_searched_in_the_file_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for name in ("__main__", "train"):
        (package / f"{name}.py").write_text(f"import os\nos.environ['OMP_{name}'] = '4'\n")
    monkeypatch.chdir(tmp_path)
    for name, found in (("mine", "OMP___main__"), ("mine.train", "OMP_train")):
        said = Script("module", name, (), Settings()).preload()
        assert said == f"{name} sets variables that torch reads when it is imported ({found})"


def test_stack_in_torch_shows_what_a_rank_waits_in() -> None:
    starts = str(Path(collective_of.__code__.co_filename).parent / "launcher" / "processes.py")

    def dump(*frames: tuple[str, str]) -> str:
        lines = [f'  File "{file}", line 1 in {name}' for file, name in (*frames, ("/a/train.py", "f"), (starts, "g"))]
        return "\n".join(["Current thread 0x01 (most recent call first):", *lines])

    distributed = ("/v/torch/distributed/distributed_c10d.py", "barrier")
    assert collective_of(dump(distributed, ("/v/torch/distributed/c10d_logger.py", "wrapper"))) == "barrier"
    assert collective_of(dump(("/v/torch/autograd/graph.py", "_engine_run_backward"))) == "backward"
    assert collective_of(dump(("/usr/lib/python3.11/socket.py", "recv"), distributed)) == ""
    assert collective_of(dump()) == ""


def test_report_refuses_a_name_that_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="no argument losss"):
        ddprun.report(step=1, losss=1.0)
    values: dict[str, Any] = json.loads('{"loss": 1.0}')
    ddprun.report(step=1, **values)  # without a launcher it does nothing


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_script_that_closes_its_stdout_succeeds(ddptrain: ForkServer, tmp_path: Path, how: str) -> None:
    script = written(tmp_path, "import sys\nprint('last line')\nsys.stdout.close()\n")
    done = run(ddptrain, "--start", how, "--nproc-per-node", 2, script)
    assert "[n0r1] last line\n" in done.output()
    assert "Traceback" not in done.output()


def test_script_that_closes_all_descriptors_ends_as_it_does_alone(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import os, sys\n"
        "os.closerange(3, 1024)\n"
        f"files = [open('{tmp_path}/results', 'w') for _ in range(100)]\n"
        "print('closed')\nsys.exit(len(sys.argv) > 1 and 'failed')\n"
    )
    script = written(tmp_path, text)
    assert run(ddptrain, script).output() == "closed\n"
    assert run(ddptrain, script, "fail", code=1).message()["message"].endswith("no report; its last line: failed")
    assert (tmp_path / "results").read_text() == ""


def test_script_in_another_encoding_runs(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes("# -*- coding: latin-1 -*-\nprint('é' == chr(233))\n".encode("latin-1"))
    assert run(ddptrain, script).output() == "True\n"


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("for _ in range(6): first.step(); second.step()", 6),  # as a discriminator and a generator
        ("first.step()\nfor _ in range(7): second.step()", 7),  # as two phases
    ],
)
def test_steps_of_several_optimizers_are_counted(ddptrain: ForkServer, tmp_path: Path, loop: str, steps: int) -> None:
    start = "import torch\nfirst, second = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters()) for _ in range(2))\n"
    assert run(ddptrain, written(tmp_path, start + loop)).message()["progress"]["step"] == steps


def test_steps_between_reports_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_interface, "_state", script_interface._state)
    heartbeat = Heartbeat()
    script_interface.begin(Progress(1, ""), heartbeat, Settings())
    script_interface.report(step=50)
    reported = heartbeat.last
    script_interface.count_step()
    assert heartbeat.last.changes > reported.changes
    assert heartbeat.last.step == 50


def test_classes_of_the_script_can_be_pickled_until_its_end(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import atexit, pickle, threading, time\n"
        "class Saved: pass\n"
        "def save(name): print(name, type(pickle.loads(pickle.dumps(Saved()))).__name__)\n"
        "atexit.register(save, 'handler')\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(0.3), save('thread'))).start()\n"
    )
    assert "thread Saved\nhandler Saved\n" in run(ddptrain, written(tmp_path, text)).output()
    spawned = run(ddptrain, "--start", "spawn", "-m", "train", first=f"import os; os.chdir({str(tmp_path)!r})")
    assert "thread Saved\nhandler Saved\n" in spawned.output()


def test_script_with_a_syntax_error_is_reported_at_its_line(ddptrain: ForkServer, tmp_path: Path) -> None:
    failed = run(ddptrain, written(tmp_path, "x = 1\ndef f(:\n"), code=1)
    assert failed.message()["where"] == "train.py:2"
    assert "/ddprun/" not in failed.output()


def test_hook_for_uncaught_exceptions_is_called(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = "import sys\nsys.excepthook = lambda kind, error, trace: print('crashed:', error, trace.tb_lineno)\n1 / 0\n"
    failed = run(ddptrain, written(tmp_path, text), code=1)
    assert "crashed: division by zero 3\n" in failed.output()
    assert failed.message()["kind"] == "ZeroDivisionError"


def test_error_is_shown_also_if_the_hook_for_it_fails(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = "import sys\nsys.excepthook = lambda kind, error, trace: error.absent\n1 / 0\n"
    output = run(ddptrain, written(tmp_path, text), code=1).output()
    assert "AttributeError: 'ZeroDivisionError' object has no attribute 'absent'\n" in output
    assert "ZeroDivisionError: division by zero\nroot cause: " in output


IN_WORKER = """
import torch
class Samples:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        raise ValueError(f"sample {index} has 3 channels")
def work(index):
    Samples()[index]
if __name__ == "__main__":
    %s
"""


@pytest.mark.parametrize(
    "line",
    [
        "next(iter(torch.utils.data.DataLoader(Samples(), num_workers=1)))",
        "torch.multiprocessing.spawn(work, nprocs=1)",
    ],
)
def test_error_in_a_worker_process_is_reported_as_the_worker_saw_it(
    ddptrain: ForkServer, tmp_path: Path, line: str
) -> None:
    message = run(ddptrain, written(tmp_path, IN_WORKER % line), code=1).message()
    assert (message["message"], message["where"]) == ("ValueError: sample 0 has 3 channels", "train.py:7")


def at_a_terminal(text: str = "") -> str:
    """Return what makes the launcher the foreground process of a terminal, on which a person has written ``text``."""
    return (
        "import fcntl, os, pty, termios\n"
        "person, terminal = pty.openpty()\n"
        "fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)\n"
        "os.dup2(terminal, 0)\n"
        f"os.write(person, {text.encode()!r})\n"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_that_reads_from_a_terminal_fails_and_is_not_stopped(
    ddptrain: ForkServer, tmp_path: Path, ranks: int
) -> None:
    script = written(tmp_path, "import sys\nassert not sys.stdin.isatty()\ninput('continue? ')\n")
    failed = run(ddptrain, "--nproc-per-node", ranks, script, first=at_a_terminal("yes\n"), code=1)
    assert (failed.message()["kind"], failed.message()["where"]) == ("EOFError", "train.py:3")


def test_only_a_single_rank_reads_what_is_redirected(ddptrain: ForkServer, tmp_path: Path) -> None:
    redirected = "import os\nread, write = os.pipe()\nos.write(write, b'lr: 3')\nos.close(write)\nos.dup2(read, 0)\n"
    script = written(tmp_path, "import sys\nprint('read', sys.stdin.read())\n")
    assert run(ddptrain, script, first=redirected).output() == "read lr: 3\n"
    assert run(ddptrain, "--nproc-per-node", 2, script, first=redirected).output().count("read \n") == 2


def test_rank_whose_threads_go_on_reports_its_exception_at_once(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('sample 17')\n"
    )
    failed = run(ddptrain, "--nproc-per-node", 2, "--stop-grace", 1, written(tmp_path, text), code=1)
    message = failed.message()
    assert (message["rank"], message["kind"], message["where"]) == (1, "ValueError", "train.py:4")


def test_interrupt_while_threads_are_awaited_ends_the_script_as_python_does(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    text = (
        "import atexit, sys, threading, time, traceback\n"
        "atexit.register(print, 'handler ran')\n"
        "def functions():\n"
        "    frame = sys._current_frames()[threading.main_thread().ident]\n"
        "    return [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]\n"
        "def work():\n"
        "    while '_shutdown' not in functions(): time.sleep(0.01)\n"
        "    print('ready')\n    time.sleep(600)\n"
        "threading.Thread(target=work).start()\n"
    )
    started = ddptrain.start(written(tmp_path, text), module="ddprun")
    wait_until(lambda: "ready" in started.output(), "the end of the script")
    os.kill(started.pid, signal.SIGINT)
    assert started.wait() == 75, started.output()
    assert "handler ran" in started.output()


def test_each_life_of_a_rank_has_a_log_file(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(tmp_path, "import os\nprint('life', os.environ['TORCHELASTIC_RESTART_COUNT'])\n1 / 0\n")
    logs = tmp_path / "logs"
    run(ddptrain, "--max-restarts", 1, "--log-dir", logs, "--nproc-per-node", 2, script, code=1)
    for rank in (0, 1):
        lives = [(logs / name).read_text() for name in (f"rank-{rank}.log", f"rank-{rank}.life-2.log")]
        assert ["life 0" in lives[0], "life 1" in lives[0], "life 1" in lives[1]] == [True, False, True]


RESUMING = """
import sys, torch
import torch.distributed as dist
import ddprun
from ddprun.distributed import default_group
default_group._CHUNK = 1000
dist.init_process_group("gloo")
found = ddprun.checkpoints(sys.argv[1] if dist.get_rank() == 0 else "/absent").load_newest()
print("found", found and (found.step, torch.equal(found.state["weights"], torch.arange(999.0))))
dist.destroy_process_group()
"""


def test_all_ranks_resume_from_the_checkpoint_that_rank_zero_has_read(ddptrain: ForkServer, tmp_path: Path) -> None:
    script, folder = written(tmp_path, RESUMING), tmp_path / "checkpoints"
    assert run(ddptrain, "--nproc-per-node", 2, script, folder).output().count("found None") == 2
    ddprun.checkpoints(folder).save(6, {"weights": torch.arange(999.0)})
    output = run(ddptrain, "--nproc-per-node", 3, script, folder).output()
    assert [f"[n0r{rank}] found (6, True)\n" in output for rank in range(3)] == [True] * 3


def test_ranks_do_not_start_anew_if_rank_zero_cannot_read(ddptrain: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    ddprun.checkpoints(folder).save(6, {"weights": torch.zeros(3)})
    (folder / "run-000001" / "step-000000006.pt").unlink()
    (folder / "run-000001" / "step-000000006.pt").symlink_to("/proc/self/mem")  # a read gives EIO
    failed = run(ddptrain, "--nproc-per-node", 2, written(tmp_path, RESUMING), folder, code=73)
    assert (failed.message()["rank"], failed.message()["kind"]) == (0, "VolumeUnwritable")
    assert "[n0r1] error: rank 0 failed in load_newest: cannot read" in failed.output()
    assert "found" not in failed.output()


def test_forked_ranks_without_a_seed_draw_different_numbers(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(
        tmp_path, "import random, numpy, torch\nprint(torch.rand(1), random.random(), numpy.random.rand())\n"
    )
    done = run(ddptrain, "--start", "fork", "--nproc-per-node", 2, script)
    lines = [line.split("] ", 1)[1].split() for line in done.output().splitlines() if "tensor" in line]
    assert len(lines) == 2
    assert all(first != second for first, second in zip(*lines, strict=True))


def test_chaos_fails_a_script_at_its_step(ddptrain: ForkServer, tmp_path: Path) -> None:
    message = run(ddptrain, "--nproc-per-node", 2, "--chaos", "crash:1:5", written(tmp_path), code=1).message()
    assert (message["rank"], message["step"], message["message"]) == (1, 5, "crash injected by --chaos")
    assert message["where"] == f"train.py:{line_of('optimizer.step()')}"


def test_chaos_that_does_not_occur_fails_a_script(ddptrain: ForkServer, tmp_path: Path) -> None:
    chaos = ("--chaos", f"crash:1:{STEPS + 1}")
    message = run(ddptrain, "--nproc-per-node", 2, *chaos, written(tmp_path), code=2).message()
    assert message["rank"] == 1 and "--chaos did not occur" in message["message"]


def test_sys_exit_in_a_thread_ends_the_thread_only(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import sys, threading\n"
        "thread = threading.Thread(target=sys.exit, args=(3,))\n"
        "thread.start()\nthread.join()\nprint('goes on')\n"
    )
    assert run(ddptrain, written(tmp_path, text)).output() == "goes on\n"


def test_handler_of_the_script_for_sigterm_saves_on_all_ranks(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, time\n"
        "def save(number, frame):\n    time.sleep(1 + int(os.environ['RANK']))\n    print('saved')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready')\nwhile True: time.sleep(0.1)\n"
    )
    started = ddptrain.start("--nproc-per-node", 2, written(tmp_path, text), module="ddprun")
    wait_until(lambda: started.output().count("ready") == 2, "both ranks")
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 75, started.output()
    assert started.output().count("saved") == 2
    assert started.message()["outcome"] == "stopped"


def test_script_in_a_folder_with_spaces_imports_its_neighbours_after_chdir(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text("def fail():\n    raise ValueError('in the neighbour')\n")
    (folder / "train it.py").write_text("import os\nos.chdir('/')\nimport neighbour\nneighbour.fail()\n")
    first = f"import os; os.chdir({str(tmp_path)!r})"
    for how in ("fork", "spawn"):
        failed = run(ddptrain, "--start", how, "my scripts/train it.py", first=first, code=1)
        assert (failed.message()["message"], failed.message()["where"]) == ("in the neighbour", "neighbour.py:2")
        assert f'File "{folder}/train it.py", line 4, in <module>\n    neighbour.fail()\n' in failed.output()


def test_archive_runs_and_its_failure_has_a_place(ddptrain: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "inner.py").write_text("def fail():\n    raise ValueError(f'of {__name__}')\n")
    (folder / "__main__.py").write_text("import sys, inner\nprint(sys.argv[1:])\ninner.fail()\n")
    zipapp.create_archive(folder, tmp_path / "app.pyz")
    failed = run(ddptrain, "--nproc-per-node", 2, tmp_path / "app.pyz", "--lr", 3, code=1)
    assert "[n0r1] ['--lr', '3']\n" in failed.output()
    assert (failed.message()["message"], failed.message()["where"]) == ("of inner", "inner.py:2")


def test_script_reports_as_in_a_trainjob_of_kubeflow(ddptrain: ForkServer, tmp_path: Path) -> None:
    script, env = written(tmp_path, REPORTING), {"http_proxy": "http://127.0.0.1:1"}
    argv = ("--max-restarts", 1, script, "fail", tmp_path / "go")
    started = ddptrain.start(*argv, env=env, module="ddprun")
    now = started.at_step(120)
    expected = {"step": 120, "totalSteps": 200, "epoch": 2, "loss": 0.25, "etaSeconds": 80, "phase": "start"}
    assert now.items() >= expected.items() and "percent" not in now
    (tmp_path / "go").touch()
    assert started.wait() == 0, started.output()
    message = started.message()
    ended = {"step": 120, "totalSteps": 200, "etaSeconds": 0, "samplesPerSecond": 12.5}
    assert message["outcome"] == "succeeded" and message["progress"].items() >= ended.items()
    assert started.output().count(ADVICE) == 1, "in two lives"


def test_script_that_handles_sigterm_is_not_told_to_save(ddptrain: ForkServer, tmp_path: Path) -> None:
    assert ADVICE not in run(ddptrain, written(tmp_path, REPORTING), "catch").output()


def test_server_of_the_user_takes_the_reports(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(tmp_path, "import os\nprint({k: v for k, v in os.environ.items() if 'KUBEFLOW' in k})\n")
    own = {"KUBEFLOW_TRAINER_SERVER_URL": "https://example.com/status"}
    assert run(ddptrain, script, **own).output() == f"{own}\n"
