"""Probes: what is read for one check, with a time limit of its own, and the pure verdict on it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.client.checkup.check import Check, Part


class UnreadableError(Exception):
    """What a check needs cannot be read; the text says why."""


@dataclass(frozen=True)
class Probe:
    """One check. read: returns what ``judge`` needs, or raises ``UnreadableError`` or ``OSError``.

    what: names what is read, for a check that cannot read it. next_step: what to do then.
    """

    part: Part
    name: str
    what: str
    read: Callable[[], Any]
    judge: Callable[[Any], Check]
    seconds: float = 10.0
    next_step: str = ""


def run(probes: Sequence[Probe]) -> list[Check]:
    """Return the checks in this order. All run at once, and one that hangs delays none for longer than its limit."""
    begun = time.monotonic()
    running = [_Running(probe) for probe in probes]
    return [one.check(begun + one.probe.seconds) for one in running]


class _Running:
    """A probe in a thread of its own, which the end of the program does not wait for."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._made: Check | None = None
        self._thread = threading.Thread(target=self._run, name=f"check-{probe.name}", daemon=True)
        self._thread.start()

    def check(self, end: float) -> Check:
        self._thread.join(max(0.0, end - time.monotonic()))
        return self._made or self._unknown(f"no answer after {self.probe.seconds:g} s")

    def _run(self) -> None:
        try:
            self._made = self.probe.judge(self.probe.read())
        except UnreadableError as error:
            self._made = self._unknown(str(error))
        except Exception as error:  # an object that no API server stores; the other checks go on
            self._made = self._unknown(f"{type(error).__name__}: {error}")

    def _unknown(self, why: str) -> Check:
        return Check(
            part=self.probe.part,
            name=self.probe.name,
            status="unknown",
            summary=" ".join(f"{self.probe.what} could not be read: {why}".split()),
            next=self.probe.next_step or None,
        )
