"""How the verdict of ``preflight`` looks to a person and to a program. No torch: the launcher prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddptrain.finite import dumps


def text(found: Mapping[str, Any], *, as_json: bool) -> str:
    """The verdict as one JSON object, or as two tables."""
    if as_json:
        return dumps(found)
    lines = [f"{check['verdict']:<8} {check['check']:<16} {check['detail']}" for check in found["checks"]]
    if found["bandwidth"]:
        lines.append(f"\n{'collective':<16}{'bytes':>12}{'ms':>10}{'algbw GB/s':>12}{'busbw GB/s':>12}")
    for row in found["bandwidth"]:
        milliseconds = row["seconds"] * 1000
        lines.append(
            f"{row['collective']:<16}{row['bytes']:>12,}{milliseconds:>10.2f}{row['algbw']:>12.3f}{row['busbw']:>12.3f}"
        )
    verdict = "fit for training" if found["code"] == 0 else f"not fit, code {found['code']}"
    return "\n".join([*lines, "", f"{found['worldSize']} rank(s): {verdict}"])
