"""Whole jobs on this machine: the engine's plans, processes as pods, and a state folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ddprun
from ddpjob.engine.injection import PROGRAM
from ddpjob.local import LocalError
from ddpjob.local.state import StateFolder
from tests.engine.test_plain_scripts import PEER_LOST, VALUE_ERROR, log
from tests.local.bench import MARKER, marked
from tests.local.builders import a_local_job
from tests.local.sessions import Place

pytestmark = pytest.mark.timeout(300)
UNTIL_GO = "echo up; until [ -e /checkpoints/go ]; do sleep 0.01; done"


async def test_finished_job_leaves_record_logs_and_volume(place: Place) -> None:
    script = 'echo "$NODE_RANK of $NNODES for $DDPJOB_NAME"; echo saved > /checkpoints/$NODE_RANK'
    run = await place.finish(a_local_job(script, checkpoint=True))

    assert run.status["state"] == "Succeeded"
    assert [run.log(1, rank) for rank in (0, 1)] == ["0 of 2 for tiny\n", "1 of 2 for tiny\n"]
    assert [path.read_text() for path in sorted((place.root / "volumes/default/tiny-checkpoints").iterdir())] == [
        "saved\n",
        "saved\n",
    ]
    recorded = StateFolder(place.root).job("default", "tiny")
    assert recorded.job() == run.task.result()
    assert [pod["status"]["phase"] for pod in recorded.pods()] == ["Succeeded", "Succeeded"]
    assert recorded.runner() is None
    assert [folder.name for folder in StateFolder(place.root).jobs()] == ["tiny"]


@pytest.mark.parametrize("ports", [{}, {"port": 29510, "progressPort": 29511}], ids=["default", "own"])
async def test_pods_share_one_rendezvous_port_and_have_own_progress_ports(place: Place, ports: dict[str, int]) -> None:
    script = "echo $MASTER_ADDR:$MASTER_PORT $PET_MASTER_ADDR:$PET_MASTER_PORT"
    script += "; echo $DDPJOB_PROGRESS_PORT; echo $DDPJOB_LEADER_PORT"
    run = await place.finish(a_local_job(script, rendezvous=ports))
    (meeting, mine, leader), (same, other, same_leader) = (run.log(1, rank).splitlines() for rank in (0, 1))
    address, port = meeting.split()[0].split(":")
    assert address == "127.0.0.1"
    assert meeting == same == f"127.0.0.1:{port} 127.0.0.1:{port}"
    fixed = {str(ports.get("port", 29500)), str(ports.get("progressPort", 29501))}
    assert len({port, mine, other} - fixed) == 3
    assert leader == same_leader == mine


async def test_script_that_calls_the_injected_launcher_finds_that_of_this_machine(place: Place) -> None:
    job = a_local_job(f"python3 {PROGRAM} --version; echo {PROGRAM}.py", numNodes=1, launcher="Injected")
    run = await place.finish(job)
    assert run.log(1) == f"ddprun {ddprun.__version__}\n{PROGRAM}.py\n"


async def test_attempt_is_recorded_before_its_processes_start(place: Place) -> None:
    record = place.root / "jobs/default/tiny/job.json"
    script = f"grep -c '\"attempt\":'$DDPJOB_ATTEMPT, {record}; [ $DDPJOB_ATTEMPT = 2 ]"
    run = await place.finish(a_local_job(script, numNodes=1))
    assert (run.log(1), run.log(2)) == ("1\n", "1\n")


async def test_exception_far_above_the_end_of_the_log_is_named_with_its_node(place: Place, tmp_path: Path) -> None:
    for node_rank, error in enumerate((PEER_LOST, VALUE_ERROR)):
        text = log(2 * node_rank, error).replace("train.py FAILED", "-" * 2048)
        (tmp_path / f"{node_rank}.log").write_text(text)
    run = await place.finish(a_local_job(f"cat {tmp_path}/$NODE_RANK.log; exit 1", restartPolicy={"maxRestarts": 0}))
    (failure,) = run.status["failures"]
    assert (failure["nodeRank"], failure["rank"], failure["exception"]) == (1, 2, "ValueError")
    assert failure["message"].endswith(f"rank 2, /work/train.py:25: {VALUE_ERROR}")


async def test_events_are_in_the_job_folder_and_not_on_the_terminal(
    place: Place, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = await place.finish(a_local_job("true"))
    events = [line.split(" ", 1)[1] for line in (run.folder.path / "events.log").read_text().splitlines()]
    assert events[0] == "Normal Started: attempt 1 starts"
    assert events[-1] == "Normal Succeeded: all 2 node(s) of attempt 1 succeeded"
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("ddpjob")]


async def test_run_survives_the_deletion_of_its_record_and_logs(place: Place) -> None:
    run = place.begin(a_local_job(UNTIL_GO, checkpoint=True))
    await run.until("both nodes are up", lambda: run.log(1, 0) and run.log(1, 1))
    shutil.rmtree(run.folder.path)
    place.let_go()
    finished = await run.result()
    assert finished["status"]["state"] == "Succeeded"
    assert run.folder.job() == finished


async def test_record_that_cannot_be_written_ends_the_run_and_its_processes(place: Place, tmp_path: Path) -> None:
    job = a_local_job(UNTIL_GO, checkpoint=True, env=[{"name": MARKER, "value": str(tmp_path)}])
    run = place.begin(job)
    await run.until("both nodes run", lambda: run.status.get("state") == "Running")
    (run.folder.path / "job.json.tmp").mkdir()  # an error of the operating system, as if the disk were full
    run.session.stop()
    with pytest.raises(LocalError, match=r"job\.json\.tmp: Is a directory") as error:
        await run.result()
    assert "free space" in error.value.next_step
    assert marked(str(tmp_path)) == []
    (run.folder.path / "job.json.tmp").rmdir()
    place.let_go()
    again = await place.finish(job)
    assert (again.status["state"], again.status["attempt"], again.status["restarts"]) == ("Succeeded", 2, 0)


async def test_other_systems_than_linux_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("os.sched_getaffinity")
    with pytest.raises(LocalError, match="Linux only"):
        await place.finish(a_local_job("true"))
