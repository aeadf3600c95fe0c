"""A folder with checkpoints: which attempt reads and writes it, and when."""

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
        self._order: list[tuple[str, int]] = []

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
        return bool(self._order) and self._rank(writer) < max(map(self._rank_of, self._order))

    def newer(self, access: Access) -> Access | None:
        """Return the first access of a newer attempt before this one, or None."""
        rank = self._rank(access.writer)
        earlier = (each for each in self.log if each.time < access.time)
        return next((each for each in earlier if self._rank(each.writer) > rank), None)

    def _enter(self, writer: Writer) -> None:
        if writer.group not in self._order:
            self._order.append(writer.group)

    def _rank(self, writer: Writer) -> tuple[int, int]:
        return self._rank_of(writer.group)

    def _rank_of(self, group: tuple[str, int]) -> tuple[int, int]:
        """Order jobs by their first use of the folder, and the attempts of each by their number."""
        jobs = list(dict.fromkeys(job for job, _ in self._order))
        return (jobs.index(group[0]) if group[0] in jobs else len(jobs)), group[1]
