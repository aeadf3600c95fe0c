"""Output errors end no training: an exited reader, a full disk, closed streams, a limited encoding."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from ddprun.reporting.console import Output
from tests.ddptrain.builders import SMALL
from tests.ddptrain.runs import PATIENCE, ForkServer
from tests.metrics import effective_rows

DDPTRAIN = (sys.executable, "-m", "ddptrain")
LAUNCH = ("launch", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("verb", "streams"),
    [
        pytest.param(("train",), ["/dev/full", "/dev/full"], id="a full disk"),
        pytest.param(LAUNCH, ["PIPE", os.devnull], id="a reader that exits"),
        pytest.param(LAUNCH, [None, None], id="closed", marks=pytest.mark.soak),
    ],
)
def test_training_without_working_output_finishes_and_saves(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, verb: tuple[str, ...], streams: list[str | None]
) -> None:
    checkpoints, pipe = tmp_path / "checkpoints", tmp_path / "pipe"
    os.mkfifo(pipe)
    paths = [str(pipe) if path == "PIPE" else path for path in streams]
    settings = ("--data", "idx", "--data-dir", idx, "--epochs", "2", "--checkpoint-dir", checkpoints)
    run = ddptrain.start(*verb, *settings, streams=paths)
    if "PIPE" in streams:
        with pipe.open("rb", buffering=0) as reader:
            assert reader.read(1)
    assert run.wait() == 0
    assert effective_rows(checkpoints, "eval")


LOUD = """
import ddptrain.worker as worker
load = worker.download.load
def loud(*args, **more):
    for number in range(20_000):
        print("line", number, "x" * 100)
    return load(*args, **more)
worker.download.load = loud
"""


def test_a_launcher_whose_output_nobody_reads_obeys_sigterm(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # and never reads
    argv = (*LAUNCH, *SMALL, "--data-dir", idx, "--step-delay", 0.3)
    run = ddptrain.start(*argv, first=LOUD, streams=[str(pipe), os.devnull])
    run.at_step(2)
    run.stop()
    assert run.wait() == 75
    os.close(reader)
    assert run.message()["outcome"] == "stopped"


def test_lines_that_nobody_reads_in_time_are_dropped_and_counted() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    output = Output(writer, 1000)
    for number in range(1000):
        output.write(b"line %d\n" % number)
    received = b""
    while output.drain():
        received += os.read(reader, 65536)
    output.write(b"last\n")
    received += os.read(reader, 65536)
    *lines, missing, last = received.decode().splitlines()
    assert lines == [f"line {number}" for number in range(len(lines))]
    count = re.fullmatch(r"\.\.\. (\d+) line\(s\) of output are missing here.*", missing)
    assert count is not None, missing
    assert len(lines) + int(count[1]) == 1000
    assert last == "last"
    os.close(reader)
    assert output.write(b"no reader\n") == 10
    output.release()
    os.close(writer)


def test_a_terminal_stopped_by_ctrl_s_does_not_delay_the_training(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    master, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    run = ddptrain.start(*LAUNCH, *SMALL, "--data-dir", idx, streams=[os.ttyname(terminal), str(tmp_path / "out")])
    assert run.wait() == 0
    for descriptor in (master, terminal):
        os.close(descriptor)


def test_a_terminal_that_is_closed_does_not_end_the_training(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    argv = (*LAUNCH, *SMALL, "--data-dir", idx, "--step-delay", 0.2)
    run = ddptrain.start(*argv, streams=[os.ttyname(terminal), str(tmp_path / "out")])
    run.at_step(2)
    for descriptor in (terminal, master):
        os.close(descriptor)
    assert run.wait() == 0, (tmp_path / "out").read_text()


@pytest.mark.soak
def test_characters_that_the_encoding_lacks_are_escaped(idx: Path, tmp_path: Path) -> None:
    limited = {"PYTHONIOENCODING": "ascii", "TMPDIR": str(tmp_path)}

    def said(*argv: str) -> bytes:
        command = [*DDPTRAIN, *argv]
        return subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, check=True, env=limited).stdout

    assert rb"NNODES \xd7 NPROC_PER_NODE" in said("train", "--help")
    assert rb"step 1/1 \xb7 epoch 1/1" in said(*LAUNCH, "--data", "idx", "--data-dir", str(idx), "--epochs", "1")
