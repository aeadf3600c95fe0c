"""The typed errors of launcher and ranks: each has a stable exit code and a stable kind, which programs match on.

A rank turns an error into a report (``reporting.termination``), ``cli`` prints one that is raised before a rank starts.
A trainer adds errors of its own as subclasses. ``classify`` maps exceptions of PyTorch and of the operating system to
these types.
"""

# ruff: noqa: N818 - reports and job status show these names, which say what happened

import contextlib
import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddprun import exit_codes
from ddprun.raised import text_of


class TrainerError(Exception):
    """A failure with a stable exit code and kind.

    Args:
        message: what is wrong and where, in one line.
        hint: the usual cause.
        next_step: what to do or type next.
    """

    code: int = exit_codes.USER_ERROR
    kind = "TrainerError"
    cause = "own"

    def __init_subclass__(cls, *, code: int | None = None, kind: str = "", cause: str = "") -> None:
        cls.code, cls.kind, cls.cause = code or cls.code, kind or cls.__name__, cause or cls.cause

    def __init__(self, message: str, *, hint: str = "", next_step: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.next_step = next_step

    def lines(self) -> str:
        """Return the error as a terminal shows it: the lines error, hint and next."""
        lines = (("error: ", str(self)), ("hint:  ", self.hint), ("next:  ", self.next_step))
        return "\n".join(label + text for label, text in lines if text or label == "error: ")


class UsageError(TrainerError, code=exit_codes.USAGE):
    """A flag, an environment variable or a configuration file has a value that is not valid."""


class DataError(TrainerError, code=exit_codes.DATA):
    """Data or a checkpoint cannot be used; raised as one of the subclasses."""


class DataMissing(DataError):
    """A file or directory that must be read is absent or cannot be opened."""


class DataCorrupt(DataError):
    """A file was read, but its content is damaged or of the wrong format."""


class RendezvousError(TrainerError, code=exit_codes.RENDEZVOUS, kind="RendezvousFailed"):
    """Not every rank arrived in time; the message names the missing ranks."""


class RanksError(TrainerError, code=exit_codes.RANKS, kind="RanksImpossible"):
    """This machine or this build of PyTorch cannot run the requested ranks or backend."""


class VolumeError(TrainerError, code=exit_codes.VOLUME, kind="VolumeUnwritable"):
    """A file or directory cannot be written."""


class Stopped(TrainerError, code=exit_codes.STOPPED):
    """The rank ended because of SIGTERM, SIGINT or SIGHUP, or after the step that --stop-after names.

    Args:
        saved: whether a checkpoint of the last completed step is on the volume.
    """

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.saved = saved

    def lines(self) -> str:
        """Return the message alone: a stop is no error."""
        return str(self)


class Hang(TrainerError, code=exit_codes.HANG):
    """A collective did not complete within the group's timeout, or a rank made no progress."""


class PeerLost(TrainerError, code=exit_codes.PEER_LOST, cause="peer"):
    """Another rank ended; its own report has the reason."""

    def lines(self) -> str:
        """Return one line: the cause follows, and every rank that lost this peer prints it."""
        return f"error: {self}"


class DeviceError(TrainerError, kind="DeviceFailed"):
    """This rank's GPU, its driver or a kernel on it failed."""


class ExitedEarly(TrainerError):
    """A rank ended with exit code 0 before its work was done."""


class GPUOutOfMemory(TrainerError):
    """The memory of this rank's GPU is full."""


class Mismatch(TrainerError, code=exit_codes.MISMATCH):
    """The checkpoint or another rank does not match this run; raised as one of the subclasses."""


class ConfigMismatch(Mismatch):
    """The settings, versions or processor differ."""


class Superseded(TrainerError, code=exit_codes.SUPERSEDED):
    """A newer attempt has claimed the checkpoint directory."""


class ReplicasDiverged(TrainerError, code=exit_codes.DIVERGED):
    """The ranks do not have the same parameters, and ``--on-divergence restart`` is set."""


# The messages of gloo, NCCL and the TCP store when a connection is closed, and when a peer does not answer.
_PEER_GONE = re.compile(
    r"connection (closed|reset|was closed)|connection refused|broken pipe|socket closed|remote process exited"
    r"|failed to recv, got 0 bytes|failed to send|remote error|peer .*(closed|exited|terminated)",
    re.IGNORECASE,
)
_CUDA = re.compile(
    r"CUDA error:|cuDNN error:|CUBLAS_STATUS_|uncorrectable ECC|CUDA out of memory|unhandled cuda error", re.IGNORECASE
)
_NCCL = re.compile(
    r"NCCL error|nccl(System|Remote|Internal|Unhandled|Invalid)\w*|unhandled system error", re.IGNORECASE
)
_NCCL_PEER = re.compile(r"ncclSystemError|ncclRemoteError|unhandled system error|remote process exited", re.IGNORECASE)
# System errors that NCCL reports of this machine, and not of a connection.
_NCCL_OWN = re.compile(
    r"shared memory|/dev/shm|No space left|Cannot allocate memory|Too many open files|Permission denied"
    r"|no (usable|socket) interface|Bootstrap : no",
    re.IGNORECASE,
)
_DUPLICATE_GPU = re.compile(r"Duplicate GPU detected[^\n]*", re.IGNORECASE)
_DRIVER = re.compile(
    r"driver version is insufficient|NVIDIA driver on your system is too old|Found no NVIDIA driver"
    r"|no CUDA-capable device|system not yet initialized|CUDA unknown error|forward compatibility was attempted"
    r"|busy or unavailable",
    re.IGNORECASE,
)
_NO_SUCH_GPU = re.compile(r"No CUDA GPUs are available|invalid device ordinal", re.IGNORECASE)
_GPU_FULL = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_VOLUME = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
_BAD_PATH = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP}


def classify(error: BaseException) -> BaseException:
    """Return the typed error for an exception of torch.distributed, or any other exception unchanged.

    Only plain RuntimeErrors and exceptions of torch are matched by their text: gloo has no types.
    """
    if isinstance(error, TrainerError):
        return error
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return exited_early("the program called sys.exit(0) before its work was done")
    distributed = type(error).__module__.startswith(("torch", "builtins")) and isinstance(error, RuntimeError)
    text = text_of(error).strip()[:3000]
    first_line = text.partition("\n")[0][:500]
    if distributed and _NCCL.search(text) and (found := nccl_error(text)):
        return found
    # Before the other texts: CUDA too says that something timed out.
    if distributed and any(found.search(first_line) for found in (_CUDA, _DRIVER, _NO_SUCH_GPU)):
        return cuda_error(first_line)
    if distributed and _PEER_GONE.search(first_line):
        reason = first_line.partition(". This is typically")[0].rpartition("/third_party/gloo/")[2]
        return PeerLost(
            f"a peer was lost: {reason}",
            hint="another rank failed first; its report has the cause",
            next_step="`ddprun --why DIR`, with the checkpoint or log directory, names that rank",
        )
    if distributed and _TIMED_OUT.search(first_line):
        return Hang(
            f"a collective did not complete in time: {first_line}",
            hint="another rank is stopped, has too little CPU, or is in another collective",
            next_step="if steps take longer, raise the timeout of the group (--collective-timeout of ddptrain)",
        )
    return error


def nccl_error(text: str) -> TrainerError | None:
    """Return the error for what NCCL or PyTorch reported of it; None if that says nothing about the cause.

    A closed connection is a system error for NCCL, like a full /dev/shm: the rest of the text distinguishes them.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1][:300]  # what NCCL gives as its last error
    if duplicate := _DUPLICATE_GPU.search(text):
        return RanksError(
            f"two ranks use one GPU: {duplicate[0][:200]}",
            hint="NCCL allows one rank per GPU; LOCAL_RANK or CUDA_VISIBLE_DEVICES is the same for two ranks",
            next_step="give every rank of a node its own LOCAL_RANK, or lower NPROC_PER_NODE to the number of GPUs",
        )
    if own := _NCCL_OWN.search(text):
        return DeviceError(
            f"NCCL failed on this node ({own[0]}): {last}",
            hint="/dev/shm or a limit of files or memory is too small, or no network interface can be used",
            next_step="make /dev/shm larger (of a job: sharedMemory.sizeLimit), look at `ulimit -a` and "
            "NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows more",
        )
    if re.search("unhandled cuda error", text, re.IGNORECASE):
        return cuda_error(last)
    if _NCCL_PEER.search(text):
        return PeerLost(
            f"a peer was lost: {last}",
            hint="another rank failed first, and its report has the cause; or the network between the nodes failed",
            next_step="`ddprun --why DIR`, with the checkpoint or log directory, names that rank",
        )
    return None


def exited_early(message: str) -> ExitedEarly:
    """Return the error of a rank that ended with exit code 0 before its work was done."""
    return ExitedEarly(
        message,
        hint="its script makes fewer steps than the others, or the program or a library called exit",
        next_step="look at the rank's last lines of output, and at calls of sys.exit and os._exit",
    )


def cuda_error(message: str) -> DeviceError | GPUOutOfMemory:
    """Return the error for what CUDA or PyTorch reported of this rank's GPU."""
    if _GPU_FULL.search(message):
        return GPUOutOfMemory(
            message[:300],
            hint="a step needs more memory than the GPU has, or another process uses the GPU (see `nvidia-smi`)",
            next_step="use a smaller batch, more micro-batches per step or bfloat16, with a new checkpoint directory; "
            "PYTORCH_ALLOC_CONF=expandable_segments:True makes fragmented memory usable",
        )
    if _NO_SUCH_GPU.search(message):
        return DeviceError(
            message[:300],
            hint="this rank sees no GPU, or no GPU with this number: there are fewer GPUs than ranks on this node, "
            "CUDA_VISIBLE_DEVICES hides them, or a GPU has failed",
            next_step="compare `nvidia-smi -L` with the number of ranks per node (of a job also `resources`); use the "
            "GPU with the number LOCAL_RANK",
        )
    if _DRIVER.search(message):
        return DeviceError(
            message[:300],
            hint="the driver of this node is absent, too old for this build of PyTorch, or another process has the GPU "
            "for itself (exclusive mode)",
            next_step="compare `nvidia-smi` on the node with `torch.version.cuda`; update the driver, or use a "
            "PyTorch for an older CUDA",
        )
    return DeviceError(
        message[:300],
        hint="the GPU or its driver failed, or a kernel used memory that is not its own",
        next_step="look for Xid in this node's dmesg; CUDA_LAUNCH_BLOCKING=1 shows which operation fails",
    )


def volume_error(error: OSError, path: Path | str) -> VolumeError:
    """Return the VolumeError for an OSError that writing below ``path`` raised."""
    hint, next_step = "", "check its free space, and who may write there (of a job: fsGroup)"
    if error.errno in _BAD_PATH:
        hint = "part of the path is missing, is a broken link, or is a file where a directory is needed"
        next_step = "check every part of that path, or choose another"
    elif error.errno in _VOLUME:
        hint = "the volume is read-only, full, or belongs to another user"
    return VolumeError(f"cannot write {path}: {error.strerror or error}", hint=hint, next_step=next_step)


@contextlib.contextmanager
def volume_errors(path: Path | str) -> Iterator[None]:
    """Raise the VolumeError for an OSError within this context, which writes ``path``."""
    try:
        yield
    except OSError as error:
        raise volume_error(error, path) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name that is most like ``name``; empty if no name is like it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else ""
