"""Which manifests are those of a training of ddptrain."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.training.checkpointer import fault_of

TRAINED: dict[str, Any] = {"config": {}, "dataDigest": "d", "evaluation": None, "complete": False}
ENDED = {"complete": True, "evaluation": {"accuracy": 0.9, "loss": 0.1}}


def test_a_training_and_its_end_have_no_fault() -> None:
    assert fault_of(TRAINED) == fault_of(TRAINED | ENDED) == ""


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"config": []}, "no valid config"),
        ({"config": None, "dataDigest": {}}, "no valid config, dataDigest"),
        ({"evaluation": "99 %"}, "no valid evaluation"),
        ({"complete": True}, "no evaluation"),
        (ENDED | {"evaluation": {"accuracy": "99 %", "loss": 0.1}}, "no evaluation"),
        (ENDED | {"evaluation": {"accuracy": 0.9}}, "no evaluation"),
    ],
)
def test_the_manifest_of_another_program_has_a_fault(fields: dict[str, Any], fault: str) -> None:
    assert fault in fault_of(TRAINED | fields)
