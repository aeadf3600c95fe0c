"""Which jobs `ddpjob run` refuses before anything starts."""

import pytest

from ddpjob.errors import InvalidJobError
from ddpjob.local.admission import admit
from tests.builders import a_job


def document(**spec: str) -> dict[str, object]:
    """Return a DDPJob as a user writes it."""
    return a_job(**spec) | {"metadata": {"name": "mnist"}, "status": {}}


def test_job_of_this_operator_is_admitted() -> None:
    assert admit(document()).job.name == "mnist"
    assert admit(document(managedBy="ddpjob.dev/operator")).job.name == "mnist"


def test_job_of_another_controller_is_refused_because_no_pod_would_start() -> None:
    with pytest.raises(InvalidJobError, match=r"has managedBy: example\.com/other"):
        admit(document(managedBy="example.com/other"))


def test_job_that_asks_for_the_launcher_uses_that_of_this_machine() -> None:
    admitted = admit(a_job(launcher="Injected", command=["torchrun", "train.py"]) | {"metadata": {"name": "mnist"}})
    spec = admitted.pods[0]["spec"]
    assert "initContainers" not in spec and admitted.command == ["ddprun", "train.py"]
    in_a_cluster = admitted.created()[-1]["spec"]  # what `ddpjob render` prints
    assert [init["name"] for init in in_a_cluster["initContainers"]] == ["ddpjob-launcher"]
