"""The commands of docs/concepts/torch-distributed do what the pages say; diffs and pictures are of today's lessons."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ddptrain.runs import ForkServer, Lesson, Run
from tests.install.chart import ROOT
from tests.install.guide import DRAWN, GUIDE, PICTURES, with_differences
from tests.lessons.draw import pictures
from tests.processes import free_port

PAGES = sorted(GUIDE.glob("*.md"))
# `make soak` runs the commands of these pages; test_lessons runs the lessons of all pages.
LONG = {"launching", "checkpoints", "model-parallel"}
NOT_RUN = {"# needs two machines", "# needs a cluster", "# needs GPUs"}
# Commands, and the output that the page quotes: lines in this order, in which … stands for anything.
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(([A-Z_]+=\S+ )*)(ddptrain|torchrun) (.*)")


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.soak if page.stem in LONG else ())
        for page in PAGES
        if BLOCK.search(text(page))
    ],
)
def test_commands_of_the_page_print_what_it_quotes(
    ddptrain: ForkServer, lesson: Lesson, tmp_path: Path, page: Path
) -> None:
    for commands, quoted in BLOCK.findall(text(page)):
        if commands.partition("\n")[0] in NOT_RUN:
            continue
        if re.fullmatch(r"ddptrain lesson .*\n", commands):
            output = lesson(*commands.split()[2:])  # several pages quote the same run
        else:
            output = run(commands.replace("/tmp/guide", str(tmp_path)).replace("29500", str(free_port())), ddptrain)
        pattern = ".*?".join(re.escape(line.strip()).replace("…", "[^\n]*") for line in quoted.splitlines())
        assert re.search(pattern, output, re.DOTALL), f"{commands}\nprinted:\n{output}"


def run(commands: str, ddptrain: ForkServer) -> str:
    """Run a block of commands, ddptrain and torchrun in a forked process, and return what they printed."""
    parsed = [COMMAND.match(line) for line in commands.splitlines()]
    if None in parsed:
        return run_in_shell(commands)
    runs: list[tuple[Run, int]] = []
    for command in filter(None, parsed):
        expected = re.search(r"# exits with (\d+)$", command[4])
        env = dict(word.split("=") for word in command[1].split())
        words, module = shlex.split(command[4], comments=True), ""
        if command[3] == "torchrun":
            module = "torch.distributed.run"
            env["PET_MASTER_PORT"] = str(free_port())  # its default port may be another program's
        started = ddptrain.start(*(word for word in words if word != "&"), env=env, module=module)
        runs.append((started, int(expected[1]) if expected else 0))
        if words[-1] != "&":
            runs[-1][0].wait()
    for started, code in runs:
        assert started.wait() == code, f"{commands}\nended with {started.wait()}, not {code}:\n{started.output()}"
    return "".join(started.output() for started, _ in runs)


def run_in_shell(commands: str) -> str:
    """Run a block in bash with the programs of this installation, and return what it printed."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    script = f"set -e\n{commands}wait\n"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=300, env=env, cwd=ROOT, check=False
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_readme_lists_the_blocks_that_no_test_runs() -> None:
    needs = re.compile(r"^```sh\n(# needs .*)$", re.MULTILINE)
    marked = {(comment, page.name) for page in PAGES for comment in needs.findall(text(page))}
    listed = re.findall(r"^\| `(# needs .*?)` \| \[.*?\]\((.*?)\) \|$", text(GUIDE / "README.md"), re.MULTILINE)
    assert set(listed) == marked and {comment for comment, _ in marked} == NOT_RUN


def test_differences_are_those_of_the_lessons() -> None:
    assert "```diff" in text(GUIDE / "data-parallel.md")
    for page in PAGES:
        assert with_differences(text(page)) == text(page), f"{page.name}: run `make generate`"


def test_pictures_show_what_the_lessons_exchange(lesson: Lesson) -> None:
    drawn = {file: picture for name in DRAWN for file, picture in pictures(lesson(name))}
    assert drawn == {path.name: text(path) for path in PICTURES.iterdir()}, "run `make generate`"
