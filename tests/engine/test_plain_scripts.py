"""Failures of scripts under torchrun, which write no report: the log names the rank and the exception."""

from dataclasses import replace
from typing import Any

import pytest

from ddpjob.engine.state import MAX_LOGS
from tests.builders import SETTINGS, World, a_job, a_running_world, ended

# The end of torchrun's output for a plain script, shortened (torch 2.13); ``tests/api/test_log_failure`` has real ones.
FRAME = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/work/train.py", line 25, in <module>
[rank{rank}]:     train()
[rank{rank}]: {error}
"""
BLOCK = """\
E1123 07:28:30.657000 17051 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code})
Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/distributed/run.py", line 1019, in run
    elastic_launch(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 3 (local_rank: 1)
  exitcode  : -15 (pid: 17057)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 17057
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_07:28:30
  host      : localhost
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 17055)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
VALUE_ERROR = "ValueError: sample 17 has 3 channels, expected 1"
PEER_LOST = (
    "RuntimeError: [/g/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9125"
)


def log(rank: int, error: str = "", code: int = 1) -> str:
    return (FRAME.format(rank=rank, error=error) if error else "step 5\n") + BLOCK.format(rank=rank, code=code)


def failure(*logs: str, **spec: Any) -> dict[str, Any]:
    """Return the failure in the status after all nodes ended with 1 in the same second, with these logs."""
    world = a_running_world(a_job(numNodes=len(logs), nprocPerNode=2, **spec))
    for node_rank, text in enumerate(logs):
        world.set_pod(node_rank, ended(1, message=text))
    world.settle()
    return dict(world.status["failures"][0])


def test_exception_is_the_message_and_not_torchruns_frame() -> None:
    found = failure(log(1, PEER_LOST), log(2, VALUE_ERROR))
    assert (found["reason"], found["exception"], found["nodeRank"], found["rank"]) == ("ValueError", "ValueError", 1, 2)
    where = "node_rank 1 (mnist-0a1b2-1-1), rank 2, /work/train.py:25"
    assert (found["message"], found["where"]) == (f"{where}: {VALUE_ERROR}", "/work/train.py:25")
    assert found["next"] == "kubectl logs mnist-0a1b2-1-1 -n default"


def test_lost_peers_do_not_hide_the_node_with_the_error_in_any_order() -> None:
    for victim in range(3):
        logs = [log(2 * node, VALUE_ERROR if node == victim else PEER_LOST) for node in range(3)]
        found = failure(*logs)
        assert (found["nodeRank"], found["exception"]) == (victim, "ValueError")


def test_lost_peer_alone_is_no_error_of_the_program() -> None:
    found = failure(log(1, PEER_LOST), log(2, PEER_LOST))
    assert (found["reason"], found["provisional"]) == ("PeerLost", True)


@pytest.mark.parametrize(("code", "reason", "signal"), [(-9, "SIGKILL", 9), (-11, "SIGSEGV", 11)])
def test_rank_that_a_signal_ended_is_named(code: int, reason: str, signal: int) -> None:
    found = failure(log(1, PEER_LOST), log(2, code=code))
    assert (found["reason"], found["signal"], found["nodeRank"], found["rank"]) == (reason, signal, 1, 2)
    assert found["message"].startswith(f"node_rank 1 (mnist-0a1b2-1-1), rank 2 was ended by {reason}")
    assert found["nodeSuspected"] and found["exitCode"] == 1


def test_block_alone_names_rank_and_exit_code_and_points_to_the_log() -> None:
    """The kubelet's part of the log often begins after the exception."""
    found = failure(BLOCK.format(rank=1, code=1), BLOCK.format(rank=2, code=3))
    assert found["message"] == "node_rank 1 (mnist-0a1b2-1-1), rank 2 ended with exit code 3"
    assert found["next"] == "kubectl logs mnist-0a1b2-1-1 -n default"
    assert (found["reason"], found["rank"], found["exitCode"]) == ("Error", 2, 1)


def test_exit_without_an_exception_quotes_the_last_line_of_the_program() -> None:
    found = failure(log(1, PEER_LOST), f"loading\nno data left\n{BLOCK.format(rank=2, code=1)}")
    assert found["nodeRank"] == 1
    assert found["message"].endswith("rank 2 ended with exit code 1: no data left")


def test_text_of_the_exception_stays_out_of_the_status_if_logs_do() -> None:
    found = failure(log(1, PEER_LOST), log(2, VALUE_ERROR), logTail="Omit")
    assert found["message"].endswith("rank 2, /work/train.py:25: ValueError")
    assert "logTail" not in found


@pytest.mark.parametrize(("code", "place"), [(-9, ", rank 2"), (1, "")])
def test_rank_that_exceeded_the_memory_limit_is_named_if_it_was_killed(code: int, place: str) -> None:
    """Of a pod that is OOMKilled, the kernel may have killed a process of a DataLoader."""
    world = a_running_world(a_job(nprocPerNode=2))
    world.set_pod(0, ended(1, message=log(1, PEER_LOST)))
    world.show(1, ended(1, message=log(2, code=code), reason="OOMKilled"))
    (found,) = world.status["failures"]
    assert (found["reason"], found["nodeRank"], found["rank"]) == ("OOMKilled", 1, 2)
    assert found["message"].startswith(f"node_rank 1 (mnist-0a1b2-1-1){place} was killed because it exceeded")


def a_failed_world(*, ended_nodes: int, nodes: int | None = None, reads_logs: bool = True) -> World:
    """Return a world whose first nodes ended with 1 in one second; the kubelet's part has only torchrun's block."""
    world = a_running_world(a_job(numNodes=nodes or ended_nodes, nprocPerNode=2))
    world.settings = replace(SETTINGS, reads_logs=reads_logs)
    for node_rank in range(ended_nodes):
        world.set_pod(node_rank, ended(1, message=BLOCK.format(rank=2 * node_rank, code=1)))
    world.settle()
    return world


def asked(world: World) -> list[str]:
    return [name for name, _ in world.plans[-1].logs]


def answer(world: World, node_rank: int, text: str) -> None:
    world.logs[world.pod(node_rank)["metadata"]["uid"]] = text
    world.settle()


def test_logs_are_read_after_the_ending_is_recorded_and_show_the_cause_at_once() -> None:
    world = a_failed_world(ended_nodes=2)
    assert [bool(made.logs) for made in world.plans[-2:]] == [False, True], "recorded before"
    assert world.status["state"] == "Ending" and "failures" not in world.status
    assert asked(world) == ["mnist-0a1b2-1-0", "mnist-0a1b2-1-1"]
    answer(world, 0, log(1, PEER_LOST))
    assert "failures" not in world.status and asked(world) == ["mnist-0a1b2-1-1"]
    answer(world, 1, log(2, VALUE_ERROR))
    found = world.status["failures"][0]
    assert (found["nodeRank"], found["rank"], found["exception"]) == (1, 2, "ValueError")
    assert asked(world) == []


def test_logs_that_cannot_be_read_delay_the_verdict_until_each_was_tried() -> None:
    world = a_failed_world(ended_nodes=2)
    answer(world, 0, "")
    world.later(4)
    assert "failures" not in world.status and asked(world) == ["mnist-0a1b2-1-1"]
    answer(world, 1, "")
    found = world.status["failures"][0]
    assert found["message"].startswith("node_rank 0 (mnist-0a1b2-1-0), rank 0 ended with exit code 1")
    assert world.status["attempt"] == 2


def test_without_the_right_no_log_is_asked_for() -> None:
    world = a_failed_world(ended_nodes=2, reads_logs=False)
    assert not any(made.logs for made in world.plans) and world.status["attempt"] == 2


def test_few_logs_of_a_large_job_are_read() -> None:
    world = a_failed_world(ended_nodes=40)
    assert len(asked(world)) == MAX_LOGS
    for node_rank in range(MAX_LOGS):
        answer(world, node_rank, log(2 * node_rank, PEER_LOST))
    assert asked(world) == []


def test_logs_that_show_only_lost_peers_extend_the_wait_for_the_nodes_that_run() -> None:
    world = a_failed_world(ended_nodes=1, nodes=2)
    answer(world, 0, log(1, PEER_LOST))
    world.later(6)
    assert "failures" not in world.status
    world.show(1, ended(1, message=log(2, VALUE_ERROR)))
    assert world.status["failures"][0]["exception"] == "ValueError"


def test_wait_for_the_cause_ends_although_only_lost_peers_are_known() -> None:
    world = a_failed_world(ended_nodes=1, nodes=2)
    answer(world, 0, log(1, PEER_LOST))
    world.later(11)
    assert world.status["failures"][0]["reason"] == "PeerLost"


@pytest.mark.parametrize("seconds", [0, 30])
def test_logs_are_asked_for_again_after_the_operator_was_killed(seconds: int) -> None:
    world = a_failed_world(ended_nodes=2)
    answer(world, 0, log(1, PEER_LOST))
    world.logs.clear()
    world.reconcile(crash_after=0)
    world.later(seconds)
    assert len(asked(world)) == 2
    answer(world, 0, log(1, PEER_LOST))
    answer(world, 1, log(2, VALUE_ERROR))
    assert world.status["failures"][0]["exception"] == "ValueError"
