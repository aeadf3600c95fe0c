"""What ``ddprun`` reports of scripts of users: faults, stops, progress."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import ddprun
from ddprun import script_interface
from ddprun.cli import parse, resolve
from ddprun.diagnostics import _flight_json, collective_of, unfinished_collective
from ddprun.errors import UsageError
from ddprun.heartbeat import Heartbeat
from ddprun.reporting.progress import ProgressRecord
from ddprun.settings import Settings
from tests.ddprun.resilience.scripts import STEPS, line_of, run, written
from tests.ddptrain.runs import ForkServer, wait_until

pytestmark = pytest.mark.together


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
import json, os, sys, time, urllib.request
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

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
send(0, total_steps=200)
if life < 1 and "fail" in sys.argv:
    sys.exit(1)
send(60, 80, loss=0.25, grad_norm=float("nan"), current_step=120, total_steps=200, current_epoch=1.2)
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
send(100, 0, loss=0.25, train_loss=0.5, epoch=1.2, train_samples_per_second=12.5)
"""


def test_plain_script_runs_with_the_variables_of_torchrun(ddptrain: ForkServer, tmp_path: Path) -> None:
    done = run(ddptrain, "--nproc-per-node", 2, written(tmp_path), "--lr", 3, PET_RDZV_ID="job-7")
    for rank in (0, 1):
        assert f"[n0r{rank}] rank {rank} of 2 job-7 __main__ ['--lr', '3']\n" in done.output()
    message = done.message()
    assert (message["code"], message["outcome"], message["progress"]["step"]) == (0, "succeeded", STEPS)
    assert message["progress"]["stepsPerSecond"] > 0


@pytest.mark.parametrize(
    ("fault", "code", "kind", "said", "where"),
    [
        ("raise", 1, "ValueError", "sample 17 has 3 channels, expected 1", "raise ValueError"),
        ("exit", 3, "SystemExit", "rank 1 called sys.exit(3)", "sys.exit(3)"),
        ("leave", 1, "ExitedEarly", "rank 1 exited with code 0 and no report, and its peers lost it", ""),
        ("return", 1, "ExitedEarly", "rank 1 ended its script with exit code 0, and its peers lost it", ""),
        ("kill", 137, "Killed", "rank 1 was killed by SIGKILL", ""),
    ],
)
def test_rank_that_fails_is_named_and_not_its_peers(
    ddptrain: ForkServer, tmp_path: Path, *, fault: str, code: int, kind: str, said: str, where: str
) -> None:
    message = run(ddptrain, "--nproc-per-node", 3, written(tmp_path), fault, 1, code=code).message()
    assert (message["rank"], message["step"], message["cause"]) == (1, 5, "own")
    assert (message["kind"], message["message"]) == (kind, said)
    assert "fenced" not in message, "how it saves is not known"
    assert message["where"] == (f"train.py:{line_of(where)}" if where else None)
    assert kind != "ExitedEarly" or "makes fewer steps than the others" in message["hint"]  # what "return" does


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
    assert resolve(parse(["train.py"], {}), {"DDPJOB_STOP_GRACE": "295"}).stop_grace == 295
    assert resolve(parse(["--stop-grace", "9", "train.py"], {}), {"DDPJOB_STOP_GRACE": "295"}).stop_grace == 9
    with pytest.raises(UsageError, match="DDPRUN_HANG"):
        resolve(parse(["train.py"], {}), {"DDPRUN_HANG": "30"})


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
    assert (progress["checkpoint"], progress["fenced"]) == ({"step": 30, "path": "v1/model.pt"}, False)


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
    data_parallel, module = "/v/torch/nn/parallel/distributed.py", ("/v/torch/nn/modules/module.py", "_call_impl")
    buffers = ((data_parallel, "_distributed_broadcast_coalesced"), (data_parallel, "forward"), module)
    assert collective_of(dump(*buffers)) == "DistributedDataParallel"
    checks = (("/v/torch/distributed/utils.py", "_verify_param_shape_across_processes"), (data_parallel, "__init__"))
    assert collective_of(dump(*checks)) == "DistributedDataParallel"
    computes = (("/v/torch/nn/modules/linear.py", "forward"), (data_parallel, "_run_ddp_forward"), module)
    assert collective_of(dump(*computes)) == ""


def test_flight_recorder_shows_what_a_rank_waits_in_under_nccl() -> None:
    """The fields are those that PyTorch 2.11 recorded on an H100 of a rank that waited in ``loss.item()``."""

    def recorded(*last: tuple[str, str], enqueued: int = 11, ranks: str = "[0, 1]") -> str:
        entries = [
            {"profiling_name": name, "state": state, "pg_id": 0, "process_group": ["0", "default_pg"]}
            for name, state in (("nccl:all_reduce", "completed"), *last)
        ]
        status = {"last_enqueued_collective": enqueued, "last_started_collective": -1, "last_completed_collective": 10}
        group = {"name": "0", "desc": "default_pg", "ranks": ranks}
        return json.dumps({"entries": entries, "pg_config": {"0": group}, "pg_status": {"0": status}})

    waits = ("nccl:all_reduce", "scheduled")
    assert unfinished_collective(recorded(waits)) == "all_reduce"
    two = recorded(("nccl:_allgather_base", "started"), ("nccl:all_reduce", "completed"))
    assert unfinished_collective(two) == "_allgather_base"
    assert unfinished_collective(recorded()) == ""
    assert unfinished_collective(recorded(waits, ranks="[0]")) == ""  # a kernel before it does not end
    coalesced = (("nccl:recv 1<-0", "scheduled"), ("nccl:coalesced", "completed"))  # a member has no state of its own
    assert unfinished_collective(recorded(*coalesced, enqueued=10)) == ""
    assert unfinished_collective(recorded(("gloo:all_reduce", "scheduled"))) == ""  # it never becomes completed
    for other in ("", "{", "[]", '{"entries": 3}', '{"entries": [{}]}', '{"entries": [{"profiling_name": 1}]}'):
        assert unfinished_collective(other) == ""


def test_recording_with_deep_stacks_is_cut_to_its_newest_entries() -> None:
    frames = [{"name": "forward", "filename": "/usr/lib/python3/site-packages/torch/nn/modules/module.py", "line": 1}]
    entries = [{"record_id": number, "frames": frames * 40} for number in range(2000)]
    text = _flight_json({"version": "2.10", "entries": entries})
    assert len(text) < 8 * 2**20
    kept = json.loads(text)["entries"]
    assert kept == entries[-len(kept) :]
    assert len(kept) >= 500


def test_report_takes_any_result_but_none_with_the_name_of_another_value() -> None:
    with pytest.raises(TypeError, match="cannot be named seq"):
        ddprun.report(step=1, seq=1.0)
    ddprun.report(step=1, loss=1.0, recall=0.5)  # without a launcher it does nothing


def test_a_result_whose_name_a_later_release_took_ends_no_script_and_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_interface, "_state", script_interface._state)
    progress = ProgressRecord(1)
    script_interface.begin(progress, Heartbeat(), Settings())
    ddprun.report(step=7, slow=0.5, diverged=1.0, agreedStep=2, lossStep=3, recall=0.5)
    found = progress.snapshot()
    assert (found["step"], found["recall"], found["lossStep"]) == (7, 0.5, None)
    assert not found.keys() & {"slow", "diverged", "agreedStep"}
    with pytest.raises(TypeError, match="cannot be named pause"):
        ddprun.report(step=8, slow=0.5, pause=1.0)


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
    script_interface.begin(ProgressRecord(1), heartbeat, Settings())
    script_interface.report(step=50)
    reported = heartbeat.last
    script_interface.count_step()
    assert heartbeat.last.changes > reported.changes
    assert heartbeat.last.step == 50


def test_rank_whose_threads_go_on_reports_its_exception_at_once(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('sample 17')\n"
    )
    failed = run(ddptrain, "--nproc-per-node", 2, "--stop-grace", 1, written(tmp_path, text), code=1)
    message = failed.message()
    assert (message["rank"], message["kind"], message["where"]) == (1, "ValueError", "train.py:4")


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
    assert failed.message()["fenced"] is True, "it saves through ddprun"
    assert "[n0r1] error: rank 0 failed in load_newest: cannot read" in failed.output()
    assert "found" not in failed.output()


def test_chaos_fails_a_script_at_its_step(ddptrain: ForkServer, tmp_path: Path) -> None:
    message = run(ddptrain, "--nproc-per-node", 2, "--chaos", "crash:1:5", written(tmp_path), code=1).message()
    assert (message["rank"], message["step"], message["message"]) == (1, 5, "crash injected by --chaos")
    assert message["where"] == f"train.py:{line_of('optimizer.step()')}"


def test_chaos_that_does_not_occur_fails_a_script(ddptrain: ForkServer, tmp_path: Path) -> None:
    chaos = ("--chaos", f"crash:1:{STEPS + 1}")
    message = run(ddptrain, "--nproc-per-node", 2, *chaos, written(tmp_path), code=2).message()
    assert message["rank"] == 1 and "--chaos did not occur" in message["message"]


def test_handler_of_the_script_for_sigterm_saves_on_all_ranks(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, time\n"
        "def save(number, frame):\n    time.sleep(1 + int(os.environ['RANK']))\n    print('saved')\n    sys.exit(0)\n"
        # Not by print, which the handler's print could interrupt.
        "signal.signal(signal.SIGTERM, save)\nos.write(1, b'ready\\n')\nwhile True: time.sleep(0.1)\n"
    )
    started = ddptrain.start("--nproc-per-node", 2, written(tmp_path, text), module="ddprun")
    wait_until(lambda: started.output().count("ready") == 2, "both ranks")
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 75, started.output()
    assert started.output().count("saved") == 2
    assert started.message()["outcome"] == "stopped"


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
