"""The simulator detects errors: each mutant of the engine or the controller makes one of its runs fail."""

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulator.mutants import MUTANTS
from tests.simulator.parallel import first_detection


@pytest.fixture(scope="module")
def detections(processes: ProcessPoolExecutor) -> dict[str, str | None]:
    """The first run that detects each mutant, with what it found; None for a mutant that survives."""
    return dict(zip(MUTANTS, processes.map(first_detection, MUTANTS), strict=True))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_detected(mutant: str, detections: dict[str, str | None]) -> None:
    found = detections[mutant]
    print(f"\n{mutant}: {found and found.splitlines()[-1].strip()}")
    assert found is not None, f"{mutant} survives {len(MUTANTS[mutant].runs)} runs"
