"""The last word of a rank or a node: the termination message, at most 4,096 bytes of JSON, on success too.

``worker`` builds a rank's report, ``launch`` (or the worker itself, where no launcher is above it) writes the node's
message.
"""

from __future__ import annotations

import fcntl
import os
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.errors import Stopped, TrainerError, classify, exit_code, where
from ddptrain.finite import dumps

MAX_BYTES = 4096
DEFAULT_PATH = "/dev/termination-log"
Report = dict[str, Any]


def failure(error: BaseException, *, rank: int | None, progress: Mapping[str, Any]) -> Report:
    """The report of a rank that ends with ``error``."""
    typed = classify(error)
    text = str(typed) or type(typed).__name__
    if isinstance(typed, TrainerError) and typed.next_step:
        text = f"{text}; next: {typed.next_step}"
    report: Report = {
        "schema": 1,
        "outcome": "failed",
        "code": exit_code(typed),
        "cause": getattr(typed, "cause", "own"),
        "rank": rank,
        "step": progress.get("step"),
        "phase": progress.get("phase"),
        "signal": None,
        "exception": type(typed).__name__,
        "message": text,
        "where": where(error),
        "checkpoint": progress.get("checkpoint"),
    }
    if isinstance(typed, Stopped):
        report |= {"outcome": "stopped", "saved": typed.saved}
    elif not isinstance(typed, TrainerError):
        report["traceback"] = "".join(traceback.format_exception(error))
    return report


def killed(signal_number: int, *, rank: int) -> Report:
    """The report that a rank killed by a signal could not write."""
    name = signal.Signals(signal_number).name
    hint = "; often the kernel's out-of-memory killer" if signal_number == signal.SIGKILL else ""
    return {
        "schema": 1, "outcome": "failed", "code": 128 + signal_number, "cause": "own",
        "rank": rank, "step": None, "phase": None, "signal": signal_number, "exception": None,
        "message": f"rank {rank} was killed by {name}{hint}", "where": None, "checkpoint": None,
    }  # fmt: skip


def encode(report: Mapping[str, Any]) -> bytes:
    """JSON of at most MAX_BYTES: the traceback gives way first, from its oldest frames, then the message."""
    report = dict(report)
    for key in ("traceback", "message"):
        body = dumps(report).encode()
        excess = len(body) - MAX_BYTES
        if excess > 0 and report.get(key):
            # Cut the encoded text: escapes make a character up to six bytes long.
            room = max(0, len(dumps(report[key])) - 2 - excess - 3)
            report[key] = _last(str(report[key]), room) if key == "traceback" else _first(str(report[key]), room)
    return dumps(report).encode()[:MAX_BYTES]


def destination(env: Mapping[str, str] = os.environ) -> Path | None:
    """Where the message goes: DDPJOB_TERMINATION_LOG, else the kubelet's file if this is a container; else nowhere."""
    if env.get("DDPJOB_TERMINATION_LOG"):
        return Path(env["DDPJOB_TERMINATION_LOG"])
    path = Path(DEFAULT_PATH)
    return path if path.is_file() and os.access(path, os.W_OK) else None


def write(report: Mapping[str, Any], path: Path | None, *, shared: bool = False) -> None:
    """Truncate and write in place: the file is a bind mount, which cannot be replaced. Never raises OSError.

    Args:
        shared: several ranks write this file (torchrun); leave an earlier report alone unless it only blames a peer and
            this one does not.
    """
    if path is None:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            earlier = stream.read()
            if shared and earlier and (report.get("cause") == "peer" or b'"cause": "peer"' not in earlier):
                return
            stream.seek(0)
            stream.truncate()
            stream.write(encode(report))
    except OSError as error:
        print(f"warning: cannot write the termination message to {path}: {error}", flush=True)


def _first(text: str, room: int) -> str:
    while text and len(dumps(text)) - 2 > room:
        text = text[: max(0, len(text) - max(1, (len(dumps(text)) - 2 - room) // 6))]
    return text + "..." if room else ""


def _last(text: str, room: int) -> str:
    return _first(text[::-1], room)[::-1]
