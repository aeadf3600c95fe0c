"""``ddprun --why DIR``: the root cause of a failure out of the reports of all nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddprun.cli import main
from ddprun.launcher.node_reports import merge_reports
from tests.ddptrain.builders import rank_state


def explained(directory: Path) -> int:
    return main(["--why", str(directory)])


def node_report(node: int, time: float, ranks: list[Any], **report: Any) -> dict[str, Any]:
    return {"node": node, "nnodes": 2, "time": time, "ranks": ranks, "report": {"cause": "own", **report}}


def test_an_own_failure_comes_before_an_earlier_lost_peer() -> None:
    nodes = [
        node_report(0, 1.0, [], code=77, cause="peer", rank=0),
        node_report(1, 2.0, [], code=137, rank=3),
    ]
    assert merge_reports(nodes)[0]["rank"] == 3


def test_the_ranks_of_all_nodes_show_which_one_hung() -> None:
    waiting = [rank_state(rank, collectives=9) for rank in (0, 1)]
    behind = [rank_state(2, collectives=8), rank_state(3, collectives=9)]
    nodes = [node_report(at, 1.0, r, code=76, cause="peer", rank=2 * at) for at, r in enumerate((waiting, behind))]
    report, ranks = merge_reports(nodes)
    assert (report["rank"], report["cause"], len(ranks)) == (2, "own", 4)


def test_invalid_reports_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "reports" / "local-0" / "node-0.json"
    node.parent.mkdir(parents=True)
    whole = {**node_report(0, 1.0, [vars(rank_state(0))], code=76, rank=0), "nnodes": 1}
    for content in ("", "[]", {**whole, "ranks": [{"rank": 0}]}, {**whole, "ranks": [1]}, {**whole, "ranks": None}):
        node.write_text(content if isinstance(content, str) else json.dumps(content))
        assert explained(tmp_path) == 66
    node.write_text(json.dumps(whole))
    assert explained(tmp_path) == 0
    assert "root cause: rank 0," in capsys.readouterr().out


def test_hint_and_next_step_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "reports" / "local-0" / "node-0.json"
    node.parent.mkdir(parents=True)
    advice = {"message": "no data", "hint": "the volume is empty", "next": "fetch the data"}
    node.write_text(json.dumps({**node_report(0, 1.0, [], code=66, rank=0, **advice), "nnodes": 1}))
    assert explained(tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == [
        "root cause: rank 0, exit code 66: no data",
        "at:    not known",
        "hint:  the volume is empty",
        "next:  fetch the data",
    ]


def test_control_characters_are_printed_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "reports" / "local-0" / "node-0.json"
    node.parent.mkdir(parents=True)
    states = [vars(rank_state(0)) | {"phase": "\x1b[2J", "collective": ""}]
    content = {**node_report(0, 1.0, states, code=1, rank=0, message="\x1b]0;owned\x07", hint="\x9b1m"), "nnodes": 1}
    node.write_text(json.dumps(content))
    assert explained(tmp_path) == 0
    printed = capsys.readouterr().out
    assert r"\x1b]0;owned\x07" in printed
    assert all(c.isprintable() or c == "\n" for c in printed)
