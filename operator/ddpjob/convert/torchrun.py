"""Commands of torchrun: what in them the operator of DDPJobs sets itself.

A flag of torchrun overrides the variables that the operator sets, so flags about nodes and rendezvous have to go.
https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from ddpjob.api.objects import Json
from ddpjob.api.spec import DAY
from ddpjob.convert.fields import Difference
from ddpjob.engine.injection import PYTHON, program_at, python_options
from ddpjob.engine.mistakes import LAUNCHER_MODULES, LAUNCHERS, SHELLS

_LEAST_SECONDS = 10  # of a rendezvous of a DDPJob
_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_REMOVED = frozenset(
    {
        *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr", "max-restarts"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone"),
    }
)
_WITHOUT_A_VALUE = frozenset(
    {"standalone", "m", "module", "no-python", "run-path", "use-env", "h", "help", "virtual-local-rank"}
)
_FIXED = re.compile(
    r"--(?:nnodes|num[-_](?:machines|nodes)|(?:node|machine)[-_]rank|(?:master|main[-_]process)[-_](?:addr|ip|port)|rdzv[-_]\w+)"
)
"""Flags of other launchers whose value is fixed in a command, although it differs between nodes or attempts."""
_IN_TEXT = re.compile(r"--(?:nnodes|node[-_]rank|master[-_](?:addr|port)|local[-_]addr|rdzv[-_]\w+)\b")
_NPROC_IN_TEXT = re.compile(r"--nproc[-_]per[-_]node(?:=|\s+)(\w+)")
_LAUNCHER_IN_TEXT = re.compile(
    r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\baccelerate\s+launch\b|\bdeepspeed\b"
)
_RANK_IN_TEXT = re.compile(r"\$[({]?(RANK|WORLD_SIZE|PET_RDZV_ENDPOINT|PET_RDZV_BACKEND)\b")


@dataclass
class Launch:
    """A command without the flags that the operator replaces.

    flags: those flags with their values, named as ``nproc-per-node``. starts_processes: whether the command starts the
    processes of a node; None if that is unknown, as for the entrypoint of an image.
    """

    command: list[str]
    args: list[str]
    flags: Mapping[str, str] = field(default_factory=dict)
    starts_processes: bool | None = None

    @property
    def max_restarts(self) -> int | None:
        flag = self.flags.get("max-restarts", "")
        return int(flag) if flag.isdecimal() else None

    def min_nodes(self, least: int | None, num_nodes: int) -> int | None:
        """Return ``minNodes``; None if all nodes are needed. least: of an elastic policy, before the flag."""
        flag, is_range, _ = self.flags.get("nnodes", "").partition(":")
        if least is None and is_range and flag.isdecimal():
            least = int(flag)
        return max(1, least) if least is not None and least < num_nodes else None

    def nproc(self, given: Any) -> int | None:
        """Return ``nprocPerNode``; None if torchrun finds it out. given: that of the job, which the flag replaces."""
        wanted = str(self.flags.get("nproc-per-node", given))
        if wanted.isdecimal():
            return int(wanted)
        return None if self.starts_processes is True else 1  # one process, whose RANK is the rank of the node

    def rendezvous(self, given: Mapping[str, str]) -> Json | None:
        """Return ``rendezvous`` with the time limit of --rdzv-conf. given: that of the job, which the flag replaces."""
        pairs = (pair.partition("=") for pair in self.flags.get("rdzv-conf", "").split(","))
        conf = {**given, **{key.strip(): value.strip() for key, _, value in pairs}}
        seconds = conf.get("timeout", conf.get("join_timeout", ""))
        return {"timeoutSeconds": min(max(int(seconds), _LEAST_SECONDS), DAY)} if seconds.isdecimal() else None


def launch(command: Sequence[str], args: Sequence[str], path: str, notes: list[Difference]) -> Launch:
    """Return a container's command as a DDPJob runs it; ``path``: of the container, for the notes."""
    words = [*command, *args]
    text = "\n".join(words)
    for name in dict.fromkeys(_RANK_IN_TEXT.findall(text)):
        use = {"RANK": "NODE_RANK", "WORLD_SIZE": "NNODES"}.get(name, "MASTER_ADDR and MASTER_PORT")
        why = f"it reads ${name}, which a DDPJob sets only for processes"
        notes.append(Difference(f"{path}.command", why, f"use {use}"))
    if not command:
        return Launch([], list(args))
    if PurePosixPath(words[0]).name in SHELLS:
        return _of_shell(command, args, text, path, notes)
    begin = _after_launcher(words)
    if begin is None:
        if (starts := _starts_processes(words)) and (fixed := _fixed_flags(words)):
            why = f"{', '.join(fixed)} would be the same in each pod"
            use = "use $(NNODES), $(NODE_RANK), $(MASTER_ADDR) and $(MASTER_PORT) as values"
            notes.append(Difference(f"{path}.command", why, use))
        return Launch(list(command), list(args), starts_processes=starts)
    removed, flags = _removed(words, begin)
    kept = [index for index in range(len(words)) if index not in removed]
    if removed:
        names = ", ".join(f"--{name}" for name in flags)
        notes.append(Difference(f"{path}.command", f"left out, because a DDPJob sets it in the environment: {names}"))
    return Launch(
        [words[index] for index in kept if index < len(command)],
        [words[index] for index in kept if index >= len(command)],
        flags,
        starts_processes=True,
    )


def _of_shell(command: Sequence[str], args: Sequence[str], text: str, path: str, notes: list[Difference]) -> Launch:
    """Return the command of a shell, whose text is not changed."""
    if flags := sorted(set(_IN_TEXT.findall(text))):
        notes.append(
            Difference(
                f"{path}.command",
                f"a shell's text is not changed, and {', '.join(flags)} in it override what a DDPJob sets",
                "remove them: torchrun reads them from the environment",
            )
        )
    found = _NPROC_IN_TEXT.search(text)
    return Launch(
        list(command),
        list(args),
        {"nproc-per-node": found.group(1)} if found else {},
        starts_processes=_LAUNCHER_IN_TEXT.search(text) is not None or None,
    )


def _after_launcher(words: Sequence[str]) -> int | None:
    """Return the index after torchrun, or after the module that is torchrun; None if the command runs none."""
    if (index := program_at(words)) is None:
        return None
    if PurePosixPath(words[index]).name == "torchrun":
        return index + 1
    if not PYTHON.fullmatch(PurePosixPath(words[index]).name):
        return None
    after = index + 1 + python_options(words[index + 1 :])
    match words[after : after + 2]:
        case ["-m", module] if module in _MODULES:
            return after + 2
        case [script, *_] if PurePosixPath(script).name == "torchrun":
            return after + 1
    return None


def _removed(words: Sequence[str], index: int) -> tuple[set[int], dict[str, str]]:
    """Return the indices of the words to remove, and the flags in them with their values."""
    removed: set[int] = set()
    flags: dict[str, str] = {}
    while index < len(words) and words[index].startswith("-"):
        name, equals, value = words[index].lstrip("-").partition("=")
        name = name.replace("_", "-")
        width = 1 if equals or name in _WITHOUT_A_VALUE else 2
        if name in _REMOVED:
            removed |= set(range(index, min(index + width, len(words))))
            flags[name] = value if equals else " ".join(words[index + 1 : index + width])
        index += width
    return removed, flags


def _fixed_flags(words: Sequence[str]) -> list[str]:
    """Return the flags about nodes and addresses whose value is no variable."""
    found = []
    for word, after in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if _FIXED.fullmatch(flag) and "$" not in (value if equals else after):
            found.append(flag)
    return found


def _starts_processes(words: Sequence[str]) -> bool:
    """Return whether the command has another program that starts several processes."""
    modules = {after for word, after in pairwise(words) if word == "-m"}
    return bool(modules & LAUNCHER_MODULES) or any(PurePosixPath(word).name in LAUNCHERS for word in words[:8])
