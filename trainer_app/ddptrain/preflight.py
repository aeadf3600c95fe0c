"""The verb ``preflight``: check ranks, network, data and volume before a training.

``worker`` runs it on every rank in place of the training. All ranks compute the same result; ``cli`` prints it once.

The bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): ``algbw`` is bytes over time. ``busbw`` is
``algbw`` times the share of the data that each rank must send, which compares with the speed of the network.
"""

import functools
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddprun.distributed.process_group import Group, all_gather_flat
from ddprun.errors import (
    ConfigMismatch,
    DataError,
    DataMissing,
    RanksError,
    TrainerError,
    UsageError,
    VolumeError,
)
from ddprun.files import Json, unique, write_atomically
from ddprun.reporting import termination
from ddprun.reporting.termination import Ending
from ddptrain import __version__
from ddptrain.config import Config, digest_of
from ddptrain.data.mnist import Dataset
from ddptrain.errors import DataMismatch

MUST_AGREE = ("ddptrain", "torch", "numpy", "python", "config", "seed", "dataDigest")
_PROBE_SIZE = 4 * 2**20  # bytes
_SIZES = (2**20, 2**24)  # bytes of a measured collective
_WARM, _ROUNDS = 1, 4  # calls that are not measured, and that are
_MAX = dist.ReduceOp.MAX
reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def preflight(config: Config, group: Group, load: Callable[[], Dataset]) -> Json:
    """Run every check; collective. Return ``{"code", "worldSize", "checks", "bandwidth"}``, the same on all ranks."""
    mine: Json = {
        "rank": group.rank, "host": socket.gethostname(), "ddptrain": __version__, "torch": torch.__version__,
        "numpy": np.__version__, "python": platform.python_version(), "seed": config.seed,
        "config": digest_of(config.shared(group.device.type)), "dataDigest": None, "dataError": None, "volume": None,
    }  # fmt: skip
    try:
        mine["dataDigest"] = load().digest
    except (DataError, UsageError, VolumeError) as error:  # a fact like the others, so that the result names the rank
        mine["dataError"] = str(error)
    mine["wrong"] = failed_collectives(group) if group.world_size > 1 else []
    if group.rank == 0:
        mine["volume"] = _check_volume(config.checkpoint_dir)
    ranks = group.gather(mine, "all_gather of facts")
    checks = [*check_agreement(ranks), *_check_work(ranks), ranks[0]["volume"]]
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


def check_agreement(ranks: Sequence[Json]) -> list[Json]:
    """Return one check per fact that should be the same on all ranks; it names the ranks that differ from most."""
    checks = []
    for name in MUST_AGREE:
        compared = [facts for facts in ranks if name != "dataDigest" or not facts["dataError"]]  # see the check of data
        usual, _ = Counter([facts[name] for facts in compared] or [None]).most_common(1)[0]
        odd = [
            f"rank {facts['rank']} ({facts['host']}) has {facts[name]}" for facts in compared if facts[name] != usual
        ]
        verdict = "failed" if odd else "ok"
        shown = str(usual)[:16] if name in ("config", "dataDigest") else str(usual)
        detail = f"{'; '.join(odd[:4])}; the others {usual}" if odd else shown
        error = DataMismatch if name == "dataDigest" else ConfigMismatch
        checks.append(_check(f"same {name}", verdict, detail, error))
    return checks


def _check_work(ranks: Sequence[Json]) -> list[Json]:
    """Return the checks of collectives and data."""
    wrong = [f"rank {facts['rank']}: {', '.join(facts['wrong'])}" for facts in ranks if facts["wrong"]]
    good = "all results correct" if len(ranks) > 1 else "one rank: nothing to exchange"
    bad = [f"rank {facts['rank']} ({facts['host']}): {facts['dataError']}" for facts in ranks if facts["dataError"]]
    return [
        _check("collectives", "failed" if wrong else "ok", "; ".join(wrong) or good, RanksError),
        _check("data", "failed" if bad else "ok", "; ".join(bad[:4]) or "readable on every rank", DataMissing),
    ]


def _check_volume(checkpoint_dir: str) -> Json:
    """Write, sync, rename and read back a file, as a checkpoint is; return the check."""
    if not checkpoint_dir:
        return _check("volume", "warning", "no --checkpoint-dir: nothing would be saved", VolumeError)
    folder, content = Path(checkpoint_dir), os.urandom(_PROBE_SIZE)
    probe = folder / unique(".probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        write_atomically(probe, content)
        seconds = time.perf_counter() - started
        problem = "" if probe.read_bytes() == content else "a file reads back damaged"
        probe.unlink(missing_ok=True)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        return _check("volume", "failed", f"cannot write {folder}: {problem}", VolumeError)
    speed = f"{seconds * 1000:.0f} ms ({_PROBE_SIZE / seconds / 1e6:.0f} MB/s)"
    return _check("volume", "ok", f"wrote and synced {_PROBE_SIZE // 2**20} MiB in {speed}", VolumeError)


def _check(name: str, verdict: str, detail: str, error: type[TrainerError]) -> Json:
    check = {"check": name, "verdict": verdict, "detail": detail, "code": 0, "kind": None}
    return check | {"code": error.code, "kind": error.kind} if verdict == "failed" else check


def failed_collectives(group: Group) -> list[str]:
    """Return the names of the collectives with a wrong result on this rank. Collective: every rank must call it."""
    rank, world = group.rank, group.world_size
    ours, total = [rank + 1], world * (world + 1) // 2
    # (name, values sent, values expected, call with the tensors received and sent)
    tests: list[tuple[str, Sequence[int], Sequence[int], Callable[[torch.Tensor, torch.Tensor], object]]] = [
        ("all_reduce", ours, [total], lambda received, sent: dist.all_reduce(received.copy_(sent))),
        ("all_reduce max", ours, [world], lambda received, sent: dist.all_reduce(received.copy_(sent), _MAX)),
        ("broadcast", ours, [world], lambda received, sent: dist.broadcast(received.copy_(sent), src=world - 1)),
        ("all_gather", ours, range(1, world + 1), all_gather_flat),
        ("reduce_scatter", range(rank + 1, rank + 1 + world), [total + world * rank], reduce_scatter_flat),
        (
            "all_to_all",
            range(rank * world, (rank + 1) * world),
            range(rank, world * world, world),
            dist.all_to_all_single,
        ),
        ("send and recv", ours, [(rank - 1) % world + 1], functools.partial(_send_and_recv, group)),
    ]
    wrong = []
    for name, values, expected, collective in tests:
        sent = torch.tensor(values, dtype=torch.float32, device=group.device)
        received = torch.zeros(len(expected), device=group.device)
        with group.heartbeat.waiting_in(name):
            collective(received, sent)
            if received.tolist() != list(expected):
                wrong.append(name)
    if group.gather({"rank": rank}, "objects") != [{"rank": peer} for peer in range(world)]:
        wrong.append("objects")
    return wrong


def _send_and_recv(group: Group, received: torch.Tensor, sent: torch.Tensor) -> None:
    """Send to the next rank and receive from the one before."""
    send = dist.P2POp(dist.isend, sent, (group.rank + 1) % group.world_size)
    receive = dist.P2POp(dist.irecv, received, (group.rank - 1) % group.world_size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def measure_bandwidths(group: Group) -> list[dict[str, Any]]:
    """Return one row per collective and size: seconds of the slowest rank, algbw and busbw in GB/s. Collective."""
    world, rows = group.world_size, []
    for size in _SIZES:
        whole = torch.ones(size // 4 // world * world, device=group.device)
        part = torch.ones(len(whole) // world, device=group.device)
        moves: list[tuple[str, float, Callable[..., object], tuple[object, ...]]] = [
            ("all_reduce", 2 * (world - 1) / world, dist.all_reduce, (whole,)),
            ("all_gather", (world - 1) / world, all_gather_flat, (whole, part)),
            ("reduce_scatter", (world - 1) / world, reduce_scatter_flat, (part, whole)),
            ("broadcast", 1.0, dist.broadcast, (whole, 0)),
        ]
        for name, factor, move, arguments in moves:
            with group.heartbeat.waiting_in(f"{name}, {size} bytes"):
                seconds = _seconds(group.device, move, arguments)
            algorithm = whole.numel() * 4 / seconds / 1e9
            rows.append(
                {"collective": name, "bytes": whole.numel() * 4, "seconds": seconds, "algbw": algorithm,
                 "busbw": algorithm * factor}
            )  # fmt: skip
            whole.fill_(1.0)
    return rows


def _seconds(device: torch.device, move: Callable[..., object], arguments: tuple[object, ...]) -> float:
    """Return the seconds per call on the slowest rank."""
    for call in range(_WARM + _ROUNDS):
        if call == _WARM:
            _synchronize(device)
            dist.barrier()
            started = time.perf_counter()
        move(*arguments)
    _synchronize(device)
    taken = torch.tensor([(time.perf_counter() - started) / _ROUNDS], dtype=torch.float64, device=device)
    dist.all_reduce(taken, _MAX)
    return float(taken)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
