"""The verb ``preflight``: check ranks, network, data and volume before a training.

``worker`` runs it on every rank in place of the training. All ranks compute the same result; ``cli`` prints it once.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ddptrain import __version__
from ddptrain.config import Config, digest_of
from ddptrain.data.mnist import Dataset
from ddptrain.distributed.collective_checks import failed_collectives, measure_bandwidths
from ddptrain.distributed.process_group import Group
from ddptrain.errors import (
    ConfigMismatch,
    DataError,
    DataMismatch,
    DataMissing,
    RanksError,
    TrainerError,
    UsageError,
    VolumeError,
)
from ddptrain.files import Json, unique, write_atomically
from ddptrain.reporting import termination
from ddptrain.reporting.termination import Ending

MUST_AGREE = ("ddptrain", "torch", "numpy", "python", "config", "seed", "dataDigest", "attempt")
SHOULD_AGREE = ("isa", "threads", "device")
_MAX_SKEW = 1.0  # seconds between two nodes' clocks without a warning
_PROBE_SIZE = 4 * 2**20  # bytes


def preflight(config: Config, group: Group, load: Callable[[], Dataset]) -> Json:
    """Run every check; collective. Return ``{"code", "worldSize", "checks", "bandwidth"}``, the same on all ranks."""
    mine = _facts(config, group, load)
    mine["wrong"] = failed_collectives(group) if group.world_size > 1 else []
    group.sum(torch.zeros(1, device=group.device))  # all ranks leave it within milliseconds, and read their clocks
    mine["clock"] = time.time()
    mine["volume"] = _volume(Path(config.checkpoint_dir)) if config.checkpoint_dir and group.rank == 0 else None
    ranks = group.gather(mine, "all_gather of facts")
    checks = [*check_agreement(ranks), _collectives(ranks), _data(ranks), _clocks(ranks), _volumes(ranks)]
    failed = [check["code"] for check in checks if check["verdict"] == "failed"]
    bandwidth = measure_bandwidths(group) if group.world_size > 1 and not failed else []
    return {"code": failed[0] if failed else 0, "worldSize": group.world_size, "checks": checks, "bandwidth": bandwidth}


def ending_of(found: Json, *, rank: int) -> Ending:
    """Return how a rank ends whose ``preflight`` gave ``found``, which rank 0 passes on."""
    result = found if rank == 0 else None
    bad = [check for check in found["checks"] if check["verdict"] == "failed"]
    if not bad:
        return Ending(termination.done("ready to train", rank=rank), result)
    message = "; ".join(f"{check['check']}: {check['detail']}" for check in bad)
    place = {"phase": "preflight"}
    return Ending(termination.failed(found["code"], bad[0]["kind"], message, rank=rank, progress=place), result)


def _facts(config: Config, group: Group, load: Callable[[], Dataset]) -> Json:
    device = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "cpu"
    settings = digest_of(config.shared(group.device.type))
    facts: Json = {
        "rank": group.rank, "host": socket.gethostname(), "ddptrain": __version__, "torch": torch.__version__,
        "numpy": np.__version__, "python": platform.python_version(), "config": settings, "seed": config.seed,
        "attempt": os.environ.get("DDPJOB_ATTEMPT"), "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(), "device": device, "dataDigest": None, "dataError": None,
    }  # fmt: skip
    try:
        facts["dataDigest"] = load().digest
    except (DataError, UsageError, VolumeError) as error:  # a fact like the others, so that the result names the rank
        facts["dataError"] = str(error)
    return facts


def _volume(folder: Path) -> Json:
    """Write, sync, rename and read back a file, as a checkpoint is."""
    probe = folder / unique(".probe")
    content = os.urandom(_PROBE_SIZE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        write_atomically(probe, content)
        seconds = time.perf_counter() - started
        intact = probe.read_bytes() == content
        probe.unlink(missing_ok=True)
    except OSError as error:
        return {"path": str(folder), "error": error.strerror or str(error)}
    return {"path": str(folder), "error": None if intact else "a file reads back damaged", "seconds": seconds}


def check_agreement(ranks: Sequence[Json]) -> list[Json]:
    """Return one check per fact that should be the same on all ranks; it names the ranks that differ from most."""
    checks = []
    for name in (*MUST_AGREE, *SHOULD_AGREE):
        compared = [facts for facts in ranks if name != "dataDigest" or not facts["dataError"]]  # see ``_data``
        usual, _ = Counter([facts[name] for facts in compared] or [None]).most_common(1)[0]
        odd = [
            f"rank {facts['rank']} ({facts['host']}) has {facts[name]}" for facts in compared if facts[name] != usual
        ]
        if usual is None and not odd:
            continue  # such as the attempt, which only the operator numbers
        verdict = "ok" if not odd else "failed" if name in MUST_AGREE else "warning"
        shown = str(usual)[:16] if name in ("config", "dataDigest") else str(usual)
        detail = f"{'; '.join(odd[:4])}; the others {usual}" if odd else shown
        error = DataMismatch if name == "dataDigest" else ConfigMismatch
        checks.append(_check(f"same {name}", verdict, detail, error))
    return checks


def _collectives(ranks: Sequence[Json]) -> Json:
    wrong = [f"rank {facts['rank']}: {', '.join(facts['wrong'])}" for facts in ranks if facts["wrong"]]
    good = "all results correct" if len(ranks) > 1 else "one rank: nothing to exchange"
    return _check("collectives", "failed" if wrong else "ok", "; ".join(wrong) or good, RanksError)


def _data(ranks: Sequence[Json]) -> Json:
    bad = [f"rank {facts['rank']} ({facts['host']}): {facts['dataError']}" for facts in ranks if facts["dataError"]]
    return _check("data", "failed" if bad else "ok", "; ".join(bad[:4]) or "readable on every rank", DataMissing)


def _clocks(ranks: Sequence[Json]) -> Json:
    clocks = [facts["clock"] for facts in ranks]
    skew = max(clocks) - min(clocks)
    verdict = "ok" if skew < _MAX_SKEW else "warning"
    return _check("clocks", verdict, f"at most {skew * 1000:.0f} ms apart", ConfigMismatch)


def _volumes(ranks: Sequence[Json]) -> Json:
    volume = ranks[0]["volume"]
    if volume is None:
        return _check("volume", "warning", "no --checkpoint-dir: nothing would be saved", VolumeError)
    if volume["error"]:
        return _check("volume", "failed", f"cannot write {volume['path']}: {volume['error']}", VolumeError)
    speed = _PROBE_SIZE / volume["seconds"] / 1e6
    detail = f"wrote and synced {_PROBE_SIZE // 2**20} MiB in {volume['seconds'] * 1000:.0f} ms ({speed:.0f} MB/s)"
    return _check("volume", "ok", detail, VolumeError)


def _check(name: str, verdict: str, detail: str, error: type[TrainerError]) -> Json:
    check = {"check": name, "verdict": verdict, "detail": detail, "code": 0, "kind": None}
    return check | {"code": error.code, "kind": error.kind} if verdict == "failed" else check
