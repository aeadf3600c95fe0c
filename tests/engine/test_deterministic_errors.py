"""Which repeated failures follow from the program, so that the job ends although restarts are left."""

from typing import Any

import pytest

from tests.builders import World, a_job, a_started_world, ended, failed, running

Json = dict[str, Any]
BUG = {"exception": "ValueError", "kind": "ValueError", "where": "train.py:92", "message": "bad label"}
AT_7 = BUG | {"step": 7, "exact": True}
ECC = "CUDA error: uncorrectable ECC error encountered"


def run(world: World, node: str) -> None:
    """Let all pods run; the pod of node 1 is on this Kubernetes node."""
    world.set_pod(0, running(), node="other")
    world.show(1, running(), node=node)


def fail(world: World, node: str, report: Json) -> None:
    run(world, node)
    world.set_pod(1, failed(1, at=world.now, **report), node=node)
    world.settle_after_backoff()


def fail_on(*failures: tuple[str, Json], trained: bool = True, local: bool = False) -> World:
    """Return a job whose attempts fail in this way, after a checkpoint in the first if it has trained."""
    world = World(a_job())
    if local:
        world.settings = type(world.settings)(is_local=True)
    world.settle()
    if trained:
        run(world, failures[0][0])
        report = {"step": 5, "checkpoint": {"path": "5.pt", "step": 5}}
        world.report(report)
    for node, report in failures:
        if world.status["state"] != "Failed":
            fail(world, node, report)
    return world


def verdicts(world: World) -> list[tuple[str, bool]]:
    """Return reason and suspicion of each failure."""
    return [(failure["reason"], bool(failure.get("nodeSuspected"))) for failure in world.status["failures"]]


def test_same_error_at_the_same_place_twice_before_the_first_step_is_final() -> None:
    world = fail_on(("a", BUG), ("a", BUG | {"message": "bad label 9"}), trained=False)
    assert world.condition("Failed")["reason"] == "DeterministicError"
    assert "the attempt before failed in the same way" in world.condition("Failed")["message"]


def test_same_exact_step_on_two_kubernetes_nodes_is_final() -> None:
    world = fail_on(("a", AT_7), ("b", AT_7))
    assert world.condition("Failed")["reason"] == "DeterministicError" and world.status["attempt"] == 2


def test_same_exact_step_on_one_kubernetes_node_suspects_the_node() -> None:
    world = fail_on(("a", AT_7), ("a", AT_7), ("a", AT_7))
    assert verdicts(world) == [("ValueError", False), ("ValueError", True), ("ValueError", True)]
    assert [node["nodeName"] for node in world.status["avoidNodes"]] == ["a"]
    fail(world, "b", AT_7)
    assert world.condition("Failed")["reason"] == "DeterministicError"


def test_machine_without_kubernetes_nodes_needs_no_second_node() -> None:
    assert fail_on(("a", AT_7), ("a", AT_7), local=True).condition("Failed")["reason"] == "DeterministicError"


@pytest.mark.parametrize(
    "second",
    [
        AT_7 | {"exact": False},
        AT_7 | {"step": 8},
        AT_7 | {"where": "train.py:93"},
        AT_7 | {"exception": "KeyError"},
        {key: value for key, value in AT_7.items() if key != "where"},
    ],
    ids=["coarse step", "other step", "other place", "other exception", "no place"],
)
def test_other_repeated_failures_of_a_job_that_has_trained_are_not_final(second: Json) -> None:
    assert fail_on(("a", AT_7), ("b", second)).status["attempt"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"exception": "OSError"},
        {"exception": "ClientError", "message": "An error occurred (SlowDown) when calling the GetObject operation"},
        {"exception": "DistBackendError"},
        {"exception": "RuntimeError", "message": "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"},
        {"exception": "RuntimeError", "message": "NCCL error in: socket.cpp: remote process exited"},
        {"exception": "RuntimeError", "message": "[enforce fail at inline_container.cc] . invalid zip archive"},
        {"exception": "RuntimeError", "message": "PytorchStreamReader failed reading zip archive: not a ZIP archive"},
        {"exception": "RuntimeError", "message": "DataLoader worker (pid 71) is killed by signal: Bus error."},
        {"exception": "RuntimeError", "message": "Caught HTTPError in DataLoader worker process 0."},
        {"exception": "RuntimeError", "message": "ClientError: An error occurred (SlowDown)"},
        {"exception": "RuntimeError", "message": "no shard; caused by ClientError: SlowDown (data.py:3)"},
        {"exception": "RuntimeError", "message": "[Errno 116] Stale file handle"},
        {"exception": "RuntimeError", "message": "PytorchStreamReader failed locating file data.pkl: file not found"},
        {"exception": "RuntimeError", "message": "unable to mmap 104 bytes from file: Cannot allocate memory (12)"},
        {"exception": "RuntimeError", "message": "Too many open files. Communication with the workers is not possible"},
        {"exception": "RuntimeError", "message": "cannot open /data/7.bin: Transport endpoint is not connected"},
        {"exception": "RuntimeError", "message": "Found no NVIDIA driver on your system"},
        {"exception": "ValueError", "message": "I/O operation on closed file"},
        {"exception": "AssertionError", "message": "request timed out"},
    ],
    ids=lambda change: f"{change['exception']} {change.get('message', '')}"[:50],
)
@pytest.mark.parametrize("trained", [False, True])
def test_error_that_names_machine_network_volume_or_a_service_is_never_final(change: Json, trained: bool) -> None:
    report = AT_7 | change
    assert fail_on(("a", report), ("b", report), trained=trained).status["attempt"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"exception": "KeyError", "message": "'label'"},
        {"exception": "RuntimeError", "message": "mat1 and mat2 shapes cannot be multiplied (64x10 and 12x3)"},
        {"exception": "RuntimeError", "message": "Caught KeyError in DataLoader worker process 0."},
        {"exception": "RuntimeError", "message": "no label; caused by KeyError: 'label' (data.py:3)"},
        {"exception": "ModuleNotFoundError", "message": "No module named 'einops'"},
    ],
    ids=lambda change: f"{change['exception']} {change['message']}"[:50],
)
def test_error_of_the_program_is_final(change: Json) -> None:
    report = AT_7 | change
    assert fail_on(("a", report), ("b", report)).condition("Failed")["reason"] == "DeterministicError"


@pytest.mark.parametrize(
    ("seconds", "error", "reason"),
    [
        (1800, "KeyError: 1", "DeterministicError"),
        (3600, "KeyError: 1", "NotFailed"),
        (1, f"RuntimeError: {ECC}", "NotFailed"),
    ],
)
def test_error_that_only_the_log_shows_is_final_before_an_hour_of_training(
    seconds: float, error: str, reason: str
) -> None:
    """Under torchrun, the last exception in the log and its place stand for the report, and no step is known."""
    trace = f'Traceback (most recent call last):\n  File "/app/train.py", line 92, in <module>\n{error}\n'
    world = a_started_world(a_job(numNodes=1))
    for _ in range(2):
        world.run_all_and_settle()
        world.forward(seconds)
        world.set_pod(0, ended(1, message=trace, at=world.now))
        world.settle_after_backoff()
    assert world.condition("Failed")["reason"] == reason
    assert (("DeviceFailed", True) in verdicts(world)) == (ECC in error)


@pytest.mark.parametrize(
    "report",
    [
        {"exception": "DeviceError", "kind": "DeviceFailed", "message": ECC},
        {"exception": "RuntimeError", "kind": "RuntimeError", "message": ECC},
        {"exception": "AcceleratorError", "kind": "AcceleratorError", "message": ECC},
        {"exception": "RuntimeError", "kind": "RuntimeError", "message": "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"},
    ],
    ids=lambda report: f"{report['kind']} {report['message']}"[:40],
)
def test_failed_device_suspects_its_node_and_never_the_program(report: Json) -> None:
    report = report | {"where": "train.py:92", "step": 7, "exact": True}
    world = fail_on(("bad", report), ("bad", report))
    assert verdicts(world) == [("DeviceFailed", True)] * 2
    assert [node["nodeName"] for node in world.status["avoidNodes"]] == ["bad"]
