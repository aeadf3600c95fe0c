"""What the launcher answers to ``GET /progress``: the report that rank 0 keeps in shared memory.

The launcher answers also while that rank cannot, because native code holds its GIL or it is being restarted. Reports
that its script sends by itself (``trainer_status``) are added.
"""

import time

from ddprun.diagnostics import Diagnostics
from ddprun.files import Json
from ddprun.launcher.trainer_status import ReportedTraining, TrainerStatus
from ddprun.reporting.progress import ProgressRecord, shared_snapshot

_LONG = 600.0  # seconds of steps after which a script that reports no checkpoints has probably saved one


class NodeProgress:
    """Rank 0's report, through all restarts of the ranks.

    Attributes:
        stall: what is reported of a stall that lasts; else None.
        pause: of a pause that is much longer than a step and than those before; else None.
        slow: the rank for which the others wait in each step; else None.
        diverged: which of their parameters differ between the ranks; else None.
        agreed_step: at this step, or later, each of them was found equal; None before all were compared, or if one
            cannot be.
        agreed_checkpoint: the newest that was saved before that; None if none is known to be.
    """

    def __init__(self, world_size: int) -> None:
        self._none = ProgressRecord(world_size)
        self._rank_zero: Diagnostics | None = None
        self._reported, self._reported_at = ReportedTraining(), 0.0
        self._earlier: Json | None = None  # of the ranks before a restart
        self._earlier_changed, self._earlier_seq = 0.0, 0
        self._followed, self._most = 0.0, 0  # since when, and the most steps of the ranks before
        self._saving = 0.0  # seconds of their saves
        self.stall: Json | None = None
        self.pause: Json | None = None
        self.slow: Json | None = None
        self.diverged: Json | None = None
        self.agreed_step: int | None = None
        self.agreed_checkpoint: Json | None = None

    def follow(self, rank_zero: Diagnostics) -> None:
        """Answer with the report of this rank 0 from now on, as soon as it has completed a step."""
        self._rank_zero, self._followed = rank_zero, time.monotonic()

    def take(self, status: TrainerStatus, now: float) -> None:
        """Take a report that the script has sent.

        Args:
            now: seconds since 1970.
        """
        own = self._own()
        reported = self._reported.after(status, own["step"] if own else 0, now)
        if reported is not self._reported:
            self._reported, self._reported_at = reported, time.monotonic()

    def keep(self) -> None:
        """Keep the report: rank 0 has ended, and its memory is about to be closed."""
        if last := self._current():
            self._earlier_seq = self.snapshot()["seq"]
            self._most, self._saving = max(self._most, int(last["step"] or 0)), last["savingSeconds"]
            if last["step"] or self._earlier is None:
                self._earlier, self._earlier_changed = last, time.monotonic() - last["ageSeconds"]
        self._rank_zero, self._reported, self.pause = None, ReportedTraining(), None

    def completed(self, own: Json) -> Json:
        """Return the last report of rank 0 with what its script has sent, and with the saves of the ranks before."""
        shown = self._reported.added_to(own, time.monotonic() - self._reported_at)
        return shown | {"savingSeconds": round(self._saving + (own.get("savingSeconds") or 0.0), 3)}

    def mark(self) -> int | None:
        """Return how far the ranks are, for comparison with earlier starts of theirs; None before the first step.

        A step of a later checkpoint is more than any number of steps that are not saved. The steps of a script that
        reports none begin at 0 in each life, and what it has saved is not known.
        """
        now = self._current()
        if now is None or not now["step"]:
            return None
        saved = (now.get("checkpoint") or {}).get("step")
        if saved is not None:
            return (int(saved) + 1) << 32
        is_long = time.monotonic() - self._followed >= _LONG
        return int(now["step"]) + (self._most if is_long else 0)

    def snapshot(self) -> Json:
        """Return the report."""
        now = self._current()
        shown = now or self._none.snapshot()
        if self._earlier is not None:
            seq = self._earlier_seq + (now["seq"] if now else 0)
            earlier = self._earlier | {"ageSeconds": round(time.monotonic() - self._earlier_changed, 3)}
            shown = earlier | {"phase": shown["phase"]} if not shown["step"] else shown
            shown |= {"seq": seq}
        return shown | {
            "stall": self.stall, "pause": self.pause, "slow": self.slow, "diverged": self.diverged,
            "agreedStep": self.agreed_step, "agreedCheckpoint": self.agreed_checkpoint,
        }  # fmt: skip

    def _own(self) -> Json | None:
        rank = self._rank_zero
        return shared_snapshot(rank.last_progress(), rank.last_heartbeat()) if rank else None

    def _current(self) -> Json | None:
        """Return the report of the ranks that run; None before they have reported anything."""
        own = self._own()
        if own is None and not self._reported.reports:
            return None
        return self.completed(own or self._none.snapshot())
