"""The simulator detects errors: each of its mutants (``tests.mutants``) makes one of its runs fail.

These are samples; `make mutants` and `make soak` have all.
"""

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.mutants.mutant import Mutant, areas
from tests.simulator.parallel import first_detection
from tests.soak import ALL

MUTANTS = areas()["simulator"][:: 1 if ALL else 5]


@pytest.fixture(scope="module")
def detections(processes: ProcessPoolExecutor) -> dict[str, str | None]:
    """The first run that detects each mutant, with what it found; None for a mutant that survives."""
    names = [mutant.name for mutant in MUTANTS]
    return dict(zip(names, processes.map(first_detection, MUTANTS), strict=True))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_detected(mutant: Mutant, detections: dict[str, str | None]) -> None:
    found = detections[mutant.name]
    print(f"\n{mutant.name}: {found and found.splitlines()[-1].strip()}")
    assert found is not None, f"{mutant.name} survives {len(mutant.runs)} runs"
