"""A folder with checkpoints: which attempt reads and writes it, and when."""

from collections.abc import Iterator
from typing import NamedTuple


class Writer(NamedTuple):
    """One attempt of a job, and the pod of it that reads or writes."""

    job: str
    attempt: int
    pod: str

    @property
    def group(self) -> tuple[str, int]:
        return self.job, self.attempt


class Access(NamedTuple):
    """One load or save. ``refused``: a fence kept an older attempt from saving."""

    time: float
    kind: str
    writer: Writer
    step: int
    refused: bool = False


class Volume:
    """The checkpoints of one claim and subPath; of several saves the last one counts, as in a file of one name."""

    def __init__(self) -> None:
        self.log: list[Access] = []
        self.step = 0
        self._jobs: dict[str, int] = {}
        self._newest = (-1, 0)

    def load(self, time: float, writer: Writer) -> int:
        """Return the step of the newest checkpoint; with a fence, older attempts save no more from now on."""
        self._enter(writer)
        self.log.append(Access(time, "load", writer, self.step))
        return self.step

    def save(self, time: float, writer: Writer, step: int, *, fenced: bool) -> bool:
        """Write a checkpoint, and return whether that is done."""
        refused = fenced and self.is_older(writer)
        self._enter(writer)
        self.log.append(Access(time, "save", writer, step, refused))
        if not refused:
            self.step = step
        return not refused

    def is_older(self, writer: Writer) -> bool:
        """Return whether a newer attempt, or a job that came later, has used the folder."""
        return self._rank(writer) < self._newest

    def late_saves(self) -> Iterator[tuple[Access, Access]]:
        """Yield each save of an attempt after a newer one began, with the first access of the newer one."""
        firsts: dict[tuple[str, int], Access] = {}
        for access in self.log:
            rank = self._rank(access.writer)
            newer = next((first for first in firsts.values() if self._rank(first.writer) > rank), None)
            if newer is not None and access.kind == "save" and not access.refused:
                yield access, newer
            firsts.setdefault(access.writer.group, access)

    def _enter(self, writer: Writer) -> None:
        self._newest = max(self._newest, self._rank(writer))

    def _rank(self, writer: Writer) -> tuple[int, int]:
        """Order jobs by their first use of the folder, and the attempts of each by their number."""
        return self._jobs.setdefault(writer.job, len(self._jobs)), writer.attempt
