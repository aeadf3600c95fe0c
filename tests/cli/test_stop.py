"""A run that is stopped saves, leaves no process, and can be resumed."""

import os
import signal
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from tests.cli.program import Program, shell_job, with_volume

# The first attempt waits for SIGTERM; the second finds the saved file.
SCRIPT = """
cd "$DDPJOB_CHECKPOINT_DIR"
if [ -e saved ]; then echo found it; exit 0; fi
trap 'touch saved; exit 75' TERM
echo waiting
while :; do sleep 0.05; done
"""


def a_job() -> Json:
    return shell_job("stopped", SCRIPT, **with_volume())


def processes_of(folder: Path) -> list[int]:
    """Return the processes that have the folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in environment:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="INT"),
        pytest.param(signal.SIGTERM, 143, id="TERM", marks=pytest.mark.soak),
        pytest.param(signal.SIGHUP, 129, id="HUP", marks=pytest.mark.soak),
    ],
)
def test_signal_saves_and_the_same_command_resumes(ddpjob: Program, number: signal.Signals, code: int) -> None:
    file = ddpjob.write(a_job())
    with ddpjob.started("run", file, "--fresh") as process:
        ddpjob.until_log("stopped", "waiting")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"stopped by {number.name}" in out
    assert f"resume      ddpjob run {file}\n" in out, "without --fresh"
    assert "Suspended" in ddpjob("get").out
    assert processes_of(ddpjob.folder) == []

    done = ddpjob("run", file)
    assert done.code == 0
    assert "n0 | found it" in done.out
    assert ddpjob.job("stopped")["status"]["attempt"] == 2


def test_second_ctrl_c_kills_a_job_that_ignores_sigterm(ddpjob: Program) -> None:
    job = shell_job("deaf", 'trap "echo no" TERM; echo waiting; while :; do sleep 0.05; done')
    with ddpjob.started("run", ddpjob.write(job)) as process:
        ddpjob.until_log("deaf", "waiting")
        process.send_signal(signal.SIGINT)
        ddpjob.until_log("deaf", "no")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert processes_of(ddpjob.folder) == []


def test_delete_stops_a_live_run_and_keeps_the_volume(ddpjob: Program) -> None:
    with ddpjob.started("run", ddpjob.write(a_job())) as process:
        ddpjob.until_log("stopped", "waiting")
        done = ddpjob("delete", "stopped")
        assert done.code == 0, done
        assert process.wait(60) == 143
    assert processes_of(ddpjob.folder) == []
    assert not (ddpjob.state / "jobs" / "default" / "stopped").exists()
    assert (ddpjob.state / "volumes" / "default" / "stopped-checkpoints" / "saved").exists()
