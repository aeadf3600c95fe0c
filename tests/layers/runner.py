"""Run the commands of test layers: as many at a time as the machine has CPUs for, beside the builds.

A command that mostly waits takes a small share of a CPU, so several of them run at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from tests.kind.prepare import Result, State
from tests.kind.toolchain import ToolchainError, binary
from tests.layers.definitions import Command, Layer
from tests.layers.report import Case, CommandResult, LayerResult, Outcome, read_junit
from tests.processes import die_with_parent

FULL = 1.38
"""Shares of CPUs to give away per CPU, because no command uses its share all the time.

With more, those that take longest are slowed down by the others, and then end by themselves.
"""
BUILD_CORES = 1.0
"""The share of the builds, which the tests run beside."""
MOST_AGAIN = 2
"""With CI=true, if at most so many tests failed, these run once more by themselves (docs/develop/decisions/0042)."""
PREPARE = (sys.executable, "-m", "tests.kind", "prepare", "--json")
_PREPARATION = "prepare"
_PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


@dataclass(frozen=True)
class Job:
    """One command, the result of its layer, and the name of its folder, where pytest notes which tests failed."""

    command: Command
    layer: LayerResult
    folder: str


class Runner:
    """Runs layers once. ``ci``: what cannot be prepared is a failure, and a few failed tests run a second time.

    prepare: the command that prepares names.
    """

    def __init__(self, layers: Sequence[Layer], *, ci: bool, prepare: Sequence[str] = PREPARE) -> None:
        self.results = [LayerResult(layer.name) for layer in layers]
        pairs = list(zip(layers, self.results, strict=True))
        commands = [(command, result) for layer, result in pairs for command in layer.commands]
        self._pending = [Job(command, result, str(number)) for number, (command, result) in enumerate(commands)]
        self._running: list[Job] = []
        self._ended: list[tuple[Job, CommandResult]] = []
        self._ci = ci
        self._cores = len(os.sched_getaffinity(0))
        self._prepare = prepare
        self._raw = len(self._pending) == 1
        """The only command writes to the terminal itself, so that a developer sees pytest's dots."""
        self._prepared: dict[str, Result] = {}
        lists = sorted((job.command.needs for job in self._pending), key=len)
        self._needed = list(dict.fromkeys(name for needs in lists for name in needs))
        self._changed = threading.Condition()
        self._printing = threading.Lock()

    def run(self) -> list[LayerResult]:
        """Run all commands to their end and return the results in the order of the layers."""
        with tempfile.TemporaryDirectory(prefix="ddpjob-layers-") as folder:
            self._folder = Path(folder)
            self._run_all()
            if self._ci:
                self._run_failed_again()
        return self.results

    def _run_all(self) -> None:
        preparing = threading.Thread(target=self._prepare_all)
        preparing.start()
        try:
            with self._changed:
                while self._pending or self._running:
                    while job := next((job for job in self._pending if self._may_start(job.command)), None):
                        self._pending.remove(job)
                        self._running.append(job)
                        threading.Thread(target=self._run, args=(job,)).start()
                    self._changed.wait()
        except KeyboardInterrupt:
            self._pending.clear()
            raise
        preparing.join()

    def _may_start(self, command: Command) -> bool:
        """Return whether its needs are prepared and a share of the CPUs is left, or nothing else runs."""
        if not self._is_ready(command):
            return False
        is_building = any(name not in self._prepared for name in self._needed)
        taken = sum(job.command.cores for job in self._running) + BUILD_CORES * is_building
        return not self._running or taken + command.cores <= FULL * self._cores

    def _is_ready(self, command: Command) -> bool:
        return all(name in self._prepared for name in command.needs)

    def _prepare_all(self) -> None:
        """Prepare what the commands need, those with the fewest needs first, and start what may start after each."""
        ending = "did not start"
        try:
            if self._needed:
                ending = f"ended with exit code {self._run_preparation(self._needed)}"
        finally:
            for name in self._needed:
                if name not in self._prepared:
                    self._record(Result(name, State.FAILED, 0, f"the preparation {ending}"))

    def _run_preparation(self, names: Sequence[str]) -> int:
        process = self._start([*self._prepare, *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        progress = threading.Thread(target=self._pass_on, args=(_PREPARATION, process.stderr))
        progress.start()
        for line in process.stdout:
            fields = json.loads(line)
            self._record(Result(**fields | {"state": State(fields["state"])}))
        progress.join()
        return process.wait()

    def _record(self, result: Result) -> None:
        with self._changed:
            self._prepared[result.name] = result
            self._changed.notify_all()

    def _run(self, job: Job) -> None:
        try:
            self._finish(job)
        finally:
            with self._changed:
                self._running.remove(job)
                self._changed.notify_all()

    def _finish(self, job: Job) -> None:
        name, command = job.layer.layer, job.command
        missing = next((r for n in command.needs if (r := self._prepared[n]).state is not State.READY), None)
        if missing is not None and (self._ci or missing.state is State.FAILED):
            result = CommandResult(0, (), problem=f"{missing.name} is not prepared: {missing.reason}")
        elif missing is not None and not command.is_pytest:
            test = Case(_title(command), Outcome.SKIPPED, 0, reason=missing.reason)
            result = CommandResult(0, (test,), missing=missing.reason)
        else:
            try:
                result = self._run_command(job, missing.reason if missing else "")
            except Exception as error:  # else a command that did not run would count as one without failures
                result = CommandResult(0, (), problem=f"{type(error).__name__}: {error}")
        job.layer.commands.append(result)
        self._ended.append((job, result))
        ending = result.problem or f"finished after {result.seconds:.0f} s"
        self._say(name, f"{_title(command)}: {ending}")

    def _run_command(self, job: Job, missing: str) -> CommandResult:
        """Run one command. If ``missing`` is set, pytest runs all the same: tests that need it skip themselves."""
        begin = time.monotonic()
        command, folder = job.command, self._folder / job.folder
        report = folder / "junit.xml"
        report.unlink(missing_ok=True)
        try:
            words = _words(command, folder, report)
        except ToolchainError as error:
            return CommandResult(0, (), problem=str(error).splitlines()[0])
        process = self._start(words, **({} if self._raw else _PIPED))
        if process.stdout is not None:
            self._pass_on(job.layer.layer, process.stdout)
        code, cpu_seconds = _end_of(process)
        seconds = time.monotonic() - begin
        if command.is_pytest:
            return _pytest_result(report, code, seconds, cpu_seconds, missing)
        outcome = Outcome.PASSED if code == 0 else Outcome.FAILED
        return CommandResult(seconds, (Case(_title(command), outcome, seconds),), cpu_seconds)

    def _run_failed_again(self) -> None:
        """Run the failed tests of each command again, when nothing else runs. More than ``MOST_AGAIN`` stay failed."""
        if sum(result.count(Outcome.FAILED) for result in self.results) > MOST_AGAIN:
            return
        for job, first in self._ended:
            if job.command.is_pytest and not first.problem and first.has_failed:
                words = (*job.command.words, "--last-failed", "--last-failed-no-failures=none")
                again = self._run_command(replace(job, command=replace(job.command, words=words)), first.missing)
                job.layer.commands[job.layer.commands.index(first)] = first.followed_by(again)

    def _start(
        self, words: Sequence[str], *, stdout: int | None = None, stderr: int | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent,  # noqa: PLW1509 - a single system call
        )

    def _pass_on(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            self._say(name, line)

    def _say(self, name: str, line: str) -> None:
        with self._printing:
            print(line.rstrip() if self._raw else f"{name:<10} | {line.rstrip()}", flush=True)


def _title(command: Command) -> str:
    """Return the command without the interpreter, for output."""
    words = [word.strip("{}") for word in command.words]
    if words[:2] == [sys.executable, "-m"]:
        return " ".join(words[2:])
    return " ".join([Path(words[0]).name, *words[1:]])


def _words(command: Command, folder: Path, report: Path) -> list[str]:
    """Return the words of a command with the paths of its programs and, for pytest, the options for its files."""
    words = [str(binary(word[1:-1])) if word.startswith("{") else word for word in command.words]
    files = (f"--junitxml={report}", "--override-ini=junit_family=xunit1", f"--override-ini=cache_dir={folder}/cache")
    return [*words, *files] if command.is_pytest else words


def _end_of(process: subprocess.Popen[str]) -> tuple[int, float]:
    """Wait until a process ends. Return its exit code, and the CPU seconds of it and its descendants."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime


def _pytest_result(report: Path, code: int, seconds: float, cpu_seconds: float, missing: str) -> CommandResult:
    """Return what pytest reported. A run that ended without a report, or without tests, is a problem."""
    if not report.exists():
        problem = f"pytest ended with exit code {code} before it wrote its report"
        return CommandResult(seconds, (), cpu_seconds, problem)
    tests = read_junit(report)
    expected = (0, 1) if any(test.outcome is Outcome.FAILED for test in tests) else (0,)
    problem = "" if code in expected else f"pytest ended with exit code {code}"
    return CommandResult(seconds, tuple(tests), cpu_seconds, problem, missing)
