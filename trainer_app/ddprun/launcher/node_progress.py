"""What the launcher answers to ``GET /progress``: the report that rank 0 keeps in shared memory.

The launcher answers also while that rank cannot, because native code holds its GIL or it is being restarted.
"""

from ddprun.diagnostics import Diagnostics
from ddprun.files import Json
from ddprun.reporting.progress import Progress, shared_snapshot


class NodeProgress:
    """Rank 0's report, through all restarts of the ranks.

    Attributes:
        stall: what is reported of a stall that lasts; else None.
    """

    def __init__(self, world_size: int) -> None:
        self._none = Progress(world_size, "")
        self._rank_zero: Diagnostics | None = None
        self._earlier, self._earlier_seq = "", 0  # of the ranks before a restart
        self.stall: Json | None = None

    def follow(self, rank_zero: Diagnostics) -> None:
        """Answer with the report of this rank 0 from now on, as soon as it has completed a step."""
        self._rank_zero = rank_zero

    def keep(self) -> None:
        """Keep the report: rank 0 has ended, and its memory is about to be closed."""
        if self._rank_zero and (text := self._rank_zero.last_progress()):
            self._earlier_seq = self.snapshot()["seq"]
            last = shared_snapshot(text)
            self._earlier = text if last and (last["step"] or not self._earlier) else self._earlier
        self._rank_zero = None

    def snapshot(self) -> Json:
        """Return the report."""
        now = shared_snapshot(self._rank_zero.last_progress()) if self._rank_zero else None
        shown = now or self._none.snapshot()
        if earlier := shared_snapshot(self._earlier):
            seq = self._earlier_seq + (now["seq"] if now else 0)
            shown = earlier | {"phase": shown["phase"]} if not shown["step"] else shown
            shown |= {"seq": seq}
        return shown | {"stall": self.stall}
