"""What the end of a plain program's log says about its failure: torchrun's block, and the last exception.

    [rank2]:   File "/work/train.py", line 25, in main          torch prefixes what a rank of a process group raises
    [rank2]: ValueError: sample 17 has 3 channels, expected 1
    ...
    Root Cause (first observed failure):                        torchrun's block follows, with the rank that ended first
    [0]:
      rank      : 2 (local_rank: 0)
      exitcode  : 1 (pid: 17055)                                of a signal: -9 (pid: 17055)  (SIGKILL)
      error_file: <N/A>
      traceback : To enable traceback see: ...                  with @record: the traceback, indented by two

The text is data of a tenant, which may be cut anywhere and be anything. Its formats, as far as they are read here:
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/multiprocessing/errors/__init__.py
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from signal import NSIG, SIGABRT, SIGTERM
from typing import Literal

from ddpjob.api import limits
from ddpjob.api.text import clean, clean_lines, shorten

SEARCHED_BYTES = 65_536
"""How much of the end of a log is searched."""
MAX_TEXT = 300
"""Characters of a message, of a place and of a last line."""
_MAX_LINE = 4000
_MAX_CONTINUATION = 8
"""Lines of a message after its first: NCCL names the closed connection in the last of four."""
_MAX_GAP = 20
"""Lines of other processes between the frames of a traceback and its exception."""


@dataclass(frozen=True, slots=True)
class LogFailure:
    """A failure as a log shows it; each part may be unknown.

    cause: "own": an exception of the program. "peer": an exception because the connection to a peer was closed.
    rank: the global rank that failed first on the node. exit_code, signal: how its process ended, by torchrun's block.
    exception, message: its type without the module, and the first line of its text. where: ``file:line`` of the
        innermost frame outside of installed packages.
    last_line: without an exception, the last line that neither torchrun nor a traceback wrote.
    """

    cause: Literal["own", "unknown", "peer"] = "unknown"
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None
    message: str = ""
    where: str | None = None
    last_line: str = ""


# Of gloo, NCCL and the TCP store, when a connection to a peer is closed.
_PEER_GONE = re.compile(
    r"connection (closed|reset|was closed|refused)|broken pipe|socket closed|remote process exited"
    r"|failed to recv, got 0 bytes|ncclRemoteError|remote error",
    re.IGNORECASE,
)
_BY_TORCH = re.compile(r"gloo|NCCL|c10d|TCPStore|monitoredBarrier|^(Connection (closed|reset) by peer|Broken pipe)")
# Problems of this machine that NCCL reports together with the collective that failed.
_OWN_OF_NCCL = re.compile(
    r"shared memory|/dev/shm|No space left|Cannot allocate memory|Too many open files|CUDA error|cuda failure"
    r"|invalid usage|socket interface",
    re.IGNORECASE,
)
_DISTRIBUTED = frozenset(
    {"RuntimeError", "Error", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
"""Types, without the module, of what torch.distributed raises. A ConnectionResetError is of another connection."""

_PREFIX = re.compile(r"((?:\[[a-z]+\d+\]: ?)+)(.*)")
_FRAME = re.compile(r'( *)File "([^"]+)", line (\d+)(?:, in .*)?$')
_FAULT_FRAME = re.compile(r' *File "([^"]+)", line (\d+) in ')
_TRACEBACK = re.compile(r"( *)(?:traceback *: |Original |Exception Group )?Traceback \(most recent call last\):$")
_GROUP = re.compile(r" *\+ (Exception Group Traceback .*)")
_MARGIN = re.compile(r" *\| ?(.*)")
_DIVIDER = re.compile(r" *(?:\+-)?\+-{8,}(?: (\d+|\.{3}) -+)?$")
_EXCEPTION = re.compile(r"((?:[A-Za-z_]\w*(?:\.|::))*[A-Za-z_]\w*)(?:: (.*)|:?$)")
_IS_ERROR = re.compile(r"(Error|Exception|Exit|Interrupt|Timeout|Failure)$")
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_IGNORED = re.compile(r"Exception ignored|Exception in thread|Error in atexit|--- Logging error")
_WHAT = re.compile(r"\s*what\(\): +(.*)")
_THROWN = re.compile(r"terminate called after throwing an instance of '([^']+)'")
_FATAL = re.compile(r"Fatal Python error: ")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python\d[\d.]*/|^<frozen |^<string>")
_LAUNCHER = re.compile(
    r"/torch/distributed/(run|launch|launcher/\w+)\.py$|/bin/torchrun$|/accelerate/commands/|/deepspeed/launcher/"
)
_LAUNCHERS_OWN = frozenset({"ChildFailedError", "CalledProcessError"})
"""What a launcher raises because a process of the node failed."""
_END_OF_ERROR_FILE = re.compile(r'", "timestamp": "\d+"\}(, "errorCode": -?\d+)?\}\}\s*$')
_OF_TORCHRUN = re.compile(r"\[?[WEIF]\d{4} [\d:.]+ |[=*-]{10,}$|\S+ FAILED$|Failures:$|\s*<NO_OTHER_FAILURES>$")
_BLOCK = re.compile(r"Root Cause\b.*:$")
_BORDER = re.compile(r"[=*]{10,}$")
_FIELD = re.compile(r"  (rank|exitcode|traceback|msg) *: ?(.*)")
_NO_TEXT = re.compile(r'To enable traceback see|Signal \d+ |"?Process failed with exitcode|Traceback \(most')


@dataclass(slots=True)
class _Process:
    """An entry of torchrun's block."""

    rank: int | None = None
    local_rank: int | None = None
    code: int | None = None
    text: str = ""

    @property
    def signal(self) -> int | None:
        return -self.code if self.code is not None and -NSIG < self.code < 0 else None


@dataclass(slots=True)
class _Raised:
    """A traceback, and after its last line the exception.

    prefix: of its lines, for example "[rank2]: ". indent: of its frames. gap: lines of others since the last frame.
    lines: the text of the exception. follows_peer: it was raised because of an exception that shows a lost peer.
    is_ignored: Python or the program went on after it, so it ended no process.
    """

    prefix: str
    indent: int
    is_ignored: bool = False
    frames: list[tuple[str, str]] = field(default_factory=list)
    gap: int = 0
    exception: str = ""
    lines: list[str] = field(default_factory=list)
    follows_peer: bool = False

    @property
    def is_of_launcher(self) -> bool:
        return any(_LAUNCHER.search(path) for path, _ in self.frames)

    @property
    def type(self) -> str:
        return re.split(r"\.|::", self.exception)[-1]

    @property
    def cause(self) -> Literal["own", "unknown", "peer"]:
        """Whose failure it shows; an error of the program that follows from a lost peer is the peer's."""
        return "peer" if self.follows_peer else _cause(self.type, "\n".join(self.lines))

    def is_of(self, process: _Process) -> bool:
        """Whether the lines have the prefix of a process: ``[rank2]:`` of torch, ``[default0]:`` of torchrun's tee."""
        if (rank := _number(r"\[rank(\d+)\]", self.prefix)) is not None:
            return rank == process.rank
        local = _number(r"\[[a-z]+(\d+)\]", self.prefix)
        return local is not None and local == process.local_rank


def log_failure(text: str) -> LogFailure | None:
    """Return what the end of a log says about a failure; None if it says nothing."""
    lines = list(_ungrouped(line[:_MAX_LINE] for line in clean_lines(text[-SEARCHED_BYTES:]).split("\n")))
    root = _root_cause(lines)
    found = _named(root or _Process(), _tracebacks(lines), _aborted(lines))
    if found.exception is None:
        found = replace(found, last_line=_last_line(lines, root))
    return found if found != LogFailure() else None


def _ungrouped(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, of an exception group without its margin: and of its exceptions only the first, which has
    ended the other tasks."""
    hidden: dict[str, float] = {}
    """By the prefix of lines of a group: the column of the divider above exceptions that are left out."""
    for line in lines:
        prefix, text = _split(line)
        divider = _DIVIDER.match(text)
        if (found := _GROUP.match(text)) is not None:
            hidden.setdefault(prefix, inf)
        elif prefix not in hidden:
            yield line
            continue
        elif divider is not None:
            if (column := text.rindex("+")) <= hidden[prefix]:
                hidden[prefix] = inf if divider[1] in (None, "1") else column
            continue
        elif (found := _MARGIN.match(text)) is None:
            del hidden[prefix]
            yield line
            continue
        if hidden[prefix] == inf:
            yield f"{prefix} {found[1]}" if prefix else found[1]


def error_file(message: str) -> str | None:
    """Return the traceback in a file that ``@record`` of torch wrote (TORCHELASTIC_ERROR_FILE); None for other text.

    A kubelet keeps the last 4,096 bytes of it, so its beginning may be missing.
    """
    end = _END_OF_ERROR_FILE.search(message)
    if end is None:
        return None
    _, _, stack = message[: end.start()].rpartition('"py_callstack": "')
    try:
        return clean(json.loads(f'"{stack}"'))
    except ValueError:  # cut within an escape sequence
        return stack.replace("\\n", "\n").replace('\\"', '"')


def _root_cause(lines: Sequence[str]) -> _Process | None:
    """Return the process that torchrun's block names; not a process that torchrun itself stopped."""
    start = next((n for n in reversed(range(len(lines))) if _BLOCK.match(lines[n])), None)
    if start is None:
        return None
    root = _process(lines[start + 1 :])
    if root.signal != SIGTERM:
        return root
    first = next((n for n in reversed(range(start)) if lines[n].startswith("Failures:")), start)
    entries = [n for n in range(first, start) if re.match(r"\[\d+\]:$", lines[n])]
    others = (_process(lines[entry + 1 : end]) for entry, end in pairwise([*entries, start]))
    return next((other for other in others if other.code is not None and other.signal != SIGTERM), root)


def _process(lines: Sequence[str]) -> _Process:
    process, seen = _Process(), set[str]()
    for line in lines:
        if _BORDER.match(line):
            break
        if (match := _FIELD.match(line)) is None or match[1] in seen:
            continue
        seen.add(match[1])
        match match[1]:
            case "rank":
                process.rank, process.local_rank = _number(r"(\d+)", match[2]), _number(r"local_rank: (\d+)", match[2])
            case "exitcode":
                code = _number(r"-?(\d+)", match[2])
                process.code = -code if code is not None and match[2].startswith("-") else code
            case _:
                process.text = "" if _NO_TEXT.match(match[2]) else match[2].strip()
    limit = limits.MAX_NODES * limits.MAX_NPROC_PER_NODE
    if process.rank is not None and process.rank >= limit:
        process.rank = None
    return process


def _tracebacks(lines: Sequence[str]) -> list[_Raised]:
    """Return the tracebacks that end with an exception, in the order of their ends."""
    is_open: dict[str, _Raised] = {}
    ended: dict[str, _Raised] = {}
    found, is_ignored = [], False
    for line in lines:
        prefix, text = _split(line)
        current = is_open.get(prefix)
        if (match := _TRACEBACK.match(text)) is not None:
            before = ended.pop(prefix, None)
            follows_peer = before is not None and before.cause == "peer" and any(map(_CHAINED.match, before.lines))
            is_open[prefix] = _Raised(prefix, len(match[1]) + 2, is_ignored, follows_peer=follows_peer)
        elif (match := _FRAME.match(text)) is not None:
            if current is None:  # its first line is cut off
                current = is_open[prefix] = _Raised(prefix, len(match[1]), is_ignored)
                ended.pop(prefix, None)
            current.frames.append((match[2], match[3]))
            current.indent, current.gap = len(match[1]), 0
        elif current is not None:
            if _take(current, text):
                found.append(current)
                ended[prefix] = is_open.pop(prefix)
            elif current.gap > _MAX_GAP:
                del is_open[prefix]
        elif (before := ended.get(prefix)) is not None:
            if _OF_TORCHRUN.match(text) or len(before.lines) > _MAX_CONTINUATION:
                del ended[prefix]
            else:
                before.lines.append(text)
        is_ignored = _IGNORED.search(text) is not None
    return found


def _take(raised: _Raised, text: str) -> bool:
    """Take a line after a frame; return whether it is the exception. A line of another process counts as a gap."""
    indent = len(text) - len(text.lstrip(" "))
    if indent >= raised.indent or not raised.frames:
        return False
    match = _EXCEPTION.match(text[max(raised.indent - 2, 0) :])
    is_next = raised.gap == 0 and match is not None and (match[1][:1].isupper() or "." in match[1])
    if match is None or indent > max(raised.indent - 2, 0) or not (is_next or _IS_ERROR.search(match[1])):
        raised.gap += 1
        return False
    raised.exception, raised.lines = match[1], [match[2] or ""]
    return True


def _aborted(lines: Sequence[str]) -> _Raised | None:
    """Return the C++ exception that ended a process, or the frames of a fatal signal that faulthandler wrote."""
    found = None
    for number, line in enumerate(lines):
        prefix, text = _split(line)
        if (match := _THROWN.search(text)) is not None:
            what = (_WHAT.match(_split(other)[1]) for other in lines[number + 1 : number + 3])
            found = _Raised(prefix, 0, exception=match[1], lines=[next((m[1] for m in what if m), "")])
        elif _FATAL.match(text):
            found = _Raised(prefix, 0)
        elif found is not None and not found.exception and (match := _FAULT_FRAME.match(text)) is not None:
            found.frames.insert(0, (match[1], match[2]))  # the most recent call is the first line
    return found


def _named(root: _Process, raised: Sequence[_Raised], aborted: _Raised | None) -> LogFailure:
    """Return the failure of the process that failed first.

    An exception with the prefix of a rank was not caught, so it ended that rank. Its process may do more later: with
    gloo it may abort while the interpreter ends. A traceback without a prefix may have been caught and logged, so the
    exit code in torchrun's block decides whether it counts: an exception that nothing catches ends Python with 1.
    """
    is_known, signal = root.code is not None, root.signal
    base = LogFailure(rank=root.rank, exit_code=root.code if signal is None else None, signal=signal)
    programs = [each for each in raised if not each.is_ignored and not each.is_of_launcher]
    of_ranks = [each for each in programs if each.prefix]
    of_root = [each for each in of_ranks if each.is_of(root)]
    logged = [each for each in programs if not each.prefix]
    if found := _own(of_root) or _own(of_ranks):
        return _with(base, found)
    if signal not in (None, SIGTERM, SIGABRT):
        return replace(base, cause="own", where=_place(aborted.frames) if aborted else None)
    if signal == SIGABRT and not of_root and aborted is not None and aborted.exception:
        return _with(base, aborted)
    if base.exit_code not in (None, 1):
        return base
    if of_root:
        return _with(base, of_root[-1])
    if found := _own(logged) or (logged[-1] if logged else None):
        return _with(base, found)
    if is_known:
        return base
    of_launcher = [each for each in raised if each.is_of_launcher and each.type not in _LAUNCHERS_OWN]
    rest = [*of_launcher, *([aborted] if aborted else []), *of_ranks]
    return _with(base, rest[-1]) if rest else base


def _own(raised: Sequence[_Raised]) -> _Raised | None:
    return next((each for each in reversed(raised) if each.cause == "own"), None)


def _with(base: LogFailure, raised: _Raised) -> LogFailure:
    rank = _number(r"\[rank(\d+)\]", raised.prefix)
    text = _text([line.strip() for line in raised.lines if line.strip() and not _CHAINED.match(line)])
    return replace(
        base,
        cause=raised.cause if raised.exception else "unknown",
        rank=base.rank if rank is None else rank,
        exit_code=base.exit_code if rank in (None, base.rank) else None,  # else how it ended is not known
        signal=None if raised.frames else base.signal,
        exception=raised.type[: limits.MAX_REASON] or None,
        message=shorten(text, MAX_TEXT),
        where=_place(raised.frames),
    )


def _text(lines: Sequence[str]) -> str:
    """Return the first line of an exception, with the line that names the error: NCCL's last, or after a colon."""
    first, after = next(iter(lines), ""), next((after for line, after in pairwise(lines) if line == "Last error:"), "")
    if not after and first.endswith(":") and len(lines) > 1:
        after = lines[1]
    return f"{first.rstrip(':')}: {after}" if after else first


def _cause(name: str, text: str) -> Literal["own", "unknown", "peer"]:
    if name not in _DISTRIBUTED or _OWN_OF_NCCL.search(text) or not (name[:4] == "Dist" or _BY_TORCH.search(text)):
        return "own"
    if _PEER_GONE.search(text):
        return "peer"
    return "unknown"  # perhaps a peer hangs, or never came, or the communicator was aborted because another rank failed


def _place(frames: Sequence[tuple[str, str]]) -> str | None:
    """Return file and line of the innermost frame of the user's code; of the innermost frame if there is none."""
    if not frames:
        return None
    path, line = next((frame for frame in reversed(frames) if not _LIBRARY.search(frame[0])), frames[-1])
    return shorten(f"{path}:{line}", MAX_TEXT)


def _last_line(lines: Sequence[str], root: _Process | None) -> str:
    """Return the last line of the log; with torchrun's block, the last of the program before what torchrun wrote."""
    if root is None:
        return shorten(next((line.strip() for line in reversed(lines) if line.strip()), ""), MAX_TEXT)
    if root.text:
        return shorten(root.text, MAX_TEXT)
    end = next((n for n, line in enumerate(lines) if "/elastic/multiprocessing/api.py" in line), 0)
    # A cut line is the first, and lines with the prefix of a rank are of another rank's traceback.
    program = (line.strip() for line in reversed(lines[1:end]) if not _split(line)[0] and not _OF_TORCHRUN.match(line))
    return shorten(next(filter(None, program), ""), MAX_TEXT)


def _split(line: str) -> tuple[str, str]:
    match = _PREFIX.match(line)
    return (match[1].strip(), match[2]) if match else ("", line)


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match is not None and len(match[1]) <= limits.MAX_DIGITS + 2 else None
