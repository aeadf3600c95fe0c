"""Print how often ``ddpjob why`` is right in the labelled situations, per family; with --write, into the documents.

``python -m tests.client.accuracy [--write] [--wrong]``; --wrong prints what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.client.verdict.explanation import Explanation
from tests.benchmarks.report import write_section
from tests.client.situations import answer, situations

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "why-accuracy.md"
HELD_BACK = "held-back"
"""The family that was written after the rules were corrected; nothing is changed for it."""
_CULPRIT = {"node": "node_rank", "rank": "rank", "where": "where", "step": "step", "missing": "missing_nodes"}


@dataclass(frozen=True)
class Judged:
    """A situation and whether the answer is that of its label.

    culprit: None if the label names none.
    """

    situation: Json
    found: Explanation
    stage: bool
    next: bool
    culprit: bool | None

    @property
    def is_confidently_wrong(self) -> bool:
        return not self.stage and self.found.confidence == "High"

    def __str__(self) -> str:
        found = self.found
        parts = (("stage", self.stage), ("next", self.next), ("culprit", self.culprit is not False))
        wrong = ", ".join(name for name, is_right in parts if not is_right) + " !" * self.is_confidently_wrong
        said = f"{found.stage}/{found.reason} {found.confidence} abnormal={found.is_abnormal} node={found.node_rank}"
        lines = (str(self.situation["label"]), said, f"hint: {found.hint}", f"next: {found.next}", found.sentence)
        return "\n    ".join((f"{self.situation['name']} ({wrong})", *lines))


def judge(situation: Json, found: Explanation | None = None) -> Judged:
    """Compare the answer, which is asked for here unless a real cluster gave it, with the label.

    stage, reason: those accepted. abnormal: true if absent; "any" if both are right. next: key words that ``next`` has,
    each with its alternatives. never: key words that neither ``hint`` nor ``next`` has.
    """
    found, label = found or answer(situation), situation["label"]
    stages = [label["stage"]] if isinstance(label["stage"], str) else label["stage"]
    is_stage = found.stage in stages and found.reason in label.get("reason", [found.reason])
    is_stage = is_stage and label.get("abnormal", True) in ("any", found.is_abnormal)
    is_stage = is_stage and not (label.get("confidence") == "not High" and found.confidence == "High")
    todo, advice = (found.next or "").lower(), f"{found.hint} {found.next}".lower()
    is_next = all(any(word.lower() in todo for word in words.split("|")) for words in label.get("next", ()))
    is_next = is_next and not any(word.lower() in advice for word in label.get("never", ()))
    named = {key: field for key, field in _CULPRIT.items() if key in label}
    is_culprit = all(_is_same(getattr(found, field), label[key]) for key, field in named.items())
    return Judged(situation, found, is_stage, is_next, is_culprit if named else None)


def _is_same(found: object, wanted: object) -> bool:
    return found == wanted or (isinstance(wanted, str) and str(found).endswith(f"/{wanted}"))


def table(judged: dict[str, list[Judged]]) -> str:
    """Return the table of the families, with their sum but for the family that is held back."""
    all_ = [each for family, found in judged.items() if family != HELD_BACK for each in found]
    rows = [_row(name, found) for name, found in judged.items() if name != HELD_BACK]
    rows.append(_row("**all**", all_))
    if HELD_BACK in judged:
        rows.append(_row("held back", judged[HELD_BACK]))
    head = "| Family | Situations | Stage and reason right | Next right | Culprit right | Confidently wrong |"
    return "\n".join((head, "|---|---|---|---|---|---|", *rows))


def _row(name: str, found: list[Judged]) -> str:
    named = [each for each in found if each.culprit is not None]
    shares = (
        _share((each.stage for each in found), len(found)),
        _share((each.next for each in found), len(found)),
        _share((bool(each.culprit) for each in named), len(named)),
        str(sum(each.is_confidently_wrong for each in found)),
    )
    return f"| {name} | {len(found)} | {' | '.join(shares)} |"


def _share(right: Iterable[bool], count: int) -> str:
    number = sum(right)
    return f"{number} of {count} ({100 * number / count:.1f} %)" if count else "-"


def main() -> None:
    judged = {family: [judge(each) for each in found] for family, found in situations().items()}
    text = table(judged)
    if "--wrong" in sys.argv:
        wrong = [e for found in judged.values() for e in found if not (e.stage and e.next and e.culprit is not False)]
        print("\n".join(map(str, wrong)))
    print(text)
    if "--write" in sys.argv:
        write_section("accuracy", text, PAGE)


if __name__ == "__main__":
    main()
