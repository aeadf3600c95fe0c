"""The termination report: how a rank or a node ended, as at most 4,096 bytes of JSON, for success too.

``worker`` builds a rank's report. ``launcher`` writes that of a node, ``worker`` writes it if there is no launcher, and
``cli`` writes it if a start is refused. docs/reference/reports.md describes the fields.
"""

import bisect
import fcntl
import functools
import json
import os
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddprun import exit_codes
from ddprun.errors import PeerLost, Stopped, TrainerError, classify
from ddprun.files import dumps_json
from ddprun.raised import LONGEST_TEXT, caused_by, earlier, first_of, killed_worker, message_of, where

SCHEMA = 3
MAX_BYTES = 4096
_SHORT = 120  # bytes; some twenty such fields fit
_SIGNAL_ADVICE: dict[int, tuple[str, str]] = {
    signal.SIGKILL: (
        "often the kernel's out-of-memory killer",
        "look for `Out of memory` in the kernel's log (dmesg); if it is there, lower the batch size",
    ),
    signal.SIGSEGV: ("an error in native code", "set PYTHONFAULTHANDLER=1 to print the stack of the next one"),
    signal.SIGABRT: ("a library aborted the process", "read the last lines of this rank's output, which say why"),
    signal.SIGBUS: ("often /dev/shm or a memory-mapped file's volume is full", "make /dev/shm larger"),
}  # fmt: skip
DEFAULT_PATH = "/dev/termination-log"
Report = dict[str, Any]  # the fields of docs/reference/reports.md


def done(message: str, *, rank: int, **fields: Any) -> Report:
    """Return the report of a rank that succeeded, with further ``fields``."""
    return {"schema": SCHEMA, "outcome": "succeeded", "code": 0, "rank": rank, "message": message} | fields


def failed(
    code: int, kind: str, message: str, *, rank: int | None, progress: Mapping[str, Any] | None = None, **fields: Any
) -> Report:
    """Return the report of a failure, with every field of the format.

    Args:
        progress: gives phase, checkpoint, and step: the step in progress; of a script, the last completed step, because
            only the end of a step is seen. exact: no later step was completed, which a script that reports some of its
            steps may have done.
        fields: those that differ from the defaults below.
    """
    place = {name: (progress or {}).get(name) for name in ("step", "phase", "checkpoint")}
    place |= {"exact": True} if progress and progress.get("exact") else {}
    return {
        "schema": SCHEMA, "outcome": "failed", "code": code, "kind": kind, "cause": "own", "rank": rank, **place,
        "signal": None, "exception": None, "message": message, "hint": None, "next": None, "where": None, **fields,
    }  # fmt: skip


def failure(
    error: BaseException, *, rank: int | None, progress: Mapping[str, Any], within: BaseException | None = None
) -> Report:
    """Return the report of a rank that ends with ``error``. within: see ``raised.where``."""
    first, others = first_of(error)
    typed = classify(first)
    name = type(typed).__name__
    report = failed(exit_codes.USER_ERROR, name[:100], message_of(typed) + others, rank=rank, progress=progress)
    report |= {"exception": name, "where": where(first, within=within if first is error else error)}
    if not isinstance(typed, TrainerError):
        report["message"] += caused_by(typed)
        if any(isinstance(classify(each), PeerLost) for each in earlier(typed)):
            report["cause"] = "peer"  # the program has handled the loss, and failed then
        if found := killed_worker(typed):
            report |= _of_killed_worker(*found, message_of(typed).strip())
        return report | {"traceback": "".join(traceback.format_exception(error))[-LONGEST_TEXT:]}
    report |= {"code": typed.code, "kind": typed.kind, "cause": typed.cause}
    report |= {"hint": typed.hint or None, "next": typed.next_step or None}
    return report | {"outcome": "stopped", "saved": typed.saved} if isinstance(typed, Stopped) else report


def killed(signal_number: int, *, rank: int, progress: Mapping[str, Any] | None = None) -> Report:
    """Return the report of a rank that a signal killed before it could write one."""
    hint, next_step = _SIGNAL_ADVICE.get(signal_number, (None, None))
    return failed(
        exit_codes.SIGNAL_BASE + signal_number,
        "Killed",
        f"rank {rank} was killed by {_name(signal_number)}",
        rank=rank,
        progress=progress,
        signal=signal_number,
        hint=hint,
        next=next_step,
    )


def oom_killed(report: Report) -> Report:
    """Return the report of a rank that SIGKILL ended, if the kernel sent that for the memory limit."""
    return report | {
        "kind": "OOMKilled", "message": f"rank {report['rank']} was killed by SIGKILL: the memory limit was reached",
        "hint": None, "next": "raise the memory limit, or lower the batch size or the ranks per node",
    }  # fmt: skip


def _of_killed_worker(pid: int, signal_number: int, message: str) -> Report:
    """Return the changed fields of the report of an error that the death of a DataLoader's worker has caused."""
    if "by signal" not in message:  # torch has seen it in time
        message += f"; a worker (pid {pid}) was killed by {_name(signal_number)}"
    hint, next_step = _SIGNAL_ADVICE.get(signal_number, (None, None))
    if signal_number == signal.SIGSEGV:
        next_step = "run with num_workers=0: then the report has the line"  # a worker handles this signal itself
    return {"message": message, "hint": hint, "next": next_step}


def _name(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"  # most real-time signals have no name


def root_cause_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a report of a failure or a stop as a terminal shows it: its cause, place, hint and next step.

    Of a node that lost a peer, it is the cause on the other node, if that is known.
    """
    if root := report.get("root"):
        report = {**root, "message": f"{root.get('message')} (on node {root.get('node')}; this node lost that peer)"}
    name = f", {report['exception']}" if report.get("traceback") else ""
    rank = "" if report.get("rank") is None else f"rank {report['rank']}, "
    lost = report.get("cause") == "peer" and report.get("kind") == PeerLost.kind
    title = "stopped" if report.get("outcome") == "stopped" else "lost a peer" if lost else "root cause"
    lines = [f"{title}: {rank}exit code {report.get('code')}{name}: {report.get('message')}"]
    place = [f"{key} {report[key]}" for key in ("step", "phase", "where", "signal") if report.get(key) is not None]
    lines.append("at:    " + (", ".join(place) if place else "not known"))
    next_step = report.get("next")
    if report.get("traceback") and not next_step:
        next_step = f"the traceback of rank {report.get('rank')} is in the output above"
    advice = (("hint:  ", report.get("hint")), ("next:  ", next_step))
    return [printable(line) for line in lines + [label + str(text) for label, text in advice if text]]


def printable(text: str) -> str:
    """Return the text with control characters as escapes: a report may come from any program that wrote the volume."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def encode(report: Mapping[str, Any]) -> bytes:
    """Return the report as JSON of at most MAX_BYTES.

    A longer report loses the oldest frames of its traceback first, then its progress, the lives before and the root
    cause on another node, then the end of hint and next, then the end of its message. Code and kind always stay.
    """
    kept = dict(report)
    dropped = [(key, 0) for key in ("traceback", "progress", "lives", "root")]
    for key, least in (*dropped, ("hint", 250), ("next", 250), ("message", 0)):
        if len(dumps_json(kept)) <= MAX_BYTES:
            break
        text = kept.get(key)
        if isinstance(text, str):
            size = functools.partial(_size, kept, key, text)
            kept[key] = _cut(key, text, max(least, bisect.bisect_right(range(len(text)), MAX_BYTES, key=size) - 1))
        elif text is not None:
            del kept[key]
    if len(dumps_json(kept)) > MAX_BYTES:  # a field that should be short is not: keep the short ones
        kept = {k: v for k, v in kept.items() if v is None or k == "kind" or len(dumps_json(v)) <= _SHORT}
    return dumps_json(kept).encode()


def _size(report: Mapping[str, Any], key: str, text: str, length: int) -> int:
    return len(dumps_json({**report, key: _cut(key, text, length)}))


def _cut(key: str, text: str, length: int) -> str:
    """Return the first characters of the text, of a traceback the last, and "..." in place of the others."""
    if length >= len(text):
        return text
    return "..." + text[len(text) - length :] if key == "traceback" else text[:length] + "..."


def destination() -> Path | None:
    """Return DDPJOB_TERMINATION_LOG, or the kubelet's file in a container, or None."""
    if given := os.environ.get("DDPJOB_TERMINATION_LOG"):
        return Path(given)
    path = Path(DEFAULT_PATH)
    return path if path.is_file() and os.access(path, os.W_OK) else None


def write(
    report: Mapping[str, Any], path: Path | None, *, shared: bool = False, env: Mapping[str, str] = os.environ
) -> None:
    """Truncate the file and write the report in place; print a warning where that fails.

    In place, because the file is a bind mount, which cannot be replaced.

    Args:
        shared: several ranks write this file (torchrun): the most severe report of the newest restart stays.
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
    """Return (restart, severity): an own failure is more severe than a stop or a lost peer, these more than success.

    A stop and a lost peer rank equal, because each causes the other: a rank that stops is lost to its peers, and
    torchrun stops the ranks of a lost peer. The first of them stays.
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
