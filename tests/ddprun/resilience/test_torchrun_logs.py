"""What the operator reads from the logs of real torchrun (``ddpjob.api.log_failure``), whose agents are forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpjob.api.log_failure import LogFailure, log_failure
from tests.ddptrain.runs import ForkServer
from tests.processes import free_port
from tests.torchrun import FAULT_LINE, SCRIPT, VALUE_ERROR

pytestmark = pytest.mark.together

MESSAGE = "sample 17 has 3 channels, expected 1"


def node_logs(
    server: ForkServer, folder: Path, fault: str, *, nodes: int = 1, nproc: int = 2, victims: str, record: bool = False
) -> tuple[Path, list[str]]:
    """Run the script until it fails, and return it and the log of each node."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": nproc, "PET_MASTER_ADDR": "127.0.0.1"}
    env |= {"PET_MASTER_PORT": free_port(), "PET_MAX_RESTARTS": 0, "FAULT": fault, "VICTIMS": victims}
    env |= {"RECORD": 1} if record else {}
    started = [
        server.start(script, module="torch.distributed.run", env=env | {"PET_NODE_RANK": node}) for node in range(nodes)
    ]
    for run in started:
        assert run.wait() == 1, run.output()
    return script, [run.log.read_text(errors="replace") for run in started]


def kubelets(log: str) -> str:
    """Return the part of a log that a kubelet puts into the termination message."""
    return "\n".join(log.encode()[-2048:].decode(errors="replace").split("\n")[-80:])


def read(text: str) -> LogFailure:
    found = log_failure(text)
    assert found is not None
    return found


def test_torchruns_log_names_the_exception_its_rank_and_line(ddptrain: ForkServer, tmp_path: Path) -> None:
    script, (first, second) = node_logs(ddptrain, tmp_path, VALUE_ERROR, nodes=2, nproc=1, victims="1")
    found = read(second)
    assert (found.cause, found.rank, found.where) == ("own", 1, f"{script}:{FAULT_LINE}")
    # Sometimes the rank aborts later, when the interpreter ends while threads of gloo run.
    assert (found.exception, found.message, found.signal) == ("ValueError", MESSAGE, None)
    lost = read(first)
    assert (lost.cause, lost.rank, lost.exception) == ("peer", 0, "RuntimeError")
    # The kubelet's part begins after the tracebacks.
    part = read(kubelets(second))
    assert (part.cause, part.rank, part.exception) == ("unknown", 1, None) and (part.exit_code, part.signal) != (
        None,
        None,
    )
    assert "====" not in part.last_line and "To enable traceback" not in part.last_line


def test_recorded_exception_is_within_the_kubelets_part_of_the_log(ddptrain: ForkServer, tmp_path: Path) -> None:
    script, (first, second) = node_logs(ddptrain, tmp_path, VALUE_ERROR, nodes=2, nproc=1, victims="1", record=True)
    for text in (second, kubelets(second)):
        found = read(text)
        assert (found.cause, found.rank, found.where) == ("own", 1, f"{script}:{FAULT_LINE}")
        assert (found.exception, found.message, found.signal) == ("ValueError", MESSAGE, None)
    assert read(first).cause == read(kubelets(first)).cause == "peer"
