"""Which frame of a stack is the program's own: not of the launcher, of Python's library, or of an installed package."""

import os
from collections.abc import Iterable
from pathlib import Path

_RUNTIME = Path(__file__).parent
STARTS_RANKS = _RUNTIME / "launcher" / "processes.py"  # a forked rank begins in it, on top of the launcher's frames
_LIBRARY = Path(os.__file__).parent
_INSTALLED = ("site-packages", "dist-packages")


def innermost_frame(frames: Iterable[tuple[str, int]]) -> str | None:
    """Return ``file.py:line`` of ``innermost``."""
    found = innermost(frames)
    return f"{found[0].name}:{found[1]}" if found else None


def innermost(frames: Iterable[tuple[str, int]]) -> tuple[Path, int] | None:
    """Return the innermost frame of the program; without one, the innermost frame that we know.

    The outermost file of the rank that is neither ours nor of Python's library is the program. Its package, or the
    directory of a script, is the program's own code. A virtual environment in that directory is not.

    Args:
        frames: (file, line), the outermost first.
    """
    known = [(Path(file), line) for file, line in frames if not file.startswith("<")]
    begins = max((index for index, (file, _) in enumerate(known) if file == STARTS_RANKS), default=0)
    known = known[begins:]
    ours = [frame for frame in known if _RUNTIME in frame[0].parents]
    others = [(file, line) for file, line in known if is_of_program(str(file))]
    root = _root(others[0][0]) if others else None
    own = [(file, line) for file, line in others if root in file.parents and not _is_installed(file, root)]
    found = own or ours or known
    return found[-1] if found else None


def is_of_program(file: str) -> bool:
    """Return whether code of this file is neither ours nor of Python's library."""
    path = Path(file)
    return not file.startswith("<") and _RUNTIME not in path.parents and not _is_of_library(path)


def _is_of_library(file: Path) -> bool:
    return _LIBRARY in file.parents and not _is_installed(file, _LIBRARY)


def _is_installed(file: Path, root: Path | None) -> bool:
    parts = file.relative_to(root).parts if root else ()
    return any(name in parts for name in _INSTALLED)


def _root(file: Path) -> Path:
    """Return the outermost package that holds the file; without a package, the file's directory."""
    root = file.parent
    while (root / "__init__.py").exists() and (root.parent / "__init__.py").exists():
        root = root.parent
    return root
