"""Checkpoints of a script: ``ddprun.checkpoints``. All ranks resume from the same one, which rank 0 has read.

``checkpoint_files`` defines the files, the claims and what is deleted. The state is one object that is equal on all
ranks, as with DistributedDataParallel; sharded state is not supported.
"""

import contextlib
import hashlib
import io
import json
import operator
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ddprun.checkpoint_files import Checkpoints, Saved, owner
from ddprun.distributed.default_group import from_rank_zero, group, rank_and_size
from ddprun.errors import ConfigMismatch, DataCorrupt, PeerLost, VolumeError
from ddprun.files import Json, dumps_json
from ddprun.heartbeat import Heartbeat
from ddprun.script_metrics import ScriptMetrics


class LoadedCheckpoint(NamedTuple):
    """What ``load_newest`` found.

    Attributes:
        step: the number of completed steps that was given to ``save``.
        state: what was given to ``save``.
    """

    step: int
    state: Any


class ScriptCheckpoints:
    """The checkpoints of a training in one directory; made by ``ddprun.checkpoints``.

    Args:
        metrics: of the same directory; its run is that of the checkpoints.
        volume_timeout: seconds that a save may take before it counts as a hang.
        on_saved: called on rank 0 with run, step and path of each checkpoint that is on the volume.
        on_loaded: called on every rank with the step from which it continues.
        timed: measures on rank 0 for how long a save blocks the training.
    """

    def __init__(
        self,
        metrics: ScriptMetrics,
        *,
        keep: int,
        heartbeat: Heartbeat,
        volume_timeout: float,
        on_saved: Callable[[Json], None],
        on_loaded: Callable[[int], None],
        timed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._store, self._metrics = Checkpoints(metrics.folder, keep=keep), metrics
        self._heartbeat, self._limit = heartbeat, volume_timeout
        self._on_saved, self._on_loaded, self._timed = on_saved, on_loaded, timed
        self._runs_code = False  # load_newest may load objects other than tensors

    def save(self, step: int, state: Any) -> None:
        """Save the state after ``step`` completed steps. Every rank calls it; rank 0 writes, until it is on the disk.

        The first save claims a run of the directory: an older attempt of this training can then save no more. A step
        that this process has saved already is not written again.

        Raises:
            ValueError: it is negative, or a later step is saved already, so this one would never be the newest.
            VolumeError: it cannot be written, also after older checkpoints were deleted to make room.
            Superseded: a newer attempt has saved into the directory.
        """
        if rank_and_size()[0]:
            # Until the next step, for which this rank waits while rank 0 writes.
            self._heartbeat.mark("save", limit=self._limit)
            return
        with self._phase("save"), self._timed():
            step, newest = operator.index(step), self._store.last if self._store.run else None
            if step < (newest.step if newest else 0):
                raise ValueError(f"step {step} comes before step {newest.step if newest else 0}, the newest saved")
            if newest is None or step > newest.step:
                began = time.monotonic()
                newest = self._write(step, state)
                self._metrics.log("save", {"step": step, "seconds": round(time.monotonic() - began, 3)})
        self._on_saved(newest.place)

    def _write(self, step: int, state: Any) -> Saved:
        import torch

        content = io.BytesIO()
        torch.save(state, content)
        if not self._store.run:
            if not self._runs_code and (names := _not_only_weights(content)):
                print(f"warning: the checkpoint {_needs_code(names)}", file=sys.stderr, flush=True)
            self._store.prepare()
            self._store.claim(owner(os.environ), reserved=self._metrics.reserve())
        self._metrics.flush()
        facts = {"worldSize": rank_and_size()[1], "torch": str(torch.__version__), "time": time.time()}
        return self._store.save(step, content.getbuffer(), facts, required=True)

    def load_newest(self, *, map_location: Any = "cpu", weights_only: bool = True) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that is intact, the same on all ranks; None if there is none.

        Every rank calls it, after ``init_process_group``; only rank 0 reads the directory. A checkpoint that is
        damaged, cannot be read or cannot be loaded is skipped, and an older one is used.

        Args:
            map_location: the device of the tensors, as of torch.load.
            weights_only: False loads objects other than tensors, numbers, texts and their containers, too; a checkpoint
                can then run code.
        Raises:
            ConfigMismatch: there are checkpoints, and none can be loaded.
            VolumeError: the directory cannot be read.
            RuntimeError: there are several ranks and no process group.
        """
        import torch

        rank, size = rank_and_size()
        if size > 1 and group() is None:
            raise RuntimeError(f"load_newest is for all {size} ranks: call torch.distributed.init_process_group first")
        self._runs_code = not weights_only

        def load(content: Any) -> Any:
            return torch.load(io.BytesIO(content), map_location=map_location, weights_only=weights_only)

        with self._phase("resume"):
            found = self._load_from_rank_zero(load) if rank else self._load_on_rank_zero(load)
        if found:
            self._on_loaded(found.step)
        return found

    def _load_from_rank_zero(self, load: Callable[[Any], Any]) -> LoadedCheckpoint | None:
        with self._heartbeat.waiting_in("broadcast of load_newest"):
            header: Json = json.loads(bytes(from_rank_zero(b"")))
            if "error" in header:
                raise PeerLost(f"rank 0 failed in load_newest: {header['error']}")
            content = from_rank_zero(b"") if header else b""
        if not header:
            return None
        if hashlib.sha256(content).hexdigest() != header["sha256"]:
            raise DataCorrupt("this rank received a damaged checkpoint from rank 0", hint="the network failed")
        return LoadedCheckpoint(header["step"], load(content))

    def _load_on_rank_zero(self, load: Callable[[Any], Any]) -> LoadedCheckpoint | None:
        try:
            found = self._read(load)
        except Exception as error:
            with contextlib.suppress(Exception):  # peers that have ended
                from_rank_zero(dumps_json({"error": str(error)[:500]}).encode())
            raise
        if found is None:
            from_rank_zero(b"{}")
            return None
        saved, content, state = found
        from_rank_zero(dumps_json({"step": saved.step, "sha256": saved.manifest["sha256"]}).encode())
        from_rank_zero(content)
        return LoadedCheckpoint(saved.step, state)

    def _read(self, load: Callable[[Any], Any]) -> tuple[Saved, bytes, Any] | None:
        state: Any = None

        def refuse(_manifest: Mapping[str, Any], content: bytes) -> str:
            nonlocal state
            try:
                state = load(content)
            except pickle.UnpicklingError as error:
                if not self._runs_code and (names := _not_only_weights(io.BytesIO(content))):
                    raise ConfigMismatch(f"the newest checkpoint in {self._store.root} {_needs_code(names)}") from error
                raise
            return ""

        if self._store.root.is_dir():
            try:
                self._store.prepare()
            except VolumeError as error:  # to load it may be enough; a training learns of it before its first save
                print(f"warning: {error}", file=sys.stderr, flush=True)
        found = self._store.resume(lambda line: print(line, flush=True), refuse)
        self._metrics.resumed(found[0].place if found else None)
        return (*found, state) if found else None

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Give the volume its own limit of time, and after it the phase before."""
        before = self._heartbeat.last
        self._heartbeat.mark(name, limit=self._limit)
        yield
        self._heartbeat.mark(before.phase, limit=before.limit)


def _not_only_weights(content: io.BytesIO) -> list[str]:
    """Return the names of the objects for which torch.load needs ``weights_only=False``."""
    import torch

    names = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    with contextlib.suppress(Exception):  # an older version of torch, or no file of torch.save
        content.seek(0)
        return list(names(content)) if names else []
    return []


def _needs_code(names: list[str]) -> str:
    return (
        f"holds {', '.join(sorted(names)[:3])}, which only load_newest(weights_only=False) loads: save state_dict(), "
        "tensors, numbers and texts"
    )
