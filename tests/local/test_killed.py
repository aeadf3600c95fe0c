"""SIGKILL of the running session: no process stays, and the next run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpjob.cluster.base import Json
from ddpjob.local.state import StateFolder
from tests.local.bench import MARKER, marked
from tests.local.builders import a_local_job
from tests.local.sessions import Sessions
from tests.processes import end, eventually, spawn, tail

pytestmark = pytest.mark.timeout(300)

# Everything that escapes a process group: sessions of their own, a daemon, one that ignores SIGTERM.
SCRIPT = (
    "[ -e /checkpoints/go ] && exit 0; trap '' TERM HUP; setsid sleep 600 & (setsid sh -c 'sleep 600 & sleep 600' &);"
    " echo up; while :; do sleep 0.01; done"
)


@dataclass
class Killed:
    """A state folder whose job's runner was killed amid the first attempt."""

    sessions: Sessions
    shims: list[int]


@pytest.fixture
async def killed(tmp_path: Path) -> AsyncIterator[Killed]:
    root, log = tmp_path / "state", tmp_path / "session.log"
    process = spawn([sys.executable, "-m", "tests.local.sessions", str(root), json.dumps(job(tmp_path))], log)
    try:
        eventually("both nodes are up", lambda: process.poll() is not None or len(_logs(root)) == 2, timeout=120)
        assert process.poll() is None, tail(log)
        assert len(marked(str(tmp_path))) >= 8
        shims = _children(process.pid)
        assert len(shims) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        yield Killed(Sessions(root), shims)
    finally:
        end(process)
        for pid in marked(str(tmp_path)):  # the test has failed if there is one; it shall not stay
            os.kill(pid, signal.SIGKILL)


def job(mark: Path) -> Json:
    return a_local_job(SCRIPT, checkpoint=True, env=[{"name": MARKER, "value": str(mark)}])


def _logs(root: Path) -> list[Path]:
    return [path for path in root.glob("jobs/default/tiny/pods/*/trainer.log") if path.read_text() == "up\n"]


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


async def test_nothing_outlives_a_killed_run_and_the_job_resumes_at_no_cost(killed: Killed, tmp_path: Path) -> None:
    eventually("every process is gone", lambda: not marked(str(tmp_path)), timeout=60)
    eventually("the shims are gone", lambda: not any(is_running(pid) for pid in killed.shims), timeout=60)

    (killed.sessions.root / "volumes/default/tiny-checkpoints/go").touch()
    recorded = StateFolder(killed.sessions.root).job("default", "tiny").job()
    run = await killed.sessions.finish(job(tmp_path))
    assert recorded is not None
    assert run.task.result()["metadata"]["uid"] == recorded["metadata"]["uid"]
    assert (run.status["state"], run.status["attempt"], run.status["restarts"]) == ("Succeeded", 2, 0)
    assert "Resumed: attempt 2 begins" in run.said
    assert run.folder.runner() is None


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie that its new parent has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
