"""The last word of a rank or a node: the termination message, at most 4,096 bytes of JSON, on success too.

``worker`` builds a rank's report; ``launch``, or ``entry`` where no launcher is above, writes the node's message, and
``cli`` that of a start that it refuses.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain import exit_codes
from ddptrain.errors import Stopped, TrainerError, classify, exit_code, where
from ddptrain.files import dumps

MAX_BYTES = 4096
_SHORT = 120  # bytes; some twenty such fields fit
DEFAULT_PATH = "/dev/termination-log"
Report = dict[str, Any]


def success(
    evaluation: Mapping[str, Any],
    *,
    rank: int,
    before: bool,
    checkpoint: Mapping[str, int] | None,
    resumed_from: Mapping[str, int] | None,
    progress: Mapping[str, Any],
) -> Report:
    """The report of a rank whose training is finished.

    Args:
        before: it was finished before this start.
    """
    what, accuracy = "already finished" if before else "finished", evaluation["accuracy"]
    return {
        "schema": 1, "outcome": "already finished" if before else "succeeded", "code": 0, "rank": rank,
        "message": f"{what}: test accuracy {accuracy:.4f}", "accuracy": accuracy, "loss": evaluation["loss"],
        "checkpoint": checkpoint, "resumedFrom": resumed_from, "progress": progress,
    }  # fmt: skip


def done(message: str, *, rank: int) -> Report:
    """The report of a rank that has done what was asked, and that has no more to tell than ``message``."""
    return {"schema": 1, "outcome": "succeeded", "code": 0, "rank": rank, "message": message}


def preflighted(found: Report, *, rank: int, node: int) -> Report:
    """The report of a rank that has only checked whether a training could begin; ``found`` is the verdict."""
    bad = [f"{check['check']}: {check['detail']}" for check in found["checks"] if check["verdict"] == "failed"]
    return {
        "schema": 1, "outcome": "failed" if bad else "succeeded", "code": found["code"], "cause": "own", "rank": rank,
        "node": node, "message": "; ".join(bad) or "fit for training", "preflight": found,
    }  # fmt: skip


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
    hint = "; often the kernel's out-of-memory killer" if signal_number == signal.SIGKILL else ""
    return {
        "schema": 1, "outcome": "failed", "code": exit_codes.SIGNAL_BASE + signal_number, "cause": "own",
        "rank": rank, "step": None, "phase": None, "signal": signal_number, "exception": None,
        "message": f"rank {rank} was killed by {_named(signal_number)}{hint}", "where": None, "checkpoint": None,
    }  # fmt: skip


def _named(signal_number: int) -> str:
    """``SIGKILL``, or ``signal 35``: most real-time signals have no name."""
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


def encode(report: Mapping[str, Any]) -> bytes:
    """JSON of at most MAX_BYTES: the traceback yields first from its oldest frames, progress next, message last."""
    report = dict(report)
    for key in ("traceback", "progress", "message"):
        excess = len(dumps(report)) - MAX_BYTES
        if excess <= 0:
            break
        if key == "progress":
            report.pop(key, None)
        elif report.get(key):
            room = len(dumps(report[key])) - 2 - excess - 3
            report[key] = _last(str(report[key]), room) if key == "traceback" else _first(str(report[key]), room)
    if len(dumps(report)) > MAX_BYTES:  # a field that should be short is not: the facts that decide anything are
        report = {k: v for k, v in report.items() if v is None or len(dumps(v)) <= _SHORT}
    return dumps(report).encode()


def destination(env: Mapping[str, str] = os.environ) -> Path | None:
    """Where the message goes: DDPJOB_TERMINATION_LOG, else the kubelet's file if this is a container; else nowhere."""
    if env.get("DDPJOB_TERMINATION_LOG"):
        return Path(env["DDPJOB_TERMINATION_LOG"])
    path = Path(DEFAULT_PATH)
    return path if path.is_file() and os.access(path, os.W_OK) else None


def write(
    report: Mapping[str, Any], path: Path | None, *, shared: bool = False, env: Mapping[str, str] = os.environ
) -> None:
    """Truncate and write in place: the file is a bind mount, which cannot be replaced. Never raises OSError.

    Args:
        shared: several ranks write this file (torchrun): the worst report of the newest restart stays.
    """
    if path is None:
        return
    if shared:
        report = {**report, "restart": int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)}
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if shared and _precedence(_parsed(stream.read())) >= _precedence(report):
                return
            stream.seek(0)
            stream.truncate()
            stream.write(encode(report))
    except OSError as error:
        print(f"warning: cannot write the termination message to {path}: {error}", flush=True)


def _parsed(content: bytes) -> Report:
    try:
        earlier = json.loads(content)
    except ValueError:
        return {}
    return earlier if isinstance(earlier, dict) else {}


def _precedence(report: Mapping[str, Any]) -> tuple[int, int]:
    """Restart, then own failure over stopped or lost peer over success.

    Stopping and a lost peer are each other's echo: a rank that leaves is lost to its peers, and torchrun stops the
    ranks beside a lost one. Being equal here, the first of them stays.
    """
    if "code" not in report:
        return -1, 0
    if report["code"] == 0:
        severity = 0
    elif report.get("cause") == "peer" or report.get("outcome") == "stopped":
        severity = 1
    else:
        severity = 2
    restart = report.get("restart")
    return restart if isinstance(restart, int) else 0, severity


def _first(text: str, room: int) -> str:
    """As many characters as fill ``room`` bytes of JSON, where one may take twelve; then the mark of a cut."""
    size = 0
    for at, character in enumerate(text[: max(0, room)]):
        size += len(dumps(character)) - 2
        if size > room:
            return text[:at] + "..."
    return text[: max(0, room)] + "..." if room > 0 else ""


def _last(text: str, room: int) -> str:
    return _first(text[::-1], room)[::-1]
