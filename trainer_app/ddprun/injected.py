#!/usr/bin/env python3
"""``ddprun`` in an image that lacks it: this file is the program DIR/bin/ddprun of a copy (``--copy-to``).

It begins in any ``python3`` of the image, chooses the interpreter that has torch, and makes the package importable for
the ranks. So it is written for Python 3.6 and imports the package last: an interpreter that is too old says so, in the
format of a report, which it cannot import.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import List, NoReturn, Optional

OLDEST = (3, 10)
PYTHON_OF = "--python-of"
"""First argument: run under the Python of the program that follows, which is what the command was before."""
CODE, KIND = 71, "RanksImpossible"  # of errors.RanksError
_HEAD = 4096
_PYTHON = re.compile(r"(python|pypy)[0-9.]*$")
# What pip and uv write if the path of the interpreter is too long for the kernel, or contains a blank.
_SHELL_HEADER = re.compile(r"""'''exec' (['"]?)(/.+?)\1 "\$0" """)


def main(argv: List[str]) -> NoReturn:
    """Run the copied ``ddprun`` with these arguments."""
    program = Path(__file__).absolute()
    if argv[:1] == [PYTHON_OF]:
        interpreter, argv = python_of(argv[1]), argv[2:]
        if interpreter is not None and not _runs_here(interpreter):
            os.execv(str(interpreter), [str(interpreter), str(program), *argv])  # noqa: S606 - no shell
    problem = unsuitable()
    if problem:
        _refuse(*problem)
    library = str(program.parents[1] / "lib")
    is_path_safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    sys.path.insert(0 if is_path_safe else 1, library)  # behind the folder of this program, which ``run`` removes
    # For what the ranks start, and for ranks that are not forked. What the image or the job sets stays behind it.
    for name, first in (("PYTHONPATH", library), ("PATH", str(program.parent))):
        os.environ[name] = os.pathsep.join(part for part in (first, os.environ.get(name)) if part)
    sys.argv = [str(program), *argv]
    from ddprun.cli import run

    run()


def python_of(program: str) -> Optional[Path]:
    """Return the interpreter in the first line of a program on PATH, or else the one beside it; None without both."""
    found = shutil.which(program)
    if found is None:
        return None
    try:
        with Path(found).open("rb") as file:
            head = file.read(_HEAD).decode(errors="replace")
    except OSError:
        return None
    named = _interpreter(head)
    beside = [str(Path(found).resolve().with_name(name)) for name in ("python3", "python")]
    for candidate in [named, *beside] if named else beside:
        if os.access(candidate, os.X_OK):
            return Path(candidate)
    return None


def _interpreter(head: str) -> Optional[str]:
    line, _, rest = head.partition("\n")
    words = line[2:].split() if line.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [shutil.which(word) or "" for word in words[1:] if _PYTHON.match(word)]
    if words and _PYTHON.match(Path(words[0]).name):
        return words[0]
    in_shell = _SHELL_HEADER.match(rest)
    return in_shell.group(2) if in_shell else None


def _runs_here(interpreter: Path) -> bool:
    """Return whether this process runs it. An environment's python is a link to another Python: its folder counts."""
    here = Path(sys.executable)
    return interpreter.parent == here.parent and interpreter.resolve() == here.resolve()


def unsuitable() -> Optional[List[str]]:
    """Return why this interpreter cannot run ``ddprun``, and what to do; None if it can."""
    version = ".".join(str(number) for number in sys.version_info[:3])
    oldest = ".".join(str(number) for number in OLDEST)
    python = f"{sys.executable} (Python {version})"
    if sys.version_info[:2] < OLDEST:
        return [f"{python} is too old for ddprun, which needs Python {oldest}", f"use an image with Python {oldest}"]
    if importlib.util.find_spec("torch") is None:
        advice = "begin the command with the Python that has it: [/path/to/python, -m, torch.distributed.run, train.py]"
        return [f"{python} has no torch", advice]
    return None


def _refuse(message: str, advice: str) -> NoReturn:
    print(f"error: {message}\nnext:  {advice}", file=sys.stderr)
    report = {"schema": 3, "outcome": "failed", "code": CODE, "kind": KIND, "cause": "own", "rank": None}
    path = Path(os.environ.get("DDPJOB_TERMINATION_LOG") or "/dev/termination-log")
    if path.is_file():
        try:
            path.write_text(json.dumps({**report, "message": message, "next": advice}))
        except OSError as error:
            print(f"warning: {path}: {error.strerror}", file=sys.stderr)
    sys.exit(CODE)


if __name__ == "__main__":
    main(sys.argv[1:])
