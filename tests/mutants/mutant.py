"""A mutant: one plausible error in the product, as a change of the text of one file. The TOML files here hold them."""

from __future__ import annotations

import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class NotApplicableError(Exception):
    """The text to replace is not in the file exactly once."""


@dataclass(frozen=True)
class Mutant:
    """One error.

    name: unique. breaks: the error in one sentence.
    file: relative to the root. old, new: the text that is replaced, which is there exactly once, and its replacement.
    tests: the arguments of pytest for tests that detect it. runs: in place of them, runs of the simulator that do.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    def apply_to(self, text: str) -> str:
        """Return the text of the file with the error. Raises ``NotApplicableError``."""
        if (found := text.count(self.old)) != 1:
            raise NotApplicableError(f"{self.file} has the text {found} times: {self.old.strip().splitlines()[0]}")
        return text.replace(self.old, self.new)


def areas() -> dict[str, list[Mutant]]:
    """Return the mutants of each file, by its name. Raises ``ValueError`` for two of one name."""
    found = {file.stem: _read(file) for file in sorted(FOLDER.glob("*.toml"))}
    names = [mutant.name for mutants in found.values() for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two mutants have the name {', '.join(twice)}")
    return found


def _read(file: Path) -> list[Mutant]:
    entries: list[dict[str, Any]] = tomllib.loads(file.read_text())["mutant"]
    return [
        Mutant(
            **entry
            | {"tests": tuple(entry.get("tests", ()))}
            | {"runs": tuple(run for text in entry.get("runs", ()) for run in _each(text))}
        )
        for entry in entries
    ]


def _each(text: str) -> Iterator[str]:
    """Yield a text with each number of the ranges in it, such as ``order=0..3``."""
    if (found := _RANGE.search(text)) is None:
        yield text
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from _each(f"{text[: found.start()]}{number}{text[found.end() :]}")


@contextmanager
def in_this_process(mutant: Mutant) -> Iterator[None]:
    """Give the functions of the mutant's module, which is imported, their code with the error, until the context ends.

    The change must be inside functions or methods that are in the module under their own names.
    """
    module = importlib.import_module(".".join(Path(mutant.file).with_suffix("").parts[1:]))
    changed = _codes(compile(mutant.apply_to((ROOT / mutant.file).read_text()), mutant.file, "exec"))
    replaced = [(function, function.__code__) for function in _functions(module)]
    for function, code in replaced:
        function.__code__ = changed[code.co_qualname]
    try:
        yield
    finally:
        for function, code in replaced:
            function.__code__ = code


def _codes(code: CodeType) -> dict[str, CodeType]:
    found = {code.co_qualname: code}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _codes(constant)
    return found


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions that the module defines, and the methods of its classes."""
    values = list(vars(module).values())
    values += [
        v for cls in values if isinstance(cls, type) and cls.__module__ == module.__name__ for v in vars(cls).values()
    ]
    for value in values:
        function = value
        if isinstance(function, property):
            function = function.fget
        elif isinstance(function, functools.cached_property):
            function = function.func
        function = getattr(function, "__func__", function)
        is_ours = isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__
        if is_ours:
            yield function
