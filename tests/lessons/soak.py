"""Tests that take too long for every run; `make soak` runs them.

Each repeats, with more ranks, steps or samples, what a test in this folder checks in seconds.
"""

from __future__ import annotations

import pytest

from ddptrain.lesson import SCRIPTS, lesson_names
from tests.ddptrain.runs import ForkServer
from tests.lessons.test_lessons import UNEVEN
from tests.processes import free_port


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in lesson_names() for ranks in ((1, 2, 3, 4, 7) if name in UNEVEN else (1, 2, 4))],
)
def test_lesson_holds_with_any_number_of_ranks(ddptrain: ForkServer, name: str, ranks: int) -> None:
    assert ddptrain.run("lesson", name, "--nproc-per-node", ranks).output().strip()


def test_tutorials_launcher_passes_an_argument_that_lessons_accept(ddptrain: ForkServer) -> None:
    argv = ("--nproc-per-node", 2, "--master-port", free_port(), SCRIPTS / "start.py")
    run = ddptrain.run(*argv, module="torch.distributed.launch")
    assert run.output().count(": all_reduce of the ranks") == 3
