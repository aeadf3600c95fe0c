"""The list of the mutants is current."""

from tests.mutants.mutant import ROOT, NotApplicableError, areas
from tests.simulator.runs import Run


def test_every_mutant_can_be_applied_and_is_claimed() -> None:
    """Keeps the list current: whoever changes a line that a mutant changes also brings the mutant up to date."""
    mutants = [mutant for of_area in areas().values() for mutant in of_area]
    wrong = []
    for each in mutants:
        try:
            assert each.apply_to((ROOT / each.file).read_text()) and (each.tests or each.runs)
        except NotApplicableError as error:
            wrong.append(f"{each.name}: {error}")
        named = [test.partition("::")[0] for test in each.tests if test.startswith("tests/")]
        wrong += [f"{each.name}: {file} does not exist" for file in named if not (ROOT / file).exists()]
        assert all(Run.parse(run.split()) for run in each.runs)
    assert not wrong, "\n".join(wrong)
    assert len(mutants) >= 80
