"""The progress bar at a terminal: drawn by rank 0 only, and erased before a line is printed."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.runs import PATIENCE

BAR = re.compile(r"\r\x1b\[K([█░]{24}) (\d+)/18 · epoch (\d)/2 · loss \d\.\d{4} · [\d,]+ samples/s")
ERASED = "\r\x1b[K"


def at_a_terminal(tmp_path: Path, *argv: object) -> tuple[list[str], str]:
    """Return (lines of stdout, all output on the terminal) of a command with a terminal as stderr."""
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "ddptrain", *map(str, argv)]
    with (tmp_path / "stdout").open("wb") as stdout:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=terminal, env={"TMPDIR": str(tmp_path)}
        )
    os.close(terminal)
    shown, end = b"", time.monotonic() + PATIENCE
    try:
        while select.select([master], [], [], max(0.0, end - time.monotonic()))[0]:
            shown += os.read(master, 65536)
    except OSError:  # the last process that had the terminal open has exited
        pass
    finally:
        process.kill() if time.monotonic() >= end else None
        os.close(master)
    assert process.wait(PATIENCE) == 0, shown.decode()
    return (tmp_path / "stdout").read_text().splitlines(), shown.decode()


@pytest.mark.parametrize("verb", [("train",), ("launch", "--nproc-per-node", 2)])
def test_one_bar_is_drawn_to_the_end_and_erased(idx: Path, tmp_path: Path, verb: tuple[object, ...]) -> None:
    argv = (*verb, "--data", "idx", "--data-dir", idx, "--batch-size", 37, "--epochs", 2)
    lines, shown = at_a_terminal(tmp_path, *argv)
    frames = BAR.findall(shown)
    steps = [int(step) for _, step, _ in frames]
    assert steps == sorted(set(steps)), "each step is drawn at most once, so by one rank"
    assert frames[-1] == ("█" * 24, "18", "2")
    assert shown.endswith(ERASED)
    assert not any("█" in line or "step 1/18" in line for line in lines)
    assert [line for line in lines if "epoch 2/2: test accuracy" in line]


@pytest.mark.parametrize("verb", [("train",), ("launch", "--nproc-per-node", 2)])
def test_json_logs_have_no_bar(idx: Path, tmp_path: Path, verb: tuple[object, ...]) -> None:
    argv = (*verb, "--log-format", "json", "--data", "idx", "--data-dir", idx, "--batch-size", 37, "--epochs", 2)
    lines, shown = at_a_terminal(tmp_path, *argv)
    assert not shown
    assert any('"message": "step 18/18' in line for line in lines), lines
