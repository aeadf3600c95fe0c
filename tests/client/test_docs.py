"""The examples of docs/tasks/python.md run, and print what the page shows."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest

from ddpjob import Client, DDPJob
from tests.worlds.control_plane import ControlPlane

PAGE = (Path(__file__).parents[2] / "docs" / "tasks" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)
CLUSTER = [code for code, _ in EXAMPLES if "Client.cluster(" in code]


def test_examples_for_this_machine_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    names: dict[str, object] = {}
    printed = []
    for code, expected in EXAMPLES:
        if code not in CLUSTER:
            cell = f"<example {len(printed)}>"  # as a notebook keeps the source of its cells
            linecache.cache[cell] = (len(code), None, code.splitlines(keepends=True), cell)
            exec(compile(code, cell, "exec"), names)  # noqa: S102 - the project's own page
            printed.append(capsys.readouterr().out)
            assert not expected or printed[-1] == expected
    assert sorted(printed[0].splitlines()[:2]) == [f"n{n} attempt 1: hello from node {n}" for n in (0, 1)]
    assert printed[0].splitlines()[2:] == ["Succeeded 2/2"]
    assert any(text.splitlines()[-1].startswith("Succeeded ") for text in printed[1:] if text), "the watch"


@pytest.mark.apiserver
def test_the_example_for_a_cluster_runs(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = CLUSTER
    control_plane.make_namespace("team-a")
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig(name="gpu-cluster")))
    exec(compile(code, "docs/tasks/python.md", "exec"), {"Client": Client, "DDPJob": DDPJob})  # noqa: S102
    assert capsys.readouterr().out == "['mnist']\n"
