"""Any file is either a job or three lines of error, never a traceback."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpjob.cli.options import RunOptions
from ddpjob.cli.prepare import Prepared, prepare
from ddpjob.errors import DDPJobError
from ddpjob.local.pod_process import Machine
from ddpjob.local.programs import require_programs
from ddpjob.local.session import Session
from tests.cli.program import shell_job, with_volume

ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70000) | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "a", "spec"]), inner, max_size=2)
    ),
    max_leaves=4,
)
JOB = shell_job(
    "mnist",
    "true",
    args=["train", "--data-dir", "/checkpoints/data", "--download"],
    resources={"limits": {"nvidia.com/gpu": 1}},
    template={
        "spec": {
            "containers": [{"name": "trainer", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "shared"}}],
        }
    },
    data={"claimName": "data"},
    **with_volume(),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in the job."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in inner for found in paths(child, (*path, key)))]


def prepared(text: str, folder: Path, **options: Any) -> Prepared | None:
    path = folder / "job.yaml"
    path.write_text(text)
    try:
        found = prepare(RunOptions(str(path), volumes=[f"shared={folder}"], **options))
        require_programs(found.admitted)
        found.admitted.created()
        Session(admitted=found.admitted, machine=Machine(found.paths), on_change=lambda *_: None, say=lambda _: None)
        return found
    except DDPJobError as error:
        assert error.error and error.hint and error.next_step
        return None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(paths(JOB)), odd=ODD, drop=st.booleans())
def test_any_value_anywhere_is_a_job_or_an_error(tmp_path: Path, place: tuple[Any, ...], odd: Any, drop: bool) -> None:
    job: Any = copy.deepcopy(JOB)
    if place:
        holder = job
        for step in place[:-1]:
            holder = holder[step]
        holder[place[-1]] = odd
        if drop:
            del holder[place[-1]]
    else:
        job = odd
    prepared(yaml.safe_dump(job), tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
def test_any_text_is_a_job_or_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DDPJobError):
        prepare(RunOptions(str(tmp_path / "job.yaml")))


def test_unchanged_job_is_accepted(tmp_path: Path) -> None:
    assert prepared(yaml.safe_dump(JOB), tmp_path) is not None
