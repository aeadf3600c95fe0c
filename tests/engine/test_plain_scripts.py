"""Failures of scripts under torchrun, which write no report: the log names the rank and the exception."""

from typing import Any

import pytest

from tests.builders import a_job, a_running_world, ended

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
    where = "node_rank 1 (mnist-0a1b2-1-1), rank 2, where /work/train.py:25"
    assert found["message"] == f"{where}: {VALUE_ERROR}"
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
    assert found["message"].endswith("rank 2, where /work/train.py:25: ValueError")
    assert "logTail" not in found


def test_gpu_out_of_memory_of_a_rank_is_named() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    found = failure(log(1, PEER_LOST), log(2, error))
    assert (found["reason"], found["nodeRank"], found["rank"]) == ("GPUOutOfMemory", 1, 2)


def test_rule_for_the_exceptions_name_applies() -> None:
    rules = {"rules": [{"onReasons": ["ValueError"], "action": "Fail"}]}
    found = failure(log(1, PEER_LOST), log(2, VALUE_ERROR), restartPolicy=rules)
    assert found["action"] == "Fail"
