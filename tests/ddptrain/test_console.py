"""The progress bar at a terminal: drawn by rank 0 only, and erased before a line is printed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
from pathlib import Path

import pytest

from tests.ddptrain.runs import ForkServer, wait_until

BAR = re.compile(r"\r\x1b\[K([█░]{24}) (\d+)/18 · epoch (\d)/2 · loss \d\.\d{4} · [\d,]+ samples/s")
ERASED = "\r\x1b[K"


def at_a_terminal(ddptrain: ForkServer, tmp_path: Path, *argv: object) -> tuple[list[str], str]:
    """Return (lines of stdout, all output on the terminal) of a command with a terminal as stderr."""
    master, terminal = pty.openpty()
    os.set_blocking(master, False)
    run = ddptrain.start(*argv, streams=[str(tmp_path / "stdout"), os.ttyname(terminal)])
    shown = b""

    def is_read_to_the_end() -> bool:
        nonlocal shown
        ended = run.ended  # before reading: it writes nothing more
        with contextlib.suppress(BlockingIOError):
            while True:
                shown += os.read(master, 65536)
        return ended

    wait_until(is_read_to_the_end, "the command to end")
    os.close(terminal)
    os.close(master)
    assert run.wait() == 0, shown.decode()
    return (tmp_path / "stdout").read_text().splitlines(), shown.decode()


@pytest.mark.parametrize("verb", [("train",), ("launch", "--nproc-per-node", 2)])
def test_one_bar_is_drawn_to_the_end_and_erased(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, verb: tuple[object, ...]
) -> None:
    argv = (*verb, "--data", "idx", "--data-dir", idx, "--batch-size", 37, "--epochs", 2)
    lines, shown = at_a_terminal(ddptrain, tmp_path, *argv)
    frames = BAR.findall(shown)
    steps = [int(step) for _, step, _ in frames]
    assert steps == sorted(set(steps)), "each step is drawn at most once, so by one rank"
    assert frames[-1] == ("█" * 24, "18", "2")
    assert shown.endswith(ERASED)
    assert not any("█" in line or "step 1/18" in line for line in lines)
    assert [line for line in lines if "epoch 2/2: test accuracy" in line]
