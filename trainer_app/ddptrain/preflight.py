"""``preflight``: are these ranks, this network and this volume fit for the training that is about to begin?

``worker`` runs it on every rank in place of the training. All ranks come to the same verdict, out of what all of them
told; ``cli`` prints it once.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddptrain import __version__
from ddptrain.config import Config
from ddptrain.data.mnist import Dataset
from ddptrain.distributed import collective_checks as answers
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
from ddptrain.files import unique, write_atomically

MUST_AGREE = ("ddptrain", "torch", "numpy", "python", "config", "seed", "dataDigest", "attempt")
SHOULD_AGREE = ("isa", "threads", "device")
_SKEW = 1.0  # seconds between two nodes' clocks that are worth a word
_PROBE = 4 * 2**20  # bytes


def preflight(config: Config, group: Group, load: Callable[[], Dataset]) -> dict[str, Any]:
    """Run every check; collective. Returns ``{"code", "checks": [...], "bandwidth": [...]}``, the same on all ranks."""
    mine = _facts(config, group, load)
    mine["wrong"] = answers.failed_collectives(group) if group.world_size > 1 else []
    # The clocks are read together: whoever leaves a barrier does so within milliseconds of the others.
    group.sum(torch.zeros(1, device=group.device))
    mine["clock"] = time.time()
    mine["volume"] = _volume(Path(config.checkpoint_dir)) if config.checkpoint_dir and group.rank == 0 else None
    everybody: list[dict[str, Any]] = [mine]
    if group.world_size > 1:
        everybody = [{} for _ in range(group.world_size)]
        with group.heartbeat.waiting_in("all_gather of facts"):
            dist.all_gather_object(everybody, mine)
    checks = [*agreement(everybody), _answers(everybody), _data(everybody), _clocks(everybody), _volumes(everybody)]
    failed = [check["code"] for check in checks if check["verdict"] == "failed"]
    bandwidth = answers.measure_bandwidths(group) if group.world_size > 1 and not failed else []
    return {"code": failed[0] if failed else 0, "worldSize": group.world_size, "checks": checks, "bandwidth": bandwidth}


def _facts(config: Config, group: Group, load: Callable[[], Dataset]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "rank": group.rank, "host": socket.gethostname(), "ddptrain": __version__, "torch": torch.__version__,
        "numpy": np.__version__, "python": platform.python_version(), "config": config.digest(), "seed": config.seed,
        "attempt": os.environ.get("DDPJOB_ATTEMPT"), "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(), "device": _device_name(group.device), "dataDigest": None, "dataError": None,
    }  # fmt: skip
    try:
        facts["dataDigest"] = load().digest
    except (DataError, UsageError, VolumeError) as error:  # told with the rest, so that every rank says whose it is
        facts["dataError"] = str(error)
    return facts


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _volume(folder: Path) -> dict[str, Any]:
    """Write, sync, rename and read back a file: what every checkpoint needs."""
    probe = folder / unique(".probe")
    content = os.urandom(_PROBE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        write_atomically(probe, content)
        taken = time.perf_counter() - started
        whole = probe.read_bytes() == content
        probe.unlink(missing_ok=True)
    except OSError as error:
        return {"path": str(folder), "error": error.strerror or str(error)}
    return {"path": str(folder), "error": None if whole else "what was written reads back otherwise", "seconds": taken}


def agreement(everybody: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One check per fact that all ranks must, or should, share; the ranks that differ from most are named."""
    checks = []
    for name in (*MUST_AGREE, *SHOULD_AGREE):
        asked = [facts for facts in everybody if name != "dataDigest" or not facts["dataError"]]  # ``data`` tells those
        usual, _ = Counter([facts[name] for facts in asked] or [None]).most_common(1)[0]
        odd = [f"rank {facts['rank']} ({facts['host']}) has {facts[name]}" for facts in asked if facts[name] != usual]
        verdict = "ok" if not odd else "failed" if name in MUST_AGREE else "warning"
        shown = str(usual)[:16] if name in ("config", "dataDigest") else str(usual)
        detail = f"{'; '.join(odd[:4])}; the others {usual}" if odd else shown
        kind = DataMismatch if name == "dataDigest" else ConfigMismatch
        checks.append(_check(f"same {name}", verdict, detail, kind))
    return checks


def _answers(everybody: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    wrong = [f"rank {facts['rank']}: {', '.join(facts['wrong'])}" for facts in everybody if facts["wrong"]]
    good = "all right" if len(everybody) > 1 else "one rank: nothing to exchange"
    return _check("collectives", "failed" if wrong else "ok", "; ".join(wrong) or good, RanksError)


def _data(everybody: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    bad = [f"rank {facts['rank']} ({facts['host']}): {facts['dataError']}" for facts in everybody if facts["dataError"]]
    return _check("data", "failed" if bad else "ok", "; ".join(bad[:4]) or "readable on every rank", DataMissing)


def _clocks(everybody: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    clocks = [facts["clock"] for facts in everybody]
    skew = max(clocks) - min(clocks)
    return _check("clocks", "ok" if skew < _SKEW else "warning", f"{skew * 1000:.0f} ms apart at most", ConfigMismatch)


def _volumes(everybody: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    volume = everybody[0]["volume"]
    if volume is None:
        return _check("volume", "warning", "no --checkpoint-dir: nothing would be saved", VolumeError)
    if volume["error"]:
        return _check("volume", "failed", f"cannot write {volume['path']}: {volume['error']}", VolumeError)
    speed = _PROBE / volume["seconds"] / 1e6
    detail = f"{_PROBE // 2**20} MiB written and synced in {volume['seconds'] * 1000:.0f} ms ({speed:.0f} MB/s)"
    return _check("volume", "ok", detail, VolumeError)


def _check(name: str, verdict: str, detail: str, error: type[TrainerError]) -> dict[str, Any]:
    check = {"check": name, "verdict": verdict, "detail": detail, "code": 0, "kind": None}
    return check | {"code": error.code, "kind": error.kind or error.__name__} if verdict == "failed" else check
