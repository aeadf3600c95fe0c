"""What a rank leaves for its launcher in anonymous memory files: heartbeat, progress, stacks,
PyTorch's flight recorder.

DUMP_SIGNAL makes a rank dump its stacks and its last collectives. The files need no volume and no cleanup.
"""

import contextlib
import faulthandler
import itertools
import json
import mmap
import os
import pickle
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ddprun import replica_audit, shared_text, step_parts, step_profile
from ddprun.code_frames import STARTS_RANKS, innermost_frame, is_of_program
from ddprun.heartbeat import SIZE, HeartbeatRecord
from ddprun.replica_audit import Digests
from ddprun.shared_text import SharedText
from ddprun.step_profile import ProfileRequest

DUMP_SIGNAL = signal.SIGRTMAX - 7  # scripts use SIGUSR1 and SIGUSR2 themselves, for example to save
_DUMP_LIMIT = 8 * 2**20  # bytes of one dump that are kept
_LONGEST_NAME = 100
_DATA_PARALLEL = "/torch/nn/parallel/distributed.py"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True)
class Diagnostics:
    """Descriptors of one rank's memory files, the same numbers in the launcher and in the rank.

    Attributes:
        progress: the newest progress report.
        parts: where the time of the steps goes, and digests of the parameters (``step_parts``, ``replica_audit``).
        flight, trace: the flight recorder as JSON, and as PyTorch wrote it.
        requests: an eventfd; the rank dumps its flight recorder at each write.
        profile: the request of a profile, what the rank says to it, and the trace (``step_profile``).
    """

    heartbeat: int
    progress: int
    parts: int
    stacks: int
    flight: int
    trace: int
    requests: int
    profile: int

    @classmethod
    def create(cls, rank: int) -> "Diagnostics":
        """Create the files of ``rank``."""
        names = ("heartbeat", "progress", "parts", "stacks", "flight", "trace", "profile")
        files = {name: os.memfd_create(f"ddprun-{name}-{rank}") for name in names}
        diagnostics = cls(**files, requests=os.eventfd(0))
        os.ftruncate(diagnostics.heartbeat, SIZE)
        os.ftruncate(diagnostics.progress, shared_text.SIZE)
        os.ftruncate(diagnostics.parts, step_parts.SIZE)
        os.ftruncate(diagnostics.profile, step_profile.SIZE)
        return diagnostics

    def memory(self) -> memoryview:
        """Map the heartbeat's memory, shared with every process that maps it."""
        return memoryview(mmap.mmap(self.heartbeat, SIZE))

    def last_heartbeat(self) -> HeartbeatRecord:
        return HeartbeatRecord.unpack(os.pread(self.heartbeat, SIZE, 0))

    def progress_text(self) -> SharedText:
        """Return the place of the progress report, for the rank that writes it."""
        return SharedText(memoryview(mmap.mmap(self.progress, shared_text.SIZE)))

    def parts_memory(self) -> memoryview:
        """Map the memory of ``step_parts``, for the rank that writes it."""
        return memoryview(mmap.mmap(self.parts, step_parts.SIZE))

    def step_records(self) -> tuple[list[step_parts.StepSums], list[Digests]]:
        """Return what the rank has recorded of its steps and of its parameters, the newest last."""
        memory = os.pread(self.parts, step_parts.AUDIT_AT + replica_audit.RING, 0)
        return step_parts.read(memory), replica_audit.read(memory[step_parts.AUDIT_AT :])

    def tensor_names(self) -> Mapping[str, Any]:
        """Return the names of its parameters, see ``replica_audit.read_names``."""
        begin = step_parts.AUDIT_AT + replica_audit.RING
        return replica_audit.read_names(os.pread(self.parts, step_parts.SIZE - begin, begin))

    def abstention(self) -> str:
        """Return why the rank records no digests; empty if it does, or may yet."""
        begin = step_parts.AUDIT_AT + replica_audit.RING
        return str(replica_audit.read_names(os.pread(self.parts, replica_audit.SHORT, begin)).get("abstains", ""))

    def last_progress(self) -> str:
        """Return the newest progress report as ``ProgressRecord`` wrote it; empty for none."""
        return shared_text.read(os.pread(self.progress, shared_text.SIZE, 0))

    def dumps(self) -> tuple[str, str]:
        """Return (stacks, flight recorder as JSON); a dump that the rank could not write is empty."""
        stacks, flight = (os.pread(fd, _DUMP_LIMIT, 0).decode(errors="replace") for fd in (self.stacks, self.flight))
        return stacks, flight

    def raw_trace(self) -> bytes:
        """Return the flight recorder's pickle, for ``torchfrtrace``; the launcher does not unpickle it."""
        return os.pread(self.trace, _DUMP_LIMIT, 0)

    def clear_dumps(self) -> None:
        """Delete earlier dumps, so that they are not taken for new ones. The rank shares the file position."""
        for descriptor in (self.stacks, self.flight, self.trace):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)

    def ask_for_profile(self, request: ProfileRequest) -> None:
        """Ask the rank for a profile; the trace of an earlier one is deleted."""
        os.ftruncate(self.profile, step_profile.SIZE)
        request.write(self.profile)

    def profile_report(self) -> dict[str, Any]:
        """Return what the rank says of the newest profile; empty if it has said nothing."""
        return step_profile.report(self.profile)

    def profile_part(self, offset: int, size: int) -> bytes:
        """Return a part of the compressed trace."""
        return os.pread(self.profile, size, step_profile.TRACE_AT + offset)

    def close(self) -> None:
        for descriptor in astuple(self):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def dump_stacks_on_signal(diagnostics: Diagnostics) -> None:
    """Make DUMP_SIGNAL dump all stacks to ``diagnostics``.

    faulthandler's handler is written in C and works while the interpreter is blocked inside a collective.
    """
    faulthandler.register(DUMP_SIGNAL, file=diagnostics.stacks, all_threads=True)


def dump_on_request(diagnostics: Diagnostics) -> None:
    """Dump the flight recorder whenever the launcher asks for it, from a thread of its own.

    The thread runs while the main thread waits in a collective, which releases the GIL. No signal of the script and no
    wakeup descriptor is needed, which asyncio uses.
    """

    def serve() -> None:
        with contextlib.suppress(OSError):  # the script has closed all descriptors
            while os.read(diagnostics.requests, 8):
                dump_flight_recorder(diagnostics)

    threading.Thread(target=serve, name="ddprun-dumps", daemon=True).start()


def dump_flight_recorder(diagnostics: Diagnostics) -> None:
    """Write this rank's last collectives, if the build of PyTorch records them. Never raises and never waits.

    A thread of its own does it: the recorder takes locks that a blocked communicator may hold.
    """

    def dump() -> None:
        with contextlib.suppress(Exception):  # private functions that another version may change
            raw, recorded = newest_trace()
            os.pwrite(diagnostics.trace, raw[:_DUMP_LIMIT], 0)
            os.pwrite(diagnostics.flight, _flight_json(recorded).encode(), 0)

    threading.Thread(target=dump, name="flight-recorder", daemon=True).start()


def _flight_json(recorded: dict[str, Any]) -> str:
    """Return the recording as JSON of at most _DUMP_LIMIT bytes: the newest entries, each with its stack."""
    kept = len(recorded["entries"])
    while len(text := json.dumps(recorded, default=str)) > _DUMP_LIMIT and kept:
        kept //= 2
        recorded = recorded | {"entries": recorded["entries"][-kept:] if kept else []}
    return text


def newest_trace() -> tuple[bytes, dict[str, Any]]:
    """Return the flight recorder's pickle and its content: NCCL's if that recorded something, else gloo's."""
    from torch._C import _distributed_c10d

    with _inductor_not_imported():
        for name in ("_dump_nccl_trace", "_dump_fr_trace"):
            if dump := getattr(_distributed_c10d, name, None):
                raw: bytes = dump()
                recorded: dict[str, Any] = pickle.loads(raw)  # noqa: S301 - written by this process
                if recorded.get("entries") or name == "_dump_fr_trace":
                    is_unnamed = "" in recorded.get("pg_config", {})
                    groups = {tuple(entry["process_group"]) for entry in recorded["entries"]} if is_unnamed else ()
                    if len(groups) == 1:
                        # gloo's recorder leaves out the name of the group, without which torchfrtrace fails.
                        [(group, text)] = groups
                        recorded["pg_config"][group] = recorded["pg_config"].pop("") | {"name": group, "desc": text}
                        raw = pickle.dumps(recorded)
                    return raw, recorded
    return b"", {}


@contextlib.contextmanager
def _inductor_not_imported() -> Iterator[None]:
    """Keep the recorder from importing ``torch._inductor``, which takes seconds, longer than the launcher waits.

    To name the frames of a stack, PyTorch asks whether ``torch._inductor`` has compiled them. ``torch`` imports that
    module when it is asked for it, so it is given an empty one. A program that has imported it keeps it.
    """
    import torch

    if "_inductor" in vars(torch):
        yield
        return
    empty = ModuleType("torch._inductor")
    vars(torch)["_inductor"] = empty
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is empty:  # else the program has imported it meanwhile
            del vars(torch)["_inductor"]


def collective_of(stacks: str) -> str:
    """Return what the training thread of a script waits in, by its stack; empty if it works by itself.

    In a backward pass a rank waits for the gradients of its peers, which only C++ knows, so that is taken for waiting.
    So is a call of C++ by DistributedDataParallel itself, which broadcasts buffers and compares parameters.
    """
    for frames in _training_threads(stacks):
        in_torch = list(itertools.takewhile(lambda m: "/torch/" in m["file"], frames))
        for file, name in ((m["file"], m["name"]) for m in in_torch):
            if "/torch/distributed/" in file and not name.startswith(("wrapper", "_")):
                return name
            if "/torch/autograd/" in file:
                return "backward"
        is_of_ddp = any(m["file"].endswith(_DATA_PARALLEL) for m in in_torch)
        if is_of_ddp and in_torch[0]["file"].endswith((_DATA_PARALLEL, "/torch/distributed/utils.py")):
            return "DistributedDataParallel"
    return ""


def unfinished_collective(flight: str) -> str:
    """Return the newest collective that a rank has given to its GPU and that has not completed; empty for none.

    A rank that waits for peers under NCCL is anywhere in its code where it needs a result of the GPU, such as in
    ``loss.item()``. Only the flight recorder knows; gloo's records no completion. Members of a coalesced group never
    become completed either, so the numbers of the whole process group decide.

    Args:
        flight: what the recorder wrote, as JSON.
    """
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # another version, or cut
        recorded = json.loads(flight)
        for entry in reversed(recorded["entries"]):
            backend, _, name = entry["profiling_name"].partition(":")
            if backend == "nccl" and entry["state"] != "completed" and _waits(recorded, entry):
                return str(name)[:_LONGEST_NAME]
    return ""


def _waits(recorded: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Return whether a process group with peers has collectives that have not completed."""
    ranks = recorded["pg_config"].get(entry["process_group"][0], {}).get("ranks", "")
    status = recorded["pg_status"].get(str(entry["pg_id"]), {})
    is_alone = bool(ranks) and len(json.loads(ranks)) == 1
    return not is_alone and status["last_enqueued_collective"] != status["last_completed_collective"]


def training_frame(stacks: str) -> str | None:
    """Return ``file.py:line`` of the program's innermost frame in the training thread of a faulthandler dump."""
    for frames in _training_threads(stacks):
        known = [(m["file"], int(m["line"])) for m in reversed(frames)]
        if not any(Path(file) == STARTS_RANKS for file, _ in known):  # the script's function is called by torch
            known = [frame for frame in known if "-packages/" not in frame[0]] or known
        return innermost_frame(known)
    return None


def running_frame(stacks: str) -> str | None:
    """Return ``file.py:line`` of the program's innermost frame in any thread; None if all are in libraries.

    For a rank whose script has returned: its main thread waits for other threads, or calls exit handlers.
    """
    for thread in stacks.split("\n\n"):
        if own := [frame for frame in _frames(thread) if is_of_program(frame[0]) and "-packages/" not in frame[0]]:
            return innermost_frame(own)
    return None


def crashed_frame(stacks: str) -> str | None:
    """Return ``file.py:line`` of the program's innermost frame in the thread of a fatal signal, by faulthandler's dump.

    A thread that Python does not know has no frames: then it is that of the training thread.
    """
    current = next((thread for thread in stacks.split("\n\n") if thread.startswith("Current thread")), "")
    return innermost_frame(_frames(current)) or training_frame(stacks)


def _frames(thread: str) -> list[tuple[str, int]]:
    """Return file and line of the frames, the outermost first; faulthandler writes the innermost first."""
    return [(m["file"], int(m["line"])) for m in _FRAME.finditer(thread)][::-1]


def _training_threads(stacks: str) -> Iterator[list[re.Match[str]]]:
    """Yield the frames, the innermost first, of the thread in which the launcher's code has started the rank.

    In a process that the script has started by an interpreter of its own it is the thread of multiprocessing.
    """
    for thread in stacks.split("\n\n"):
        frames = list(_FRAME.finditer(thread))
        if any(Path(m["file"]) == STARTS_RANKS or _begins_process(m) for m in frames):
            yield frames


def _begins_process(frame: re.Match[str]) -> bool:
    return frame["name"] == "_bootstrap" and frame["file"].endswith("/multiprocessing/process.py")
