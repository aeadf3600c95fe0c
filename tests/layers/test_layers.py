"""What fails a layer, with real commands; that each test is part of one layer; and what `make` installs."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers.definitions import BY_NAME, LAYERS, PACKAGES, Command, Layer, pytest_command
from tests.layers.report import LayerResult, Outcome, as_text
from tests.layers.runner import Runner

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the pytest runs of these tests without plugins that they do not need."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def layer_of(folder: Path, name: str, source: str, *needs: str) -> Layer:
    """Return a layer of one pytest command that runs ``source``."""
    folder.mkdir(exist_ok=True)
    file = folder / f"test_{name}.py"
    file.write_text(f"import os, pytest\n{source}")
    return Layer(name, (pytest_command(str(file), "-c", os.devnull, "--rootdir", str(folder), needs=needs),))


def shell(script: str, *, needs: tuple[str, ...] = ()) -> Command:
    return Command(("sh", "-c", script), needs=needs)


def answers(*results: tuple[str, str, str]) -> list[str]:
    """Return a preparation command that reports these results: name, state, reason."""
    lines = [json.dumps({"name": n, "state": s, "seconds": 0, "reason": r, "detail": r}) for n, s, r in results]
    return [sys.executable, "-c", f"print({chr(10).join(lines)!r})"]


def run_layers(*layers: Layer, ci: bool = False, prepare: list[str] | None = None) -> list[LayerResult]:
    return Runner(layers, ci=ci, prepare=prepare or answers()).run()


def counts(result: LayerResult) -> tuple[int, ...]:
    return tuple(result.count(outcome) for outcome in Outcome)


def test_passed_failed_and_skipped_tests_are_counted_per_layer(tmp_path: Path) -> None:
    mixed = layer_of(
        tmp_path,
        "mixed",
        "def test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip(reason='no GPU')\ndef test_c(): pass\n"
        "@pytest.mark.xfail\ndef test_d(): assert 0\n",
    )
    good = layer_of(tmp_path, "good", "def test_a(): pass\n")
    results = run_layers(mixed, good)
    assert [counts(result) for result in results] == [(2, 1, 1), (1, 0, 0)]
    assert [result.outcome(ci=False) for result in results] == [Outcome.FAILED, Outcome.PASSED]
    text = as_text(results, 1.0, ci=False).splitlines()
    assert text[-1] == "3 passed, 1 failed, 1 skipped"
    cpu = [result.cpu_seconds for result in results]
    assert text[-2] == f"layers: 1 passed, 1 failed, 0 skipped in 1 s, {sum(cpu):.0f} s of CPU time"
    assert [line.split() for line in text[-7:-5]] == [
        ["mixed", "2", "1", "1", f"{results[0].seconds:.1f}", f"{cpu[0]:.1f}", "FAILED"],
        ["good", "1", "0", "0", f"{results[1].seconds:.1f}", f"{cpu[1]:.1f}", "ok"],
    ]
    assert text[-4:-2] == ["  mixed        test_mixed.py::test_b", "    assert 0"]
    assert "  mixed        1: no GPU" in text


def test_layer_with_all_tests_skipped_is_skipped_and_fails_with_ci(tmp_path: Path) -> None:
    source = "pytestmark = pytest.mark.skip(reason='Docker is not installed')\ndef test_a(): pass\ndef test_b(): pass\n"
    [result] = run_layers(layer_of(tmp_path, "kind", source))
    assert result.outcome(ci=False) is Outcome.SKIPPED
    assert result.explanation(ci=False) == "skipped (2): Docker is not installed"
    totals = as_text([result], 1.0, ci=False).splitlines()[-2:]
    assert totals[0].startswith("layers: 0 passed, 0 failed, 1 skipped in 1 s")
    assert totals[1] == "0 passed, 0 failed, 2 skipped"
    assert result.outcome(ci=True) is Outcome.FAILED
    assert result.explanation(ci=True) == "FAILED: CI=true forbids skipped tests (2): Docker is not installed"
    assert as_text([result], 1.0, ci=True).splitlines()[-1] == "0 passed, 1 failed, 2 skipped"


FLAKY = (
    "def test_{name}():\n    open('{folder}/{name}', 'a').write('x')\n"
    "    assert os.path.getsize('{folder}/{name}') >= {least}, 'too early'\n"
)


@pytest.mark.parametrize("ci", [False, True])
def test_with_ci_failed_tests_run_once_more_and_are_named_if_they_pass_then(tmp_path: Path, ci: bool) -> None:
    runs = {"good": 1, "flaky": 2, "bad": 9}
    source = "".join(FLAKY.format(name=name, folder=tmp_path, least=least) for name, least in runs.items())
    results = run_layers(layer_of(tmp_path, "mixed", source), ci=ci)
    assert counts(results[0]) == ((2, 1, 0) if ci else (1, 2, 0))
    assert [len((tmp_path / name).read_text()) for name in runs] == ([1, 2, 2] if ci else [1, 1, 1])
    text = as_text(results, 1.0, ci=ci).splitlines()
    named = [line.split("::")[1] for line in text[text.index("failed tests:") - 2 * ci :] if "::" in line]
    assert named == ["test_flaky", "test_bad"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def test_a(): os._exit(9)\n", "pytest ended with exit code 9 before it wrote its report"),
        ("", "pytest ended with exit code 5"),
        ("def test_a(): assert 0\ndef test_b(): pytest.exit('', 3)\n", "pytest ended with exit code 3"),
    ],
    ids=["killed", "no tests", "ended after a failed test"],
)
def test_pytest_that_ends_without_a_result_fails_the_layer(tmp_path: Path, source: str, problem: str) -> None:
    results = run_layers(layer_of(tmp_path, "broken", source))
    assert results[0].explanation(ci=False) == f"FAILED: {problem}"
    assert as_text(results, 1.0, ci=False).splitlines()[-1].endswith(" passed, 1 failed, 0 skipped")


def test_program_that_is_missing_and_a_report_that_cannot_be_read_fail_their_layers(tmp_path: Path) -> None:
    truncate = (
        "def test_a(request):\n    file = request.config.option.xmlpath\n    os.makedirs(os.path.dirname(file))\n"
        "    open(file, 'w').close()\n    os._exit(3)\n"
    )
    layers = Layer("a", (Command(("/no/such/program",)),)), layer_of(tmp_path, "b", truncate)
    results = run_layers(*layers)
    assert [result.outcome(ci=False) for result in results] == [Outcome.FAILED] * 2
    assert ["FileNotFoundError" in results[0].problems[0], "ParseError" in results[1].problems[0]] == [True, True]


def test_unavailable_need_skips_a_layer_with_its_reason_and_fails_it_with_ci(tmp_path: Path) -> None:
    layers = (
        layer_of(tmp_path, "apiserver", "def test_a(): pytest.skip('etcd is not built')\n", "etcd"),
        Layer("lint", (shell("exit 0"), shell("exit 1", needs=("etcd",)))),
    )
    prepare = answers(("etcd", "unavailable", "Go is not installed"))
    apiserver, lint = run_layers(*layers, prepare=prepare)
    assert apiserver.explanation(ci=False) == "skipped (1): Go is not installed"
    assert (counts(lint), lint.outcome(ci=False)) == ((1, 0, 1), Outcome.PASSED)
    for result in run_layers(*layers, ci=True, prepare=prepare):
        assert result.explanation(ci=True) == "FAILED: etcd is not prepared: Go is not installed"


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (answers(("images", "failed", "docker build failed")), "images is not prepared: docker build failed"),
        (["sh", "-c", "exit 7"], "images is not prepared: the preparation ended with exit code 7"),
    ],
    ids=["reported", "died"],
)
def test_failed_preparation_fails_the_layer_without_running_it(tmp_path: Path, prepare: list[str], reason: str) -> None:
    [result] = run_layers(Layer("kind", (shell(f"touch {tmp_path}/ran", needs=("images",)),)), prepare=prepare)
    assert result.explanation(ci=False) == f"FAILED: {reason}"
    assert not (tmp_path / "ran").exists()


def test_makefile_and_definitions_name_the_same_layers() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    [listed] = re.findall(r"^ALL_LAYERS := (.*)$", makefile, re.MULTILINE)
    assert set(listed.split()) == set(BY_NAME)
    assert len(BY_NAME) == len(LAYERS)


@pytest.mark.parametrize("target", ["demo", "demo-kind", "kind-down"])
def test_demo_installs_no_programs_of_tests(target: str, tmp_path: Path) -> None:
    """Seen: `make demo` installed ruff, mypy and pre-commit before it trained."""
    command = ["make", "--dry-run", f"VENV={tmp_path / 'new'}", target]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    assert "requirements/trainer.txt" in done.stdout and "requirements/test.txt" not in done.stdout


def test_setup_removes_the_distributions_of_an_earlier_checkout_first(tmp_path: Path) -> None:
    """Seen: pip wrote the command ddptrain, then removed it with the earlier ddpjob, to which it had belonged."""
    command = ["make", "--dry-run", f"VENV={tmp_path / 'new'}", "setup"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    installed = done.stdout.index("--editable")
    assert "pip uninstall" in done.stdout[:installed]


def test_the_hook_of_a_commit_checks_the_types_of_the_same_packages() -> None:
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    [options] = re.findall(r"entry: \.venv/bin/mypy (.*)", hooks)
    assert options.split() == [word for package in PACKAGES for word in ("-p", package)]


def _selects(command: Command, file: Path, mark: str | None) -> bool:
    """Return whether a pytest command runs the tests of a file with this mark, or those without a mark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--ignore", action="append", type=Path, default=[])
    parser.add_argument("-m")
    parser.add_argument("-q", action="store_true")
    options = parser.parse_intermixed_args(command.words[3:])
    places = {file.relative_to(REPOSITORY), *file.relative_to(REPOSITORY).parents}
    is_marked = options.m == mark if mark else options.m is None or options.m.startswith("not ")
    return is_marked and not places.isdisjoint(options.paths) and places.isdisjoint(options.ignore)


def test_every_test_file_is_part_of_one_command() -> None:
    commands = [command for layer in LAYERS for command in layer.commands if command.is_pytest]
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        for mark in set(re.findall(r"mark\.(kind|apiserver)\b", file.read_text())) or {None}:
            selecting = [command.words for command in commands if _selects(command, file, mark)]
            assert len(selecting) == 1, f"{file}, {mark}: {selecting}"
