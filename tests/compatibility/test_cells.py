"""The table of public programs: what counts as "yes", and its form in the document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.compatibility.__main__ import documented
from tests.compatibility.cells import (
    COLUMNS,
    Cell,
    fault_named,
    hang_named,
    parsed,
    progress,
    runs,
    table,
    worse,
)
from tests.compatibility.inject import MESSAGE
from tests.compatibility.programs import PROGRAMS
from tests.compatibility.runs import Outcome

PROGRAM = replace(PROGRAMS[0], count=2, steps=4, endless=False)
FILE = PROGRAM.source.file
ENDED = Outcome(0, ["0.5", "0.6"], {"outcome": "succeeded", "progress": {"step": 4}}, shown=3)
FAULT = {"kind": "ValueError", "message": MESSAGE, "rank": 1, "step": 3, "where": f"{FILE}:7"}


def test_document_has_the_table_that_the_command_writes() -> None:
    text = documented()
    rows = parsed(text)
    assert list(rows) == [program.name for program in PROGRAMS]
    assert text.strip().startswith(table(rows))


def test_table_is_read_as_it_is_written() -> None:
    cells = (Cell(True, "2 losses"), Cell(False, "no report"), Cell(True, "rank 1"), Cell(True, "4 of 4 steps"))
    rows = {program.name: dict(zip(COLUMNS, cells, strict=True)) for program in PROGRAMS}
    assert parsed(table(rows)) == rows
    with pytest.raises(ValueError, match="not a row"):
        parsed(table(rows).replace("yes: 2 losses", "maybe"))


def test_program_runs_if_it_ends_with_all_losses_of_torchrun() -> None:
    assert runs(PROGRAM, ENDED, ENDED) == Cell(True, "2 losses equal torchrun's")
    assert runs(PROGRAM, ENDED, replace(ENDED, losses=["0.5", "0.7"])).holds is False
    few = replace(ENDED, losses=["0.5"])
    assert runs(PROGRAM, few, few) == Cell(False, "1 of 2 losses under torchrun")
    failed = Outcome(1, output="[rank1]: AssertionError: Torch not compiled with CUDA enabled")
    assert (
        runs(PROGRAM, failed, ENDED).seen
        == "`AssertionError: Torch not compiled with CUDA enabled` under torchrun, too"
    )
    assert runs(PROGRAM, ENDED, replace(ENDED, code=None)) == Cell(False, "it does not end")
    no_driver = replace(ENDED, code=1, report={"message": "No driver. Please install one from https://example.com"})
    assert runs(PROGRAM, ENDED, no_driver) == Cell(False, "`No driver`")


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"kind": "PeerLost"}, {"where": "optimizer.py:517"}, {"message": ""}])
def test_fault_is_named_by_exception_message_rank_and_line(wrong: dict[str, Any]) -> None:
    assert fault_named(PROGRAM, Outcome(1, report=FAULT)) == Cell(True, f"`ValueError` of rank 1, step 3, {FILE}:7")
    in_child = FAULT | {"kind": "ProcessRaisedException", "message": f"ValueError: {MESSAGE}"}
    assert fault_named(PROGRAM, Outcome(1, report=in_child)).holds
    assert fault_named(PROGRAM, Outcome(1, report=FAULT | wrong)).holds is False
    assert fault_named(PROGRAM, Outcome(1)) == Cell(False, "no report")


def test_hang_is_named_by_its_rank() -> None:
    report = {"kind": "Hang", "rank": 1, "step": 3}
    assert hang_named(Outcome(76, report=report)) == Cell(True, "`Hang` of rank 1, step 3")
    assert hang_named(Outcome(76, report=report | {"rank": 0})).holds is False
    assert hang_named(Outcome(None, report=report)) == Cell(False, "nothing is reported")


def test_progress_is_the_number_of_steps() -> None:
    assert progress(PROGRAM, ENDED) == Cell(True, "4 of 4 steps")
    assert progress(replace(PROGRAM, steps=5), ENDED).holds is False
    assert progress(PROGRAM, Outcome(0, report={"outcome": "succeeded"})) == Cell(False, "no step is shown")


def test_cell_that_no_longer_holds_is_an_error() -> None:
    def rows(*, holds: bool) -> dict[str, dict[str, Cell]]:
        return {PROGRAM.name: dict.fromkeys(COLUMNS, Cell(holds, "seen"))}

    good, bad = rows(holds=True), rows(holds=False)
    assert len(worse(good, bad)) == len(COLUMNS)
    assert not worse(bad, bad) and not worse(good, good) and not worse({}, bad)
