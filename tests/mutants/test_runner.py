"""The runner tells mutants that the tests detect from those that survive, and changes nothing but its copy."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant, NotApplicableError, areas, in_this_process
from tests.mutants.runner import Result, results_of
from tests.mutants.tree import TIMED_OUT, Tree
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


def mutant(new: str, *, old: str = "a + b", tests: tuple[str, ...] = ("test_sum.py",), survives: str = "") -> Mutant:
    return Mutant(new, "a wrong sum", "operator/ddpjob/__init__.py", old, new, tests, survives=survives)


def test_killed_survivor_and_text_that_is_not_found(repository: Path) -> None:
    given = [
        mutant("a - b"),
        mutant("a * b"),
        mutant("b * a", survives="2 + 2 is 2 * 2"),
        mutant("b - a", survives="nothing detects it"),
        mutant("0", old="a ** b"),
        mutant("1", old="a"),
        mutant("b + a +"),
        mutant("2", tests=("absent.py",)),
        mutant("__import__('atexit').register(__import__('os').abort)"),
    ]
    killed, survivor, known, no_longer, absent, repeated, broken, without, aborted = results_of(given, 60, repository)
    assert verdicts(killed, survivor) == [("killed", True), ("survived", False)]
    assert killed.by == "test_sum.py::test_sum"
    assert verdicts(known, no_longer) == [("survived", True), ("killed", False)]
    assert verdicts(absent, repeated) == [("not applicable", False)] * 2
    assert verdicts(broken, without) == [("error", False)] * 2
    assert verdicts(aborted) == [("killed", True)] and aborted.by == killed.by
    assert "SyntaxError" in broken.by and "absent.py" in without.by
    assert (repository / "operator/ddpjob/__init__.py").read_text() == SUM
    assert not list(repository.rglob("__pycache__"))
    assert not any(LEFT_BEHIND in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))


def test_tests_that_fail_without_the_mutant_show_nothing(repository: Path) -> None:
    (repository / "test_sum.py").write_text("def test_nothing() -> None:\n    assert False\n")
    [result] = results_of([mutant("a - b")], 60, repository)
    assert result.verdict == "error" and "without the mutant, too" in result.by


def test_tests_that_do_not_end_are_killed(repository: Path, tmp_path: Path) -> None:
    (repository / "test_sum.py").write_text("import time\n\ndef test_end() -> None:\n    time.sleep(9999)\n")
    (tmp_path / "copy").mkdir()
    assert Tree(tmp_path / "copy", repository).pytest(["test_sum.py"], 2)[0] == TIMED_OUT


def test_function_has_the_error_only_within_the_context() -> None:
    wrong = Mutant(
        "wrong", "", "operator/ddpjob/engine/attempt.py", "_SECONDS, refusals, MAX", "_SECONDS, refusals + 1, MAX"
    )
    from ddpjob.engine.attempt import retry_seconds  # noqa: PLC0415 - a name that was imported before the change

    with in_this_process(wrong):
        assert retry_seconds(1) == 2
    assert retry_seconds(1) == 1


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


def test_an_unknown_name_is_refused() -> None:
    command = [sys.executable, "-m", "tests.mutants", "engnie"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 2 and "no area and no mutant: engnie" in done.stderr


def verdicts(*results: Result) -> list[tuple[str, bool]]:
    return [(result.verdict, result.is_expected) for result in results]
