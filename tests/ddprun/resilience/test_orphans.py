"""What ranks leave behind does not survive the run: processes in any session, workers, shared memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from ddprun import proc
from ddprun.launcher import orphans
from ddprun.launcher.orphans import SHARED_MEMORY
from tests.ddptrain.runs import ForkServer, wait_until

pytestmark = pytest.mark.together

# A session of its own, a child of a process that has ended, and one that ignores SIGTERM.
LEAVES = """
import os, signal, subprocess, sys, time
ignores = "import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(120)"
started = [
    subprocess.Popen(["sleep", "120"], start_new_session=True).pid,
    subprocess.Popen(["sh", "-c", "sleep 120 & echo $! >&2; wait"], stderr=subprocess.PIPE, start_new_session=True),
    subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE, start_new_session=True),
]
started[2].stdout.readline()
pids = [started[0], started[1].pid, int(started[1].stderr.readline()), started[2].pid]
os.kill(started[1].pid, 9)
shared = f"/dev/shm/torch_{os.getpid()}_17_0"
open(shared, "w").close()
print("left", *pids, flush=True)
print("shared", os.getpid(), flush=True)
print("ready", flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
time.sleep(120 * (sys.argv[1] == "wait"))
"""
# torch_shm_manager deletes the files of a process that is killed, unless it is killed itself, as when memory is full.
WORKERS = """
import os, pathlib, torch
class Samples:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.full((4,), os.getpid())
def is_manager(process):
    try:
        run = os.environ["DDPJOB_TERMINATION_LOG"].encode()
        return b"torch_shm" in (process / "cmdline").read_bytes() and run in (process / "environ").read_bytes()
    except OSError:
        return False
if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    samples = iter(torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context="spawn"))
    pid = int(next(samples)[0, 0])
    kept = torch.ones(8).share_memory_()
    managers = [int(process.name) for process in pathlib.Path("/proc").glob("[1-9]*") if is_manager(process)]
    for manager in managers:
        os.kill(manager, 9)
    files = list(pathlib.Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    print("left", pid, *managers, flush=True)
    print("shared", os.getpid(), len(files), flush=True)
    os.kill(os.getpid(), 9)
"""


def left(output: str) -> list[int]:
    """Return the processes that all ranks have named."""
    return [int(pid) for line in re.findall(r"left (.*)", output) for pid in line.split()]


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("kill", 137), ("wait", 75)])
def test_processes_that_ranks_leave_behind_end_with_the_run(
    ddptrain: ForkServer, tmp_path: Path, how: str, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVES)
    with subprocess.Popen(["true"]) as other:
        foreign = SHARED_MEMORY / f"torch_{other.pid}_17_{how}"
    try:
        # As of `server & exec ddprun`: the launcher's child, but not of its ranks.
        first = (
            "import subprocess; server = subprocess.Popen(['sleep', '120']); print('server', server.pid, flush=True)"
        )
        flags = ("--stop-grace", 3, "--nproc-per-node", 2, "--start", "spawn")
        run = ddptrain.start(*flags, script, how, module="ddprun", first=first)
        if how == "wait":
            wait_until(lambda: run.output().count("ready") == 2, "both ranks")
            foreign.touch()  # during the run, by a process that has ended
            os.kill(run.pid, signal.SIGTERM)
        assert run.wait() == code, run.output()
        pids = left(run.output())
        assert len(pids) == 8
        assert [pid for pid in pids if proc.state(pid) not in ("", "Z")] == []
        assert foreign.exists() == (how == "wait")
        ranks = re.findall(r"shared (\d+)", run.output())
        assert len(ranks) == 2 and not [pid for pid in ranks if list(SHARED_MEMORY.glob(f"torch_{pid}_*"))]
        [server] = re.findall(r"server (\d+)", run.output())
        assert proc.state(int(server)) not in ("", "Z")
        os.kill(int(server), signal.SIGKILL)
    finally:
        foreign.unlink(missing_ok=True)


def test_workers_and_shared_memory_of_a_killed_rank_do_not_stay(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    output = ddptrain.run(script, module="ddprun", code=137).output()
    assert len(left(output)) >= 2  # a worker and a manager
    assert [pid for pid in left(output) if proc.state(pid) not in ("", "Z")] == []
    [(rank, files)] = re.findall(r"shared (\d+) (\d+)", output)
    assert int(files) > 0
    assert [file for pid in (rank, *left(output)) for file in SHARED_MEMORY.glob(f"torch_{pid}_*")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_process_of_another_user_does_not_end_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a program that sudo has started."""
    monkeypatch.setattr(orphans, "_ASKED", 0.0)
    monkeypatch.setattr(orphans, "_FORCED", 0.0)
    launcher = os.fork()
    if launcher == 0:
        code = 1
        try:
            found = orphans.Orphans()
            other = subprocess.Popen(["sleep", "60"], start_new_session=True)
            os.setresuid(65534, 65534, 0)
            code = 3 if found.remain() else 0
        finally:
            os.setresuid(0, 0, 0)
            other.kill()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == 0


def test_process_that_saves_after_sigterm_has_the_whole_grace(ddptrain: ForkServer, tmp_path: Path) -> None:
    saves = "trap 'sleep 2; echo saved; exit' TERM; echo ready; while true; do sleep 0.1; done"
    command = ("--no-python", "sh", "-c", f"({saves}) & wait")  # sh itself ends at once by SIGTERM
    run = ddptrain.start(*command, module="ddprun")
    wait_until(lambda: "ready" in run.output(), "the program")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.output()
    assert "saved" in run.output()
