"""The progress report: the answer to ``GET /progress``.

It changes only after completed work, never by a timer, so that a trainer without progress shows none. ``worker``
creates it and sets its phases, ``MetricsLogger`` updates it, and the operator polls it. A rank keeps a copy in
memory that it shares with its launcher, which answers the polls.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddprun.files import Json, finite, with_named_loss
from ddprun.heartbeat import RETURNED, HeartbeatRecord
from ddprun.reporting.http_port import ProgressPort
from ddprun.shared_text import SharedText

SCHEMA = 3  # the number of the termination report's
_RATE_SECONDS = 10.0
_AT_EACH_STEP = {"step", "stepsPerSecond"}  # the values that each step changes
_encode = json.JSONEncoder(default=str).encode
_AT_FIRST: Json = {
    "phase": "start", "epoch": 0, "totalEpochs": None, "step": 0, "totalSteps": None, "loss": None,
    "lossStep": None, "samplesPerSecond": None, "stepsPerSecond": None, "worldSize": None, "checkpoint": None,
    "checkpointProblem": None, "resumedFrom": None, "savingSeconds": 0.0, "fenced": False,
}  # fmt: skip
LATER_FACTS = {"slow", "diverged", "agreedStep", "agreedCheckpoint", "lossStep"}
"""Those of ``FACTS`` that scripts of earlier releases may use for results: such a result is in no report."""
FACTS = {
    *_AT_FIRST, *LATER_FACTS, "schema", "seq", "ageSeconds", "changed", "isCounted", "percent", "etaSeconds",
    "stall", "pause",
}  # fmt: skip
"""Names in a report that no value of a program may have."""


@dataclass
class StepRate:
    """Steps per second: over the last 10 to 20 seconds, or between the last two steps if they took longer.

    older, newer: when a step was completed, its number, and the seconds that its rank had waited for data until then.
    wait: the seconds of such waiting for each step, over the same time.
    """

    older: tuple[float, int, float] | None = None
    newer: tuple[float, int, float] = (0.0, 0, 0.0)
    wait: float = 0.0

    def after(self, step: int, now: float, waited: float = 0.0) -> float | None:
        """Return the rate when this step has been completed; None after the first one."""
        if self.older is None or step < self.newer[1]:
            self.older = self.newer = (now, step, waited)
            return None
        if now - self.newer[0] >= _RATE_SECONDS:
            self.older, self.newer = self.newer, (now, step, waited)
        seconds, steps = now - self.older[0], step - self.older[1]
        self.wait = (waited - self.older[2]) / steps if steps else 0.0
        return float(f"{steps / seconds:.4g}") if seconds > 0 else None


class ProgressRecord:
    """The last completed work; thread-safe.

    Args:
        shared: also written there at each update, for ``shared_snapshot``.
        own: fields with other values at first, or further ones that only the program and its readers know. Of a program
            that is ``fenced``, an older attempt can save no more when a newer one has saved (``checkpoint_files``).
    """

    def __init__(self, world_size: int, shared: SharedText | None = None, *, own: Mapping[str, Any] = {}) -> None:
        self._lock, self._shared = threading.Lock(), shared
        self._seq, self._changed = 0, time.monotonic()
        self._is_counted = False
        self._others = ""  # the values but ``step`` as JSON; empty if one of them has changed
        self._rate = StepRate()
        self._values = _AT_FIRST | {"worldSize": world_size, **own}

    def update(self, *, is_counted: bool = False, **values: Any) -> None:
        """Record completed work and increment ``seq``.

        Args:
            is_counted: the heartbeat has the same number of steps, and may be ahead.
        """
        with self._lock:
            self._continue()
            self._is_counted = is_counted or ("step" not in values and self._is_counted)
            if values.get("loss") is not None:  # later reports keep it, so its step tells one loss from several
                values["lossStep"] = values.get("step", self._values["step"])
            given = finite(with_named_loss(values))
            changed = {name: value for name, value in given.items() if value != self._values.get(name)}
            self._values.update(changed)
            if changed.keys() - _AT_EACH_STEP:
                self._others = ""
            self._seq, self._changed = self._seq + 1, time.monotonic()
            if "step" in values:
                self._values["stepsPerSecond"] = self._rate.after(values["step"], self._changed)
            if self._shared:
                self._shared.write(self._text())

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Add the time of a save, for which the training waits, to ``savingSeconds``; also of a save that fails."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            with self._lock:
                self._continue()
                self._values["savingSeconds"] = round(self._values["savingSeconds"] + seconds, 3)
                self._others = ""

    def _text(self) -> str:
        """Return the report as JSON. A script can make a thousand steps per second, so the rest is encoded before."""
        if not self._others:
            others = {name: value for name, value in self._values.items() if name not in _AT_EACH_STEP}
            self._others = _encode(others)[1:]
        rate = self._values["stepsPerSecond"]
        own = f'"seq": {self._seq}, "changed": {self._changed}, "step": {self._values["step"]:d}'
        own += ', "isCounted": true' if self._is_counted else ""
        return f'{{{own}, "stepsPerSecond": {"null" if rate is None else rate}, {self._others}'

    def _continue(self) -> None:
        """Take over what another process of this rank has reported meanwhile."""
        if self.is_of_another() and self._shared and (text := self._shared.newest()):
            values = json.loads(text)
            self._seq, self._changed = values.pop("seq"), values.pop("changed")
            self._is_counted = values.pop("isCounted", False)
            self._values.update(values)
            self._others = ""

    def is_of_another(self) -> bool:
        """Return whether another process of this rank has reported since this one did last."""
        return self._shared is not None and self._shared.is_of_another()

    def snapshot(self) -> dict[str, Any]:
        """Return the report as a dict; ``ageSeconds`` is the time since the last completed work."""
        with self._lock:
            self._continue()
            return _report(self._seq, self._changed, self._values)

    def serve(self, port: int, host: str | None = None) -> None:
        """Answer ``GET /progress`` from a daemon thread, in a rank without a launcher.

        Raises:
            OSError, OverflowError: the port cannot be bound.
        """
        ProgressPort(port, self.snapshot, host=host).serve_in_thread()


def shared_snapshot(text: str, heartbeat: HeartbeatRecord) -> Json | None:
    """Return the report in a rank's shared text, with its age now; None if the rank has written none.

    Args:
        heartbeat: of the rank, which has quick steps and the end of the script, which the report has not.
    """
    if not text:
        return None
    values = json.loads(text)  # of a process on this machine, so its clock is ours
    seq, changed = values.pop("seq"), values.pop("changed")
    if values.pop("isCounted", False) and heartbeat.step > values["step"]:
        values["step"], changed = heartbeat.step, heartbeat.time
    if heartbeat.phase == RETURNED:
        values["phase"] = RETURNED
    return _report(seq, changed, values)


def _report(seq: int, changed: float, values: Json) -> Json:
    return {"schema": SCHEMA, "seq": seq, "ageSeconds": round(time.monotonic() - changed, 3), **values}
