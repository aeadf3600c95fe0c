"""The runner tells mutants that the tests detect from those that survive, and changes nothing but its copy."""

import subprocess
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant, NotApplicableError, areas
from tests.mutants.runner import results_of
from tests.simulator.runs import Run

SUM = "def add(a: int, b: int) -> int:\n    return a + b\n"
TESTS = """
import subprocess, sys
from ddpjob import add

def test_sum() -> None:
    assert add(2, 2) == 4

def test_left_behind() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(12345.5)"])
"""
LEFT_BEHIND = b"time.sleep(12345.5)"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with all packages, one function and a test of it, which needs no plugin of pytest."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "repository"
    files = {
        "operator/ddpjob/__init__.py": SUM,
        "operator/ddpjob_operator/__init__.py": "",
        "trainer_app/ddprun/__init__.py": "",
        "trainer_app/ddpplot/__init__.py": "",
        "trainer_app/ddptrain/__init__.py": "",
        ".gitignore": "ignored\n",
    }
    for name, text in (files | {"ignored": "", "test_sum.py": TESTS}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", root], check=True)
    return root


def mutant(new: str, *, old: str = "a + b", tests: tuple[str, ...] = ("test_sum.py",)) -> Mutant:
    return Mutant(new, "a wrong sum", "operator/ddpjob/__init__.py", old, new, tests)


def test_killed_survivor_and_text_that_is_not_found(repository: Path) -> None:
    given = {
        mutant("a - b"): "killed",
        mutant("a * b"): "survived",
        mutant("0", old="a ** b"): "not applicable",
        mutant("1", old="a"): "not applicable",
        mutant("b + a +"): "error",
        mutant("2", tests=("absent.py",)): "error",
    }
    results = list(results_of([*given], 60, repository))
    assert {result.mutant: result.verdict for result in results} == given
    assert results[0].by == "test_sum.py::test_sum"
    assert (repository / "operator/ddpjob/__init__.py").read_text() == SUM
    assert not any(LEFT_BEHIND in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))


def test_tests_that_fail_without_the_mutant_show_nothing(repository: Path) -> None:
    (repository / "test_sum.py").write_text("def test_nothing() -> None:\n    assert False\n")
    [result] = results_of([mutant("a - b")], 60, repository)
    assert result.verdict == "error" and "without the mutant, too" in result.by


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
