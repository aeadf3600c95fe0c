"""What follows from replicas that diverged, with ``--on-divergence restart``: back to a save at which all ranks agreed.

Node 0 sets aside the checkpoints that this life has saved since, as ``*.diverged``. If the machine of one rank may be
the cause, the launcher of its node then ends its ranks with the failure, so that the operator suspects that node; else
node 0's does. If all saves of the training are from after, none is set aside, and nothing is ended.

Which saves are from before follows from one clock, the monotonic one of node 0: a save counts if its report was seen
before the last comparison in which all ranks agreed. Times in files are of the machines of other attempts, too.
"""

import collections
import time
from pathlib import Path
from typing import NamedTuple

from ddprun.checkpoint_files import all_manifests, claimed_runs, manifests, set_aside
from ddprun.errors import ReplicasDiverged
from ddprun.files import Json
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import Peers
from ddprun.launcher.processes import launcher_line, run_with_timeout
from ddprun.launcher.rank_table import NodeRanks
from ddprun.launcher.replicas import Diverged
from ddprun.reporting import termination
from ddprun.reporting.termination import Report
from ddprun.settings import Settings

SUFFIX = "diverged"
_VOLUME = 5.0  # seconds for the volume to rename the files
_LOOK = 1.0  # seconds between looks at the saves and the verdict
_AGAIN = 10.0  # seconds until the volume is tried again, and for the other node to end its ranks
_SEEN = 256
_SET_BACK = 1.0  # seconds that a clock may be set back while a life begins


class DivergenceWatch:
    """One node's part in one life.

    Attributes:
        is_suspect: the machine of a rank of this node may be the cause.
    """

    def __init__(
        self, settings: Settings, table: NodeRanks, progress: NodeProgress, peers: Peers, *, life: int
    ) -> None:
        self._restarts, self._root = settings.on_divergence == "restart", Path(settings.checkpoint_dir or ".")
        self._table, self._progress, self._peers, self._life = table, progress, peers, life
        self._began, self._next = time.time(), 0.0
        # Saves that are not known yet to be from before; without comparisons they stay so.
        self._seen = collections.deque[tuple[float, Json]](maxlen=_SEEN)
        self._last = self._first = progress.snapshot().get("checkpoint")  # that was seen; first of the life before
        self._good: Json | None = None  # the last that was seen while all ranks agreed
        self._is_refused = False
        self._decided: Json | None = None  # the failure of another node, which it was told
        self.is_suspect = False
        peers.diverged = None  # of the life before

    def turn(self) -> Report | None:
        """Return the failure with which this node's ranks are to end; None for none."""
        if (told := self._peers.diverged) is not None:
            self.is_suspect, self._peers.diverged = True, None
            return _report(told)
        if not self._peers.is_leader or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _LOOK
        self._note_saves()
        return self._decide() if self._restarts else None

    def _decide(self) -> Report | None:
        if self._decided is not None:  # the other node has not ended its ranks
            return _report(self._decided | {"rank": None})
        shown, verdict = self._progress.diverged, self._table.diverged
        if shown is None or verdict is None:
            self._is_refused = False
            return None
        if self._is_refused or not self._goes_back(verdict):
            return None
        found = {"step": shown["step"], "rank": verdict.suspect, "message": shown["message"]}
        if verdict.suspect is None or shown["node"] == 0:
            self.is_suspect = verdict.suspect is not None
            return _report(found)
        if not self._peers.tell_diverged(shown["node"], found):
            return _report(found | {"rank": None})
        self._decided, self._next = found, time.monotonic() + _AGAIN
        return None

    def finish(self) -> None:
        """Set aside what was saved until the ranks have ended without success."""
        differs = self._decided is not None or self._table.diverged is not None
        if self._restarts and self._peers.is_leader and differs and not self._is_refused:
            self._note_saves()
            found = self._set_aside()
            if found is None or found.refused:
                launcher_line("warning: the newest checkpoint may be of ranks that differ: it cannot be set aside")

    def _note_saves(self) -> None:
        now, agreed = self._progress.snapshot(), self._table.agreed_time
        saved, resumed = now.get("checkpoint"), now.get("resumedFrom") or {}
        is_resumed = saved and (saved.get("run"), saved.get("step")) == (resumed.get("run"), resumed.get("step"))
        if saved and saved != self._last and not is_resumed:
            self._last = saved
            self._seen.append((time.monotonic(), saved))
        while self._seen and agreed is not None and self._seen[0][0] <= agreed:
            self._good = self._progress.agreed_checkpoint = self._seen.popleft()[1]

    def _goes_back(self, verdict: Diverged) -> bool:
        found: WentBack | None
        has_saved = self._last != self._first and "run" in (self._last or ())  # in the form of this project
        if has_saved and self._table.agreed_time is None and verdict.agreed is not None:  # not all tensors are compared
            found = WentBack(refused="it is not known which checkpoint is")
        elif (found := self._set_aside()) and has_saved and not found.is_known:
            found = WentBack(refused="the directory of the checkpoints is not known: none is known to be")
        if found is None:
            launcher_line("warning: the volume of the checkpoints refuses or does not answer: no restart yet")
            self._next = time.monotonic() + _AGAIN
        elif found.refused:
            launcher_line(f"warning: {found.refused} from before step {verdict.step}, so the training goes on")
            self._is_refused = True
        return found is not None and not found.refused

    def _set_aside(self) -> "WentBack | None":
        """Set aside the saves of this life since the ranks agreed; None if the volume did not answer."""
        good = self._good
        found: WentBack | None = run_with_timeout(
            _VOLUME, lambda: go_back(self._root, good, life=self._life, since=self._began - _SET_BACK)
        )
        if found and found.names:
            what = f"{', '.join(found.names[:3])}{' and more' if len(found.names) > 3 else ''}"
            launcher_line(f"checkpoints since the replicas diverged are set aside as *.{SUFFIX}: {what}")
        return found


class WentBack(NamedTuple):
    """What was set aside.

    Attributes:
        is_known: the directory of the checkpoints is known.
        names: of the checkpoints that were set aside.
        refused: what is missing, if none was for that; else empty.
    """

    is_known: bool = True
    names: tuple[str, ...] = ()
    refused: str = ""


def go_back(root: Path, good: Json | None, *, life: int, since: float) -> WentBack:
    """Set aside the checkpoints of this life that are newer than ``good``, unless no other would be left.

    Args:
        root: has the checkpoints, or directories with them.
        good: the newest from before, with ``run`` and ``step``; of an earlier run, or None, if this life has none.
        since: the time at which the life began, on this machine's clock.
    Raises:
        OSError: the volume refused.
    """
    claimed = {(folder.resolve(), run) for folder, run in claimed_runs(root, life=life, since=since)}
    if not claimed:  # nothing was saved, or by the script in its own way
        return WentBack(is_known=False)
    if len(claimed) > 1:
        return WentBack(refused="the script saves into several directories: none is known to be")
    [(folder, run)] = claimed
    last = good["step"] if good and good.get("run") == run else -1
    later = [path for step, path in manifests(folder, run) if step > last]
    if later and not any(path not in later for _, _, path in all_manifests(folder)):
        return WentBack(refused="no checkpoint is left (keep more of them)")
    for path in later:
        set_aside(path, SUFFIX)
    return WentBack(names=tuple(path.stem for path in later))


def _report(found: Json) -> Report:
    error = ReplicasDiverged(str(found["message"]))
    return termination.failure(error, rank=found["rank"], progress={"step": found["step"], "phase": "step"})
