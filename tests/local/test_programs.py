"""Which program a job runs on this machine, and with which directories."""

from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.objects import Json
from ddpjob.local.admission import admit
from ddpjob.local.programs import runs_ddptrain
from ddpjob.local.state import HostPaths, StateFolder
from tests.cli.program import shell_job, with_volume


def a_job(*args: str, **spec: Any) -> Json:
    job = shell_job("mnist", "", args=list(args), **with_volume(**spec))
    del job["spec"]["command"]
    return job


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, True),
        ({"command": ["ddptrain"]}, True),
        ({"command": ["/opt/bin/ddptrain"]}, True),
        ({"command": ["torchrun", "train.py"]}, False),
        ({"template": {"spec": {"containers": [{"name": "trainer", "command": ["sh"]}]}}}, False),
    ],
)
def test_jobs_that_run_ddptrain_are_recognised_by_their_command(spec: Json, expected: bool) -> None:
    job = a_job()
    job["spec"] |= spec
    assert runs_ddptrain(admit(job)) is expected


def test_claim_named_by_volume_option_is_the_users_directory(tmp_path: Path) -> None:
    job = a_job(data={"claimName": "shared", "mountPath": "/data"})
    admitted = admit(job)
    paths = HostPaths(admitted.job, StateFolder(tmp_path), {"shared": Path("/mine")})
    checkpoints = tmp_path / "volumes" / "default" / "mnist-checkpoints"
    assert (paths.claim("shared"), paths.checkpoints()) == (Path("/mine"), checkpoints)
    assert admitted.claims == ["mnist-checkpoints", "shared"]
