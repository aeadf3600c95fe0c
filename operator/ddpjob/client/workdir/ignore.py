"""The rules of ``.gitignore`` files, with git's meaning of them: https://git-scm.com/docs/gitignore

The last match counts, and a file closer to the path comes later. Whoever walks a tree asks for each directory before
what is below it, because nothing below an ignored directory can be included again.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = ".gitignore"
# The tokens of a pattern; what is none, such as a bracket that is not closed, makes a pattern that matches nothing.
_TOKENS = re.compile(
    r"(?P<levels>(?:^|(?<=/))\*\*+/)"  # any number of directories
    r"|(?P<below>(?:^|(?<=/))\*\*+$)"  # everything inside
    r"|(?P<text>\*+)|(?P<character>\?)"
    r"|\[(?P<negated>[!^]?)(?P<set>\]?(?:\[:[a-z]+:\]|\\.|[^\]\\])*)\]"
    r"|\\(?P<escaped>.)|(?P<literal>[^\\\[])",
    re.DOTALL,
)
_FIXED = {"below": ".+", "character": "[^/]"}
_IN_SET = re.compile(r"\[:(?P<kind>[a-z]+):\]|(?P<low>\\.|[^\\])(?:-(?P<high>\\.|[^\\]))?", re.DOTALL)
_KINDS = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \t",
    "digit": "0-9",
    "lower": "a-z",
    "punct": re.escape("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"),
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


class _Rule(NamedTuple):
    """One line. is_whole: the pattern is for the whole path below the file's directory, not for a name alone."""

    pattern: re.Pattern[str]
    ignores: bool
    for_directories: bool
    is_whole: bool


class Rules:
    """The rules of one file. base: its directory, below which they apply. flags: of their expressions."""

    def __init__(self, lines: Iterable[str], base: Path, flags: re.RegexFlag = re.NOFLAG) -> None:
        self._base = base
        self._rules = [rule for line in lines if (rule := _rule(line, flags)) is not None]

    @classmethod
    def of(cls, directory: Path) -> "Rules | None":
        """Return the rules of the directory's own file, None without one. Raises ``OSError``."""
        file = directory / FILE
        if not file.is_file():
            return None
        return cls(file.read_text(encoding="utf-8", errors="surrogateescape").split("\n"), directory)

    def verdict(self, path: Path, *, is_directory: bool) -> bool | None:
        """Return whether the last rule that matches ignores the path, None if none matches it."""
        whole = path.relative_to(self._base).as_posix()
        for rule in reversed(self._rules):
            if rule.for_directories and not is_directory:
                continue
            if rule.pattern.fullmatch(whole if rule.is_whole else path.name):
                return rule.ignores
        return None


def verdict(path: Path, rules: Sequence[Rules], *, is_directory: bool) -> bool | None:
    """Return whether the rules, those of directories further down last, ignore a path; None if none matches it."""
    verdicts = (each.verdict(path, is_directory=is_directory) for each in reversed(rules))
    return next((found for found in verdicts if found is not None), None)


def _rule(line: str, flags: re.RegexFlag) -> _Rule | None:
    """Return the rule of a line, None for a comment and for what matches nothing."""
    found = re.fullmatch(r"(?!#)(!?)((?:\\.|[^\\])*?) *", line, re.DOTALL)  # a space at the end counts if it is escaped
    if found is None or not found[2].strip("/"):
        return None
    text = found[2].removesuffix("/")
    expression = _expression(text.removeprefix("/"))
    if expression is None:
        return None
    return _Rule(re.compile(expression, flags), not found[1], found[2].endswith("/"), "/" in text)


def _expression(pattern: str) -> str | None:
    """Return the regular expression of a pattern, None if it can match nothing.

    The first match of what is between two wildcards is never given up (atomic groups, as in ``fnmatch``): one line with
    22 stars took 33 s for each name of 30 characters.
    """
    runs, position = [[[""]]], 0  # between "**/": names, of which each is what is between its stars
    while position < len(pattern):
        if (token := _TOKENS.match(pattern, position)) is None:
            return None
        position = token.end()
        name = runs[-1][-1]
        if token["levels"]:
            runs.append([[""]])
        elif token["text"]:
            name.append("")
        elif token["set"] is not None:
            name[-1] += f"(?!/)[{'^' if token['negated'] else ''}{_set(token['set'])}]"
        elif (character := token["escaped"] or token["literal"]) == "/":
            runs[-1].append([""])
        else:
            name[-1] += _FIXED.get(str(token.lastgroup)) or re.escape(character)
    first, *others = ["/".join(map(_name, run)) for run in runs]
    if not others:
        return first
    return "".join([first, *(f"(?>(?:[^/]*/)*?{run})" for run in others[:-1]), "(?:[^/]*/)*", others[-1]])


def _name(parts: Sequence[str]) -> str:
    """Return the expression of one name of a path, from what is between its stars."""
    first, *others = parts
    return "".join([first, *(f"(?>[^/]*?{part})" for part in others[:-1]), *(f"[^/]*{part}" for part in others[-1:])])


def _set(text: str) -> str:
    return "".join(map(_member, _IN_SET.finditer(text)))


def _member(token: re.Match[str]) -> str:
    """Return a character, a range or a class of a set; of a range that is empty its first character is left."""
    if token["kind"]:
        return _KINDS.get(token["kind"], "")
    low, high = (part and part[-1] for part in (token["low"], token["high"]))
    return re.escape(low) + (f"-{re.escape(high)}" if high and low <= high else "")
