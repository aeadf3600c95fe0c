"""Output errors end no training: an exited reader, a full disk, closed streams, a limited encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import PATIENCE

DDPTRAIN = (sys.executable, "-m", "ddptrain")
LAUNCH = ("launch", "--nproc-per-node", "2")


def without_reader(command: list[str], **options: Any) -> int:
    """Return the exit code of ``command`` when the reader of its stdout has already exited."""
    read, write = os.pipe()
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.DEVNULL, **options)
    os.close(write)
    os.close(read)
    return process.wait(PATIENCE)


def onto_a_full_disk(command: list[str], **options: Any) -> int:
    """Return the exit code of ``command`` when its output goes to a full disk."""
    with Path("/dev/full").open("wb") as full:
        return subprocess.run(
            command, stdout=full, stderr=full, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL, **options
        ).returncode


def with_all_streams_closed(command: list[str], **options: Any) -> int:
    """Return the exit code of ``command`` when its first three descriptors are closed."""
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    return subprocess.run(shell, timeout=PATIENCE, check=False, **options).returncode


@pytest.mark.parametrize(
    ("verb", "start"),
    [(("train",), onto_a_full_disk), (LAUNCH, without_reader), ((*LAUNCH, "--how", "spawn"), with_all_streams_closed)],
)
def test_training_without_working_output_finishes_and_saves(
    idx: Path, tmp_path: Path, verb: tuple[str, ...], start: Any
) -> None:
    settings = ("--data", "idx", "--data-dir", str(idx), "--epochs", "2", "--checkpoint-dir", str(tmp_path))
    assert start([*DDPTRAIN, *verb, *settings], env={"OMP_NUM_THREADS": "1"}) == 0
    assert json.loads((tmp_path / "progress.json").read_bytes())["phase"] == "done"


def test_characters_that_the_encoding_lacks_are_escaped(idx: Path, tmp_path: Path) -> None:
    limited = {"PYTHONIOENCODING": "ascii", "TMPDIR": str(tmp_path)}

    def said(*argv: str) -> bytes:
        command = [*DDPTRAIN, *argv]
        return subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, check=True, env=limited).stdout

    assert rb"NNODES \xd7 NPROC_PER_NODE" in said("train", "--help")
    assert rb"step 1/1 \xb7 epoch 1/1" in said(*LAUNCH, "--data", "idx", "--data-dir", str(idx), "--epochs", "1")


def test_a_verb_that_only_prints_fails_on_a_full_disk() -> None:
    assert onto_a_full_disk([*DDPTRAIN, "config", "print"]) != 0


@pytest.mark.parametrize(
    ("argv", "code", "rank", "said"),
    [
        (("train", "--chaos", "crash:0:2"), 1, 0, "RuntimeError: crash injected by --chaos"),
        (("train", "--chaos", "hang:0:2", "--hang-timeout", "5"), 76, 0, "error: no heartbeat for 5 s"),
        ((*LAUNCH, "--chaos", "crash:1:2"), 1, 1, "RuntimeError: crash injected by --chaos"),
        ((*LAUNCH, "--nnodes", "2"), 2, None, "error: 2 nodes, but no MASTER_ADDR"),
    ],
)
def test_every_line_of_a_json_log_is_an_object(
    idx: Path, tmp_path: Path, *, argv: tuple[str, ...], code: int, rank: int | None, said: str
) -> None:
    command = [*DDPTRAIN, *argv, "--log-format", "json", "--data", "idx", "--data-dir", str(idx), "--epochs", "1",
               "--batch-size", "37"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, timeout=PATIENCE, check=False, env={"TMPDIR": str(tmp_path), "MASTER_ADDR": ""}
    )
    assert done.returncode == code, done.stderr.decode()
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert all(set(line) == {"time", "rank", "message"} for line in lines)
    assert not any(line["message"].startswith("{") for line in lines), "encoded twice"
    assert [line["rank"] for line in lines if line["message"].startswith(said)] == [rank]
