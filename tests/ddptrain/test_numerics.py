"""Facts that decide the last bits of a sum, and their changes between two starts."""

from __future__ import annotations

from pathlib import Path

from ddptrain.device import numerics, processor
from ddptrain.training.checkpointer import numerics_changes

CPUINFO = "processor : 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t: 143\nmodel name\t: X\n\nprocessor : 1\n"


def test_processor_is_identified_by_vendor_family_and_model(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert processor(tmp_path / "cpuinfo") == "GenuineIntel 6 143"


def test_processor_falls_back_to_the_architecture(tmp_path: Path) -> None:
    assert processor(tmp_path / "absent")
    (tmp_path / "cpuinfo").write_text("Processor : ARM\n")
    assert processor(tmp_path / "cpuinfo") == processor(tmp_path / "absent")


def test_changes_have_both_values() -> None:
    facts = numerics()
    assert numerics_changes(facts, facts) == []
    changed = numerics_changes({**facts, "threads": 64, "torch": "1.0"}, facts)
    assert changed == [f"threads was 64, is {facts['threads']}", f"torch was 1.0, is {facts['torch']}"]
