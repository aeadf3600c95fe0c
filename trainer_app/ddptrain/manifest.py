"""What a training records in the manifest of a checkpoint, beside the fields of ``checkpoint_files``. No torch."""

from collections.abc import Mapping
from typing import Any

_FIELDS: dict[str, type] = {
    "config": dict, "dataDigest": str, "evaluation": dict, "complete": bool, "cursor": dict,
}  # fmt: skip
_REQUIRED = ("config", "dataDigest")


def accuracy_of(manifest: Mapping[str, Any]) -> float | None:
    """Return the accuracy on the test set; None if the checkpoint was not evaluated, or another program wrote it."""
    evaluation = manifest.get("evaluation")
    accuracy = evaluation.get("accuracy") if isinstance(evaluation, dict) else None
    return accuracy if isinstance(accuracy, int | float) else None


def fault_of(manifest: Mapping[str, Any]) -> str:
    """Return why no training of ddptrain has written the manifest; empty if one has."""
    wrong = [name for name in _REQUIRED if manifest.get(name) is None]
    wrong += [name for name, kind in _FIELDS.items() if type(manifest.get(name)) not in (kind, type(None))]
    if wrong:
        return f"its manifest has no valid {', '.join(wrong)}"
    if manifest.get("complete") and (accuracy_of(manifest) is None or "loss" not in manifest["evaluation"]):
        return "it is complete, but its manifest has no evaluation"
    return ""
