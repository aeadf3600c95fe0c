"""`make pictures`: the command lines that it passes on are those that the programs take."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from tests.ddptrain.browser.pictures import ROOT, data_dir, training


def test_make_names_the_directory_of_the_data_as_the_program_takes_it() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "pictures", "MNIST=/data/mnist"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    _, *words = shlex.split(printed.splitlines()[-1])
    assert words[:2] == ["-m", "tests.ddptrain.browser.pictures"]
    assert data_dir(words[2:]) == Path("/data/mnist")


def test_the_training_reads_that_directory_and_a_rank_is_killed() -> None:
    program, _, *arguments = map(str, training(Path("/data/mnist")))
    checked = ["submit", "--local", "--dry-run", "client", "--output", "yaml"]
    command = [Path(sys.executable).with_name(program), *checked, *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    [job] = [item for item in yaml.safe_load_all(printed) if item["kind"] == "DDPJob"]
    assert job["spec"]["args"][-4:] == ["--chaos", "kill:3:390", "--data-dir", "/data/mnist"]
