"""Rank 0's checkpoints of a training, and how all ranks resume from one. ``checkpoint_files`` defines the files."""

import hashlib
import io
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddprun.checkpoint_files import Checkpoints, Saved, newest_place, owner, set_aside
from ddprun.distributed.process_group import Group
from ddprun.errors import ConfigMismatch, DataCorrupt, VolumeError
from ddptrain.config import Config
from ddptrain.data.mnist import Dataset
from ddptrain.data.sampling import Schedule
from ddptrain.device import numerics
from ddptrain.errors import DataMismatch, WeightsDiffer
from ddptrain.training.metrics import MetricsLogger
from ddptrain.training.optim import Optimizer

# What a training records in the manifest of a checkpoint, beside the fields of ``checkpoint_files``.
_FIELDS: dict[str, Any] = {"config": dict, "dataDigest": str, "evaluation": dict | None, "complete": bool | None}


@dataclass(frozen=True)
class SaveResult:
    """What a save did.

    Attributes:
        checkpoint: run and step of the checkpoint written, or None.
        reason: why none was written; empty if one was.
    """

    checkpoint: dict[str, Any] | None
    reason: str = ""


@dataclass(frozen=True)
class ResumePoint:
    """Where a training starts.

    Attributes:
        checkpoint: run and step of the checkpoint resumed from, or None.
        complete: that checkpoint is the end of the training.
        evaluation: the evaluation recorded in it, if any.
    """

    checkpoint: dict[str, Any] | None
    complete: bool
    evaluation: dict[str, Any] | None

    @property
    def step(self) -> int:
        return self.checkpoint["step"] if self.checkpoint else 0


class Checkpointer:
    """Finds the checkpoint to resume from, claims a run, and saves. Rank 0 alone calls its methods, but for ``resume``.

    Without a checkpoint directory it saves nothing.

    Attributes:
        facts: what every manifest records about this training.
    """

    def __init__(
        self, config: Config, dataset: Dataset, schedule: Schedule, group: Group, *,
        bf16: bool, metrics: MetricsLogger, log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._config, self._group, self._metrics, self._log = config, group, metrics, log
        folder = config.checkpoint_dir
        self._checkpoints = Checkpoints(Path(folder), keep=config.keep) if folder else None
        self.facts: dict[str, Any] = {
            "worldSize": group.world_size,
            "data": dataset.name,
            "dataDigest": dataset.digest,
            "config": config.identity(),
            "totalSteps": schedule.total_steps,
            **numerics(),
            "bf16": bf16,
        }

    def newest(self, load: Callable[[bytes], None]) -> tuple[Saved, bytes] | None:
        """Return the newest intact checkpoint with its content, or None; damaged ones are quarantined.

        Args:
            load: loads a checkpoint's content; one with which that fails is skipped, unless memory or the GPU failed.
        Raises:
            Mismatch: it belongs to another configuration or other data, or ``--sync bitwise`` would give other
                bits here.
            VolumeError: the directory cannot be read.
        """
        if self._checkpoints is None:
            self._log("no --checkpoint-dir: nothing will be saved, and a restart begins at step 0")
            return None
        root = self._checkpoints.root

        def refuse(manifest: Mapping[str, Any], content: bytes) -> str:
            if fault := fault_of(manifest):
                return fault
            check_compatible(manifest, self.facts, root)  # raises: the weights of another training never fit
            if not manifest.get("complete"):  # nothing is loaded of a complete training
                load(content)
            return ""

        found = self._checkpoints.resume(self._log, refuse)
        if found is None:
            return None
        manifest = found[0].manifest
        if not manifest.get("complete"):  # a complete training has nothing left to compute
            changed = numerics_changes(manifest, self.facts)
            if changed and self._config.sync == "bitwise":
                raise ConfigMismatch(
                    f"--sync bitwise cannot continue here with the same bits: {', '.join(changed)}",
                    hint="the last bits of a sum depend on the threads, the kind of processor and the version of torch",
                    next_step="continue where the run began, use its --threads, or start in another --checkpoint-dir",
                )
            if changed or (self._config.sync != "bitwise" and manifest.get("worldSize") != self.facts["worldSize"]):
                self._log(
                    "resuming on another world size, threads, CPU or torch: equal up to rounding, not bit for bit"
                )
        return found

    def claim(self, resumed: Saved | None) -> None:
        """Claim a new run that continues ``resumed``, and open the metrics.

        Raises:
            VolumeError: the directory cannot be written.
        """
        if self._checkpoints is None:
            return
        self._checkpoints.prepare()  # only now: a complete training may be on a volume that is read-only
        number = self._metrics.open(self._checkpoints.root, resumed.place if resumed else None, data=self.facts["data"])
        self._checkpoints.claim(owner(os.environ), reserved=number)

    def resume(self, model: nn.Module, optimizer: Optimizer) -> ResumePoint:
        """Load the newest checkpoint into every rank's model and optimizer; collective.

        Only rank 0 reads files: it broadcasts their content, and claims a run unless the training is complete.

        Raises:
            Mismatch, VolumeError: see ``newest``.
            WeightsDiffer: the ranks do not hold the same weights.
        """
        group, content = self._group, b""
        group.heartbeat.mark("resume", limit=self._config.volume_timeout)
        facts = {"config": self._config.shared(group.device.type), "dataDigest": self.facts["dataDigest"]}

        def load(content: bytes) -> None:
            loaded = torch.load(io.BytesIO(content), map_location=group.device, weights_only=True)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])

        def on_rank_zero() -> dict[str, Any]:
            nonlocal content
            found = self.newest(load)
            saved, content = found if found else (None, b"")
            manifest = saved.manifest if saved else {}
            complete = bool(manifest.get("complete"))
            if not complete:
                self.claim(saved)
            point = ResumePoint(saved.place if saved else None, complete, manifest.get("evaluation"))
            return {"point": asdict(point), "sha256": manifest.get("sha256"), "facts": facts}

        from_rank_zero = group.run_on_rank_zero("resume", on_rank_zero, self._config.collective_timeout)
        check_same_as_rank_zero(from_rank_zero["facts"], facts, group.rank)
        start = ResumePoint(**from_rank_zero["point"])
        if start.complete:
            return start
        if start.checkpoint:
            content = group.broadcast_bytes(content)
            if hashlib.sha256(content).hexdigest() != from_rank_zero["sha256"]:
                raise DataCorrupt(
                    f"rank {group.rank} received damaged weights from rank 0",
                    next_step="check the network, start again",
                )
            load(content)
            self._log(f"resumed from run {start.checkpoint['run']}, step {start.step}")
        check_equal_on_all_ranks(model, group)
        return start

    def save(self, step: int, state: Callable[[], dict[str, Any]], evaluation: dict[str, Any] | None) -> SaveResult:
        """Write the metrics rows to disk, then a checkpoint of ``state()``.

        A volume that refuses costs this checkpoint: the older ones remain, and the next save may succeed. Only the
        last save of a training must succeed.

        Raises:
            Superseded: a newer start has claimed a higher run.
            VolumeError: the checkpoint of the last step could not be written.
        """
        began = time.monotonic()
        with self._metrics.saving():
            result = self._save(step, state, evaluation)
        if result.checkpoint is not None:
            self._metrics.log("save", step, seconds=round(time.monotonic() - began, 3))
            self._metrics.checkpoint_saved(result.checkpoint)
        return result

    def _save(self, step: int, state: Callable[[], dict[str, Any]], evaluation: dict[str, Any] | None) -> SaveResult:
        last = step == self.facts["totalSteps"]
        try:
            self._group.heartbeat.mark("save", limit=self._config.volume_timeout)
            flushed = self._metrics.flush()  # rows reach the disk before the checkpoint that makes them final
            if self._checkpoints is None:
                return SaveResult(None, "no --checkpoint-dir")
            if not flushed and not last:
                return SaveResult(None, "the volume refused")
            values, content = state(), io.BytesIO()
            if not all(bool(value.isfinite().all()) for value in values["model"].values()):
                # The next loss will not be finite either, and end the training.
                return SaveResult(None, "the weights are not finite")
            torch.save(values, content)
            facts = {**self.facts, "evaluation": evaluation, "complete": last, "time": time.time()}
            saved = self._checkpoints.save(step, content.getbuffer(), facts, required=last)
        except VolumeError as error:
            if last:
                raise
            self._metrics.volume_refused(error)
            return SaveResult(None, "the volume refused")
        return SaveResult(saved.place)

    def set_aside(self, step: int) -> bool:
        """Rename the newest checkpoint to ``*.not-finite`` if it is that of ``step``, whose weights gave such a loss.

        Returns:
            Whether it was renamed. Later starts and ``eval`` then take the one before it.
        """
        checkpoints = self._checkpoints
        if checkpoints is None or checkpoints.last is None or checkpoints.last.step != step:
            return False
        try:
            set_aside(checkpoints.last.path.with_suffix(".json"), "not-finite")
        except OSError as error:
            self._log(f"warning: {checkpoints.last.path} cannot be renamed: {error.strerror}")
            return False
        self._metrics.checkpoint_saved(newest_place(checkpoints.root))
        return True


def check_compatible(manifest: Mapping[str, Any], facts: Mapping[str, Any], root: Path) -> None:
    """Refuse to resume from the checkpoint of another training.

    Raises:
        ConfigMismatch: with the settings that differ. DataMismatch: the data differ.
    """
    if differ := _differences(Config.identity_of(manifest), facts["config"]):
        raise ConfigMismatch(
            f"the checkpoints in {root} belong to another configuration: {differ}",
            hint="resuming would mix two trainings",
            next_step="use the old settings, or a new --checkpoint-dir",
        )
    if manifest["dataDigest"] != facts["dataDigest"]:
        raise DataMismatch(
            f"the checkpoints in {root} were trained on other data: {manifest['dataDigest'][:16]}…, "
            f"now {facts['dataDigest'][:16]}…",
            hint="another volume is mounted as data directory",
            next_step="mount the old data, or use a new --checkpoint-dir",
        )


def check_same_as_rank_zero(theirs: Mapping[str, Any], facts: Mapping[str, Any], rank: int) -> None:
    """Refuse to train with settings or data that differ from rank 0's; the weights would drift apart without an error.

    Raises:
        ConfigMismatch: with everything that differs. DataMismatch: only the data differ.
    """
    differ = _differences(theirs["config"], facts["config"])
    error = ConfigMismatch if differ else DataMismatch
    if theirs["dataDigest"] != facts["dataDigest"]:
        data = f"data {theirs['dataDigest'][:16]}… → {facts['dataDigest'][:16]}…"
        differ = f"{differ}, {data}" if differ else data
    if differ:
        raise error(
            f"rank {rank} has different settings from rank 0: {differ}",
            hint="a flag, a variable or the data volume of its node differs",
            next_step="start every node with the same settings",
        )


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return what differs, as in ``lr 0.006 → 0.5``; empty if nothing does."""
    return ", ".join(f"{k} {theirs.get(k)!r} → {v!r}" for k, v in ours.items() if theirs.get(k) != v)


def numerics_changes(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ from those of the manifest."""
    changed = [key for key in (*numerics(), "bf16") if manifest.get(key) != facts.get(key)]
    return [f"{key} was {manifest.get(key)}, is {facts.get(key)}" for key in changed]


def fault_of(manifest: Mapping[str, Any]) -> str:
    """Return why no training of ddptrain has written the manifest; empty if one has."""
    if wrong := [name for name, kind in _FIELDS.items() if not isinstance(manifest.get(name), kind)]:
        return f"its manifest has no valid {', '.join(wrong)}"
    results = manifest.get("evaluation") or {}
    if manifest.get("complete") and not all(type(results.get(name)) in (int, float) for name in ("accuracy", "loss")):
        return "it is complete, but its manifest has no evaluation"
    return ""


def digest_of_weights(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values; the memory format does not matter."""
    sha = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        sha.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        sha.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return sha.hexdigest()


def check_equal_on_all_ranks(model: nn.Module, group: Group) -> None:
    """Compare the weights of all ranks by digest, which DDP never does; collective.

    Raises:
        WeightsDiffer: with the ranks whose weights differ from rank 0's.
    """
    if group.world_size == 1:
        return
    digests = group.gather(digest_of_weights(model.state_dict()), "all_gather of digests")
    different = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if different:
        raise WeightsDiffer(
            f"rank(s) {', '.join(map(str, different))} have different initial weights from rank 0",
            hint="their node has another version of ddptrain or torch, or another --seed",
            next_step="use the same image and flags on every node",
        )
