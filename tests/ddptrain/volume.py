"""A volume that logs every operation, and the states in which a power cut after any of them may leave it.

The model is POSIX's, not one file system's: what a file holds survives its own fsync and nothing else; a name (created,
renamed or removed) survives the fsync of its directory. What is not synced may survive or not, each thing by itself.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Node:
    """A file or directory, as the process sees it and as it is synced to the disk."""

    is_directory: bool
    data: bytes = b""
    synced_data: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    synced_entries: dict[str, Node] = field(default_factory=dict)


class LoggedVolume:
    """Logs the real operations of the code under test below ``root``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._patch = root, monkeypatch
        self.log: list[tuple[Any, ...]] = []
        self._open: dict[int, str] = {}
        for name in ("mkdir", "rmdir", "unlink"):
            self._watch(name, lambda _, path, *more, name=name: (name, self._inside(path)))
        for name in ("rename", "replace"):
            self._watch(name, lambda _, source, target: ("rename", self._inside(source), self._inside(target)))
        self._watch("open", self._opened)
        self._watch("write", lambda count, to, data: ("write", self._open.get(to), bytes(data[:count])))
        self._watch("fsync", lambda _, to: ("fsync", self._open.get(to)))
        close = os.close  # before it, because another thread may get the same descriptor
        monkeypatch.setattr(os, "close", lambda descriptor: (self._open.pop(descriptor, None), close(descriptor))[1])

    def _watch(self, name: str, entry: Callable[..., tuple[Any, ...]]) -> None:
        """Log what ``entry`` makes of the result and the arguments of a function, if it is about a path inside."""
        real = getattr(os, name)

        def logged(*args: Any, **more: Any) -> Any:
            result = real(*args, **more)
            if (found := entry(result, *args))[1] is not None:
                self.log.append(found)
            return result

        self._patch.setattr(os, name, logged)

    def _opened(self, descriptor: int, path: object, flags: int, *more: object) -> tuple[str, str | None]:
        if (inside := self._inside(path)) is not None:
            self._open[descriptor] = inside
        return "create", inside if flags & os.O_CREAT else None

    def _inside(self, path: object) -> str | None:
        try:
            return str(Path(os.fspath(path)).relative_to(self._root))  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return None


def crashes(log: list[tuple[Any, ...]], dice: random.Random, *, each: int = 3) -> Iterator[tuple[int, str, Node]]:
    """Yield (operations done, kind of crash, what is left) for a power cut after every prefix of ``log``.

    Args:
        each: random survivals per prefix, besides the two extremes: nothing unsynced survives; all names do, no data.
    """
    disk = Node(is_directory=True)
    for done in range(len(log) + 1):
        if done:
            _apply(disk, log[done - 1])
        yield done, "nothing unsynced", _left(disk, lambda: False)
        yield done, "names without data", _left(disk, lambda: True)
        for _ in range(each):
            yield done, "some", _left(disk, lambda: dice.random() < 0.5)


def _apply(disk: Node, operation: tuple[Any, ...]) -> None:
    kind, path, *rest = operation
    folder, name = _folder(disk, path)
    if kind == "mkdir":
        folder.entries[name] = Node(is_directory=True)
    elif kind == "create":
        folder.entries.setdefault(name, Node(is_directory=False))
    elif kind in ("unlink", "rmdir"):
        del folder.entries[name]
    elif kind == "rename":
        target, new = _folder(disk, rest[0])
        target.entries[new] = folder.entries.pop(name)
    else:
        node = folder.entries[name] if name else disk
        if kind == "write":
            node.data += rest[0]
        elif node.is_directory:
            node.synced_entries = dict(node.entries)
        else:
            node.synced_data = node.data


def _folder(disk: Node, path: str) -> tuple[Node, str]:
    *above, name = Path(path).parts or ("",)
    for part in above:
        disk = disk.entries[part]
    return disk, name


def _left(node: Node, survives: Any) -> Node:
    """Return what is left of ``node``; ``survives()`` decides for each name that was not synced."""
    if not node.is_directory:
        return Node(is_directory=False, data=node.synced_data)
    entries = {}
    for name in {**node.synced_entries, **node.entries}:
        old, new = node.synced_entries.get(name), node.entries.get(name)
        chosen = old if old is new or not survives() else new
        if chosen is not None:
            entries[name] = _left(chosen, survives)
    return Node(is_directory=True, entries=entries)


def put(node: Node, path: Path) -> None:
    """Create at ``path`` what ``node`` describes."""
    if node.is_directory:
        path.mkdir()
        for name, inner in node.entries.items():
            put(inner, path / name)
    else:
        path.write_bytes(node.data)
