"""SIGKILL of the session at any moment: no process is left, and the next run resumes the job."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from ddpjob.local.state import JobFolder, StateFolder
from tests.local.bench import MARKER, marked
from tests.local.builders import a_local_job
from tests.local.sessions import Place, apart
from tests.processes import eventually, tail

pytestmark = pytest.mark.timeout(300)

# Processes that escape a process group: new sessions, a daemon, and one that ignores SIGTERM.
SCRIPT = (
    "[ -e /checkpoints/go ] && exit 0; trap '' TERM HUP; setsid sleep 600 & (setsid sh -c 'sleep 600 & sleep 600' &);"
    " echo up; while :; do sleep 0.01; done"
)


def job(mark: Path) -> Json:
    return a_local_job(SCRIPT, checkpoint=True, env=[{"name": MARKER, "value": str(mark)}])


def state(folder: JobFolder) -> str:
    return str((((folder.job() or {}).get("status")) or {}).get("state"))


def both_are_up(folder: JobFolder) -> bool:
    return [path.read_text() for path in folder.path.glob("pods/*/trainer.log")] == ["up\n"] * 2


def await_moment(process: subprocess.Popen[bytes], what: str, has_come: Callable[[], bool], log: Path) -> None:
    eventually(what, lambda: process.poll() is not None or has_come(), timeout=120, interval=0.001)
    assert process.poll() is None, tail(log)


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_process_outlives_a_killed_run(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state").job("default", "tiny")
    with apart(tmp_path / "state", job(tmp_path), tmp_path) as process:
        await_moment(process, "both nodes are up", lambda: both_are_up(folder), tmp_path / "session.log")
        eventually("all their children are there", lambda: len(marked(str(tmp_path))) >= 8)
        shims = children(process.pid)
        assert len(shims) == 2
        process.kill()
        process.wait()
        eventually("every process is gone", lambda: not marked(str(tmp_path)))
        eventually("the shims are gone", lambda: not any(is_running(pid) for pid in shims))
    assert folder.runner() is None


@pytest.mark.parametrize(
    ("moment", "stops"),
    [
        (lambda folder: folder.job() is not None, False),
        (lambda folder: len(folder.pods()) == 2, False),
        (both_are_up, False),
        (lambda folder: state(folder) == "Running", False),
        (lambda folder: state(folder) == "Suspended" and len(folder.pods()) == 2, True),
    ],
    ids=["recorded", "with pods", "up", "running", "suspending"],
)
async def test_run_killed_at_any_moment_resumes_without_spending_a_restart(
    tmp_path: Path, moment: Callable[[JobFolder], bool], stops: bool
) -> None:
    folder = StateFolder(tmp_path / "state").job("default", "tiny")
    with apart(tmp_path / "state", job(tmp_path), tmp_path) as process:
        if stops:
            await_moment(process, "both nodes are up", lambda: both_are_up(folder), tmp_path / "session.log")
            process.send_signal(signal.SIGINT)
        await_moment(process, "the moment has come", lambda: moment(folder), tmp_path / "session.log")
        process.kill()
        process.wait()
        eventually("every process is gone", lambda: not marked(str(tmp_path)))
    before = folder.job()
    assert before is not None

    place = Place(tmp_path / "state")
    place.let_go()
    run = await place.finish(job(tmp_path))

    began = (before.get("status") or {}).get("attempt", 0)
    assert run.task.result()["metadata"]["uid"] == before["metadata"]["uid"]
    assert (run.status["state"], run.status["attempt"], run.status["restarts"]) == ("Succeeded", began + 1, 0)
    assert (f"Resumed: attempt {began + 1} begins" in run.said) == (began > 0)
