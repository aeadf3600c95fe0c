"""Every ``--help`` shows an example, and the example works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddptrain.cli import main
from tests.ddptrain.runs import ForkServer

ROOT = Path(__file__).parents[2]
VERBS = ("", "train", "launch", "eval", "lesson")


def example(verb: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the arguments of ``ddptrain`` in the example of the verb's help."""
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    found = re.search(r"example:\n  ddptrain (.+)", capsys.readouterr().out)
    assert found, verb
    return found[1].split()


def test_every_example_works(ddptrain: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        ddptrain.run(*(argument.replace("/tmp/", f"{tmp_path}/") for argument in example(verb, capsys)))


@pytest.mark.soak
def test_the_page_about_the_trainer_can_be_followed_from_top_to_bottom(ddptrain: ForkServer, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "trainer.md").read_text()
    commands = re.findall(r"^\.venv/bin/ddptrain (.+)$", page, re.MULTILINE)
    alone = [command for command in commands if "/mnist" not in command and "--init" not in command]
    assert len(alone) >= 5
    runs = {command: ddptrain.run(*command.replace("/tmp/", f"{tmp_path}/").split()) for command in alone}
    outputs = [run.output() for run in runs.values()]
    assert not [output for output in outputs if "Warning" in output]
    assert "1 rank(s) on 1 node(s), cpu, " in outputs[0], "one rank has no process group, and so no backend"
    [two_ranks] = [run for command, run in runs.items() if "launch" in command and "--epochs 2" in command]
    assert two_ranks.message()["accuracy"] >= 0.85
