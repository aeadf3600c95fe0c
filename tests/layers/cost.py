"""A pytest plugin that adds each test's CPU time to the JUnit report: `-p tests.layers.cost`.

The CPU time of a test is what this process and all its descendants used between the begin of its set-up and the end of
its tear-down; a fixture of the session counts for the first test that uses it. A process that outlives its parent is
adopted by init, and the rest of its time is not seen.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key

CPU_SECONDS = "cpuSeconds"
"""The property of a test in the report."""
DAEMON_SECONDS = "daemonCpuSeconds"
"""The property of the whole report: the CPU seconds of the programs of ``also_count``."""

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_begin = pytest.StashKey[float]()
_daemons: dict[int, float] = {}


def also_count(pid: int, *, from_now: bool) -> None:
    """Count a program that works for the tests and is no descendant of this process, such as a node of a cluster.

    from_now: what it and its descendants used until now does not count.
    """
    _daemons[pid] = _of_tree(pid) if from_now else 0.0


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process, of its descendants and of what ``also_count`` added."""
    ended = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return ended + sum(map(_of_tree, _children("self"))) + daemon_seconds()


def daemon_seconds() -> float:
    """Return the CPU seconds of what ``also_count`` added."""
    return sum(max(0.0, _of_tree(pid) - before) for pid, before in _daemons.items())


def _of_tree(pid: int) -> float:
    """Return the CPU seconds of a process, its living descendants and their ended children; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) * _TICK + sum(map(_of_tree, _children(pid)))


def _children(pid: int | str) -> Iterator[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # the process ended
        return
    for thread in threads:
        try:
            yield from map(int, (thread / "children").read_text().split())
        except OSError:  # the thread ended
            continue


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    item.stash[_begin] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        used = max(0.0, cpu_seconds() - item.stash[_begin])
        report.user_properties.append((CPU_SECONDS, round(used, 3)))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    report = session.config.stash.get(xml_key, None)
    if report is not None:
        report.add_global_property(DAEMON_SECONDS, round(daemon_seconds(), 3))
