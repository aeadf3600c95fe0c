"""The ways a rank can end badly, each with its stable exit code; and which of them a foreign exception is.

Those that one module alone raises and that share a code stand there: ``weights.WeightsDiffer``, ``trials.TrialFailed``.
Raised anywhere, turned by ``worker`` into a report, by ``launch`` into the termination message and the exit code.
"""

from __future__ import annotations

import errno
import re
import traceback
from pathlib import Path

from ddptrain import exit_codes


class TrainerError(Exception):
    """A failure with a stable exit code.

    Args:
        message: what is wrong and where, in one line.
        hint: what usually causes it.
        next_step: what to do or type next.
    """

    code = exit_codes.USER_ERROR
    cause = "own"

    def __init__(self, message: str, *, hint: str = "", next_step: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.next_step = next_step

    def lines(self) -> str:
        """The error as a user reads it: error, hint, next."""
        parts = [f"error: {self}"]
        if self.hint:
            parts.append(f"hint:  {self.hint}")
        if self.next_step:
            parts.append(f"next:  {self.next_step}")
        return "\n".join(parts)


class UsageError(TrainerError):
    """A flag, an environment variable or a value that cannot be meant."""

    code = exit_codes.USAGE


class DataError(TrainerError):
    """The dataset is absent, or its content is not what it must be."""

    code = exit_codes.DATA


class RendezvousError(TrainerError):
    """Not every rank arrived in time; the message names who is missing."""

    code = exit_codes.RENDEZVOUS


class RanksError(TrainerError):
    """This machine or this build cannot run the ranks or the backend asked for."""

    code = exit_codes.RANKS


class VolumeError(TrainerError):
    """The checkpoint directory cannot be written."""

    code = exit_codes.VOLUME


class Stopped(TrainerError):  # noqa: N818 - obeying SIGTERM is an end, not an error
    """SIGTERM was obeyed.

    Args:
        saved: whether a checkpoint of the last completed step is on the volume.
    """

    code = exit_codes.STOPPED

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.saved = saved


class Hang(TrainerError):  # noqa: N818
    """A collective did not complete within the group's timeout."""

    code = exit_codes.HANG


class PeerLost(TrainerError):  # noqa: N818
    """Another rank went away; its own report holds the reason."""

    code = exit_codes.PEER_LOST
    cause = "peer"


class Mismatch(TrainerError):  # noqa: N818
    """The checkpoint or the data belongs to another run than the one configured."""

    code = exit_codes.MISMATCH


class NotFinite(TrainerError):  # noqa: N818
    """The loss is NaN or infinite."""

    code = exit_codes.NOT_FINITE


class Superseded(TrainerError):  # noqa: N818
    """A newer attempt has claimed the checkpoint directory."""

    code = exit_codes.SUPERSEDED


# What gloo, NCCL and the TCP store say when the other side is gone, and when it stays silent.
_PEER_GONE = re.compile(
    r"connection (closed|reset|was closed)|connection refused|broken pipe|socket closed|remote process exited"
    r"|failed to recv, got 0 bytes|failed to send|remote error|peer .*(closed|exited|terminated)",
    re.IGNORECASE,
)
_SILENT = re.compile(r"timed out|timeout", re.IGNORECASE)
_VOLUME = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}

_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP}


def classify(error: BaseException) -> BaseException:
    """The typed error that a foreign exception stands for, or the exception itself where it is the user's own.

    Only exceptions out of ``torch.distributed`` and plain RuntimeErrors are read by their text: gloo has no types.
    """
    if isinstance(error, TrainerError):
        return error
    distributed = type(error).__module__.startswith(("torch", "builtins")) and isinstance(error, RuntimeError)
    first_line = str(error).strip().partition("\n")[0][:500]
    if distributed and _PEER_GONE.search(first_line):
        said = first_line.partition(". This is typically")[0].rpartition("/third_party/gloo/")[2]
        return PeerLost(f"a peer was lost: {said}", hint="read the other ranks' ends: theirs came first")
    if distributed and _SILENT.search(first_line):
        return Hang(
            f"a collective did not complete in time: {first_line}",
            hint="a rank is stopped, starved of CPU, or waits elsewhere",
            next_step="raise --collective-timeout if the step is honestly that slow",
        )
    return error


def volume_error(error: OSError, path: Path | str) -> TrainerError:
    """A VolumeError for an OSError met while writing below ``path``."""
    if error.errno in _IN_THE_WAY:
        return VolumeError(
            f"cannot write {path}: {error.strerror}",
            hint="a file or a broken link is where a directory should be, a directory where a file should be, "
            "or the directory above is missing",
            next_step="look at every part of that path, or name another",
        )
    return VolumeError(
        f"cannot write {path}: {error.strerror or error}",
        hint="the volume is read-only, full, or belongs to another user" if error.errno in _VOLUME else "",
        next_step="check free space, access mode and fsGroup of the volume",
    )


def exit_code(error: BaseException) -> int:
    """The process exit code for an error; 1 for anything this module does not know."""
    return error.code if isinstance(error, TrainerError) else exit_codes.USER_ERROR


def where(error: BaseException) -> str | None:
    """``file.py:line`` of the innermost frame of this package, else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).parent == Path(__file__).parent]
    frame = (ours or frames or [None])[-1]  # type: ignore[list-item]
    return f"{Path(frame.filename).name}:{frame.lineno}" if frame else None
