"""What follows from replicas that diverged, with ``--on-divergence restart``: back to a save at which all ranks agreed.

Node 0 sets aside the checkpoints that were saved since, as ``*.diverged``. If the machine of one rank may be the cause,
the launcher of its node then ends its ranks with the failure, so that the operator suspects that node; else node 0's
does. Nothing is ended if no save from before is left, because the training would begin again from nothing.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ddprun.checkpoint_files import all_manifests, checkpoint_file, set_aside
from ddprun.errors import ReplicasDiverged
from ddprun.files import Json
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import Peers
from ddprun.launcher.processes import launcher_line, run_with_timeout
from ddprun.launcher.rank_table import NodeRanks
from ddprun.reporting import termination
from ddprun.reporting.termination import Report
from ddprun.settings import Settings

SUFFIX = "diverged"
_VOLUME = 5.0  # seconds for the volume to rename the files
_AGAIN = 10.0  # seconds between attempts: to reach the volume, and to tell the other node


class DivergenceWatch:
    """One node's part in one life.

    Attributes:
        is_suspect: the machine of a rank of this node may be the cause.
    """

    def __init__(self, settings: Settings, table: NodeRanks, progress: NodeProgress, peers: Peers) -> None:
        self._restarts = settings.on_divergence == "restart"
        self._base = os.environ.get("DDPJOB_CHECKPOINT_DIR") or settings.checkpoint_dir
        self._table, self._progress, self._peers = table, progress, peers
        self._began = time.time()
        self._agreed: float | None = None  # since then saves do not count; None before it is decided to go back
        self._next, self._has_refused = 0.0, False
        self.is_suspect = False
        peers.diverged = None  # of the life before

    def turn(self) -> Report | None:
        """Return the failure with which this node's ranks are to end; None for none."""
        if (told := self._peers.diverged) is not None:
            self.is_suspect, self._peers.diverged = True, None
            return _report(told)
        shown, verdict = self._progress.diverged, self._table.diverged
        if not self._restarts or shown is None or verdict is None or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _AGAIN
        if not self._goes_back(verdict.step):
            return None
        suspect = verdict.suspect
        found = {"step": shown["step"], "rank": suspect, "message": shown["message"]}
        if suspect is not None and shown["node"] != self._peers.node:
            self._peers.tell_diverged(shown["node"], found)
            return None
        self.is_suspect = suspect is not None
        return _report(found)

    def finish(self) -> None:
        """Set aside what was saved until rank 0 has ended."""
        if self._agreed is not None:
            self._set_aside()

    def _goes_back(self, step: int) -> bool:
        agreed = self._table.agreed_time
        self._agreed = self._began if agreed is None else time.time() - (time.monotonic() - agreed)
        found = self._set_aside()
        if found is None:
            launcher_line(
                "warning: the volume of the checkpoints does not answer, so the training is not restarted yet"
            )
        elif not found["isLeft"]:
            if not self._has_refused:
                launcher_line(f"warning: no checkpoint from before step {step} is left, so the training goes on")
            self._has_refused = True
        if found is None or not found["isLeft"]:
            self._agreed = None
            return False
        return True

    def _set_aside(self) -> Json | None:
        """Set aside the saves of this life since the ranks agreed; None if the volume did not answer."""
        saved, since = self._progress.snapshot().get("checkpoint") or {}, self._agreed or 0.0
        root = _root_of(self._base, saved)
        if root is None:  # the script loads what it has saved in its own way
            return {"isLeft": True, "names": []}
        found: Json | None = run_with_timeout(_VOLUME, lambda: go_back(root, saved["run"], since))
        if found and found["names"]:
            what = f"{', '.join(found['names'][:3])}{' and more' if len(found['names']) > 3 else ''}"
            launcher_line(f"checkpoints since the replicas diverged are set aside as *.{SUFFIX}: {what}")
        return found


def _root_of(base: str, saved: Json) -> Path | None:
    """Return the directory of the checkpoint that the ranks have reported; None if it is not of this project's form."""
    match saved:
        case {"path": str(path), "run": int(run), "step": int(step)} if base:
            root = Path(base, path).parent.parent
            return root if checkpoint_file(root, run, step) == Path(base, path) else None
    return None


def go_back(root: Path, run: int, since: float) -> Json:
    """Set aside the checkpoints of a run that were saved after ``since``, unless no other checkpoint would be left.

    Args:
        since: seconds since 1970, on the clock of the machine that saves.
    Raises:
        OSError: the volume refused.
    """
    later = [path for path in _newest_first(root, run) if _time(path) > since]
    others = any(path not in later for _, _, path in all_manifests(root))
    for path in later if others else ():
        set_aside(path, SUFFIX)
    return {"isLeft": others or not later, "names": [path.stem for path in later] if others else []}


def _newest_first(root: Path, run: int) -> Iterator[Path]:
    return (path for number, _, path in all_manifests(root) if number == run)


def _time(manifest: Path) -> float:
    """Return when a checkpoint was saved; 0 if it is not known, and of a damaged one, which a start sets aside."""
    try:
        return float(json.loads(manifest.read_bytes())["time"])
    except (ValueError, KeyError, TypeError, FileNotFoundError, RecursionError):
        return 0.0


def _report(found: Json) -> Report:
    error = ReplicasDiverged(str(found["message"]))
    return termination.failure(error, rank=found["rank"], progress={"step": found["step"], "phase": "step"})
