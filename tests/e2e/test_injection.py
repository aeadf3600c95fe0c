"""``launcher: Injected`` on a kind cluster: manifests/examples/injected-launcher.yaml in an image without this project.

The image has Python and PyTorch alone, no shell, and a first python3 on PATH that lacks torch (torch.Dockerfile). The
namespace enforces Pod Security "restricted", and the trainer's root file system is read-only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e.trials import Trial, Trials, Wait, apart
from tests.kind import images

pytestmark = [pytest.mark.soak, pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

EXAMPLE = Path(__file__).parents[2] / "manifests" / "examples" / "injected-launcher.yaml"
STEPS = 300
"""The steps of the script in the example."""


@dataclass(frozen=True)
class Trained:
    """The finished job, its pods by node_rank and the log of node 0."""

    status: Json
    pods: dict[int, Json]
    log: str


def launcher_injected(trial: Trial) -> Trained:
    trial.cluster.load_image(images.TORCH_TAG)
    script, job = yaml.safe_load_all(EXAMPLE.read_text())
    name = job["metadata"]["name"]
    job["spec"]["image"] = images.TORCH_TAG
    job["spec"]["env"] = [{"name": "PYTHONPATH", "value": "/of-the-user"}]
    job["spec"]["template"]["spec"]["affinity"] = apart(name)
    trial.kubectl.apply(script, job)
    trial.namespace.until_finished(name)
    pods = trial.pods(name)
    log = trial.kubectl("logs", pods[0]["metadata"]["name"], f"--container={names.TRAINER_CONTAINER}")
    return Trained(trial.namespace.status(name), pods, log)


TRIALS = Trials.of(1, launcher_injected)._replace(has_claim=False)


@pytest.fixture
def trained(outcome: Wait) -> Trained:
    found: Trained = outcome(launcher_injected)
    return found


def test_image_with_python_and_torch_alone_trains_under_ddprun(trained: Trained) -> None:
    assert (trained.status["state"], trained.status["restarts"]) == ("Succeeded", 0)
    assert f"after step {STEPS}, world 4" in trained.log
    assert trained.status["progress"]["step"] == STEPS, "torchrun reports no steps"


def test_init_container_ran_restricted_and_the_trainer_wrote_nothing(trained: Trained) -> None:
    assert len(trained.pods) == 2
    for pod in trained.pods.values():
        [init] = pod["status"]["initContainerStatuses"]
        assert (init["name"], init["state"]["terminated"]["exitCode"]) == (names.LAUNCHER, 0)
        trainer = pod["spec"]["containers"][0]
        assert trainer["image"] == images.TORCH_TAG
        assert trainer["securityContext"]["readOnlyRootFilesystem"] is True
