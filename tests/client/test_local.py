"""The client of this machine: killed runs, logs of attempts that overlap, and jobs that local mode refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddpjob import DDPJob
from ddpjob.client.local import LocalClient
from ddpjob.errors import DDPJobError, JobExistsError, StoppedError, UnavailableError
from ddpjob.local import LocalError
from tests.processes import eventually

META = {"name": "tiny", "namespace": "default", "uid": "u"}
# Node 1 fails when node 0 is ready. Node 0 of the first attempt ends only after a line of the second was seen.
OVERLAP = """
cd "$PLACE"
echo "begin $DDPJOB_ATTEMPT"
if [ $DDPJOB_ATTEMPT = 1 ] && [ $NODE_RANK = 0 ]; then
  trap 'until [ -e seen ]; do sleep 0.02; done; printf late; touch late; exit 0' TERM
  touch ready
  while :; do sleep 0.02; done
elif [ $DDPJOB_ATTEMPT = 1 ]; then
  until [ -e ready ]; do sleep 0.02; done
  exit 3
fi
until [ -e late ]; do sleep 0.02; done
"""


@pytest.fixture
def client(tmp_path: Path) -> LocalClient:
    return LocalClient(tmp_path / "state")


def test_a_killed_run_is_interrupted_and_resumes_in_its_directory(
    client: LocalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work", "elsewhere"):
        (tmp_path / name).mkdir()
    script = f"pwd; until [ -e {tmp_path}/go ]; do sleep 0.02; done"
    monkeypatch.chdir(tmp_path / "work")
    client.submit(DDPJob("tiny", image="none", command=["sh", "-c", script]))
    client.wait("tiny", until=lambda status: status.state == "Running", timeout=60)
    monkeypatch.chdir(tmp_path / "elsewhere")
    os.kill(client.record("tiny").runner() or 0, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="no process of this machine runs tiny"):
        client.wait("tiny", timeout=60)
    assert client.get("tiny").state == "Interrupted"
    client.resume("tiny")
    (tmp_path / "go").touch()
    assert client.wait("tiny", timeout=60).status.attempt == 2
    first, second = (list(client.logs("tiny", attempt=attempt)) for attempt in (1, 2))
    assert [line.text for line in first + second] == [str(tmp_path / "work")] * 2


def test_of_submissions_at_once_one_creates_the_job(client: LocalClient, tmp_path: Path) -> None:
    errors: list[DDPJobError] = []

    def submit() -> None:
        try:
            client.submit(DDPJob("tiny", image="none", command=["true"]))
        except DDPJobError as error:
            errors.append(error)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [isinstance(error, JobExistsError) for error in errors] == [True] * 3, errors
    assert client.wait("tiny", timeout=60).succeeded


def test_a_finished_job_is_not_replaced_by_a_submission_that_did_not_see_it(client: LocalClient) -> None:
    made = client.submit(DDPJob("tiny", image="none", command=["true"]))
    client.wait(made, timeout=60)
    record = client.record(made)
    with pytest.raises(JobExistsError, match="there is a job tiny already"):
        client._start(record, made.manifest["spec"], {"name": "tiny", "namespace": "default"}, made, is_new=True)
    assert client.get("tiny").uid == made.uid


def test_modules_of_the_current_directory_are_not_imported(
    client: LocalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("yaml", "subprocess", "asyncio"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    client.submit(DDPJob("tiny", image="none", command=["true"]))
    assert client.wait("tiny", timeout=60).succeeded


def test_why_quotes_the_error_that_ended_a_run_in_the_background(client: LocalClient, tmp_path: Path) -> None:
    script = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done"
    client.submit(DDPJob("tiny", image="none", command=["sh", "-c", script]))
    record = client.record("tiny")
    assert (record.path / "ended.json").stat().st_blocks > 0, "room for it on a disk that is full by then"
    (record.path / "job.json.tmp").mkdir()  # an error of the operating system, as if the disk were full
    (tmp_path / "go").touch()
    eventually("its process has ended", lambda: record.runner() is None)
    found = client.explain("tiny")
    assert (found.state, "job.json.tmp: Is a directory" in found.sentence) == ("Interrupted", True)
    assert "free space" in found.next
    assert "Is a directory" in (record.path / "background.log").read_text()
    (record.path / "job.json.tmp").rmdir()
    client.resume("tiny")
    assert client.wait("tiny", timeout=60).succeeded


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "default" / "tiny" / "background.log").mkdir(parents=True)
    with pytest.raises(LocalError, match=r"background\.log: Is a directory") as raised:
        LocalClient(tmp_path).submit(DDPJob("tiny", image="none", command=["true"]))
    assert "free space" in raised.value.next_step


def test_state_and_volumes_belong_to_the_user_alone(client: LocalClient) -> None:
    client.submit(DDPJob("tiny", image="none", command=["true"], checkpoint={"claimName": "c"}))
    client.wait("tiny", timeout=60)
    folders = [path for path in (client.folder.root, *client.folder.root.rglob("*")) if path.is_dir()]
    assert client.folder.volume("default", "c") in folders
    outer = [path for path in folders if "pods" not in path.parts]  # they are below the folder of the job
    assert {path.stat().st_mode & 0o077 for path in outer} == {0}


def test_a_second_suspend_waits_for_the_checkpoint_too(client: LocalClient, tmp_path: Path) -> None:
    save = f"touch {tmp_path}/saving; until [ -e {tmp_path}/go ]; do sleep 0.02; done; touch {tmp_path}/saved; exit 0"
    script = f"trap '{save}' TERM; touch {tmp_path}/ready; while :; do sleep 0.02; done"
    client.submit(DDPJob("tiny", image="none", command=["sh", "-c", script]))
    eventually("the trap is set", (tmp_path / "ready").exists)
    first, second = (threading.Thread(target=client.suspend, args=("tiny",), daemon=True) for _ in range(2))
    first.start()
    eventually("the trainer saves", (tmp_path / "saving").exists)
    second.start()
    second.join(0.5)
    assert second.is_alive()
    (tmp_path / "go").touch()
    for thread in (first, second):
        thread.join(60)
    assert client.get("tiny").state == "Suspended"
    assert (tmp_path / "saved").exists()


def test_a_process_of_another_machine_is_not_stopped(client: LocalClient) -> None:
    client.folder.job("default", "tiny").save({"metadata": META, "spec": {}}, [], {})
    record, namesake = client.record("tiny"), subprocess.Popen(["sleep", "60"])
    try:
        with record.locked():
            (record.path / "lock").write_text(f"{namesake.pid} {uuid.uuid4()}/4026531836\n")
            with pytest.raises(LocalError, match=f"process {namesake.pid} of another machine or container"):
                client.delete("tiny")
        assert namesake.poll() is None
    finally:
        namesake.kill()
        namesake.wait()


def test_followed_logs_have_what_an_attempt_prints_while_the_next_runs(client: LocalClient, tmp_path: Path) -> None:
    env = {"PLACE": str(tmp_path)}
    fenced = {"claimName": "c", "fenced": True}  # else the next attempt waits for the end of this one
    client.submit(DDPJob("tiny", image="none", command=["sh", "-c", OVERLAP], env=env, num_nodes=2, checkpoint=fenced))
    lines = []
    for line in client.logs("tiny", all_nodes=True, follow=True):
        lines.append(line)
        if line.attempt == 2:
            (tmp_path / "seen").touch()
    assert client.get("tiny").succeeded
    printed = sorted((line.attempt, line.node, line.text) for line in lines)
    assert printed == [(1, 0, "begin 1"), (1, 0, "late"), (1, 1, "begin 1"), (2, 0, "begin 2"), (2, 1, "begin 2")]
    assert {line.rank - line.node for line in lines if line.rank is not None} == {0}, "one process per node"


def test_a_progress_bar_is_seen_while_it_moves(client: LocalClient, tmp_path: Path) -> None:
    bar = r"printf '\r  0%%|'; until test -e seen; do sleep 0.05; done; printf '\r100%%|#\n'"
    client.submit(DDPJob("tiny", image="none", command=["sh", "-c", bar]), workdir=tmp_path)
    lines = []
    for line in client.logs("tiny", follow=True):
        lines.append((line.text, line.unfinished))
        (tmp_path / "seen").touch()
    assert lines == [("  0%|", True), ("\r  0%|\r100%|#", False)]
    assert [(line.text, line.unfinished) for line in client.logs("tiny")] == lines[1:]


def test_close_ends_what_another_thread_waits_for(client: LocalClient) -> None:
    client.submit(DDPJob("tiny", image="none", command=["sleep", "60"]))
    waits = ThreadPoolExecutor(2)
    try:
        found = [waits.submit(client.wait, "tiny"), waits.submit(list, client.logs("tiny", follow=True))]
        client.close()
        for one in found:
            with pytest.raises(StoppedError):
                one.result(timeout=30)
        assert client.get("tiny").state in ("Pending", "Running"), "a closed client can still be asked"
    finally:
        waits.shutdown(wait=False)
        client.delete("tiny")


def test_a_job_that_local_mode_cannot_run_is_refused_by_submit(client: LocalClient) -> None:
    sidecar = {"spec": {"containers": [{"name": "web", "image": "web:1"}]}}
    with pytest.raises(LocalError, match="runs only the container trainer") as raised:
        client.submit(DDPJob("tiny", image="none", command=["true"], template=sidecar))
    assert raised.value.hint and raised.value.next_step
    eventually("the process that was to run it has ended", lambda: client.list() == [])
