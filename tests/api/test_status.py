"""The status model: what the API server refuses in a status patch, the model refuses too."""

from typing import Any

import pytest
from pydantic import ValidationError

from ddpjob.api.status import DDPJobStatus

TIME = "2026-03-01T12:00:00Z"
CONDITION = {"type": "Running", "status": "True", "reason": "A", "message": "b", "lastTransitionTime": TIME}


@pytest.mark.parametrize("time", [TIME, "2026-03-01T12:00:00.5Z", "2026-03-01t13:00:00+01:00"])
def test_a_time_of_rfc_3339_is_accepted(time: str) -> None:
    DDPJobStatus.model_validate({"startTime": time})


@pytest.mark.parametrize(
    ("status", "field"),
    [
        ({"startTime": "yesterday"}, ("startTime",)),
        ({"startTime": "2026-02-30T12:00:00Z"}, ("startTime",)),
        ({"startTime": 1}, ("startTime",)),
        ({"attempt": "1"}, ("attempt",)),
        ({"attempt": True}, ("attempt",)),
        ({"conditions": [{"type": "Running"}]}, ("conditions", 0, "status")),
        ({"conditions": [CONDITION, CONDITION]}, ()),
        ({"conditions": [CONDITION | {"message": "x" * 2049}]}, ("conditions", 0, "message")),
        ({"failures": [{}] * 6}, ("failures",)),
    ],
    ids=str,
)
def test_wrong_status_is_refused_with_the_name_of_the_field(
    status: dict[str, Any], field: tuple[str | int, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        DDPJobStatus.model_validate(status)
    assert field in [error["loc"] for error in caught.value.errors()]
