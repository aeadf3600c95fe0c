"""The Python API on a real cluster: the logs of pods, which a kubelet sends, and a job that the operator runs.

A package of two files is submitted by the command line to pods whose image has Python and PyTorch alone, with a
read-only root file system, in a namespace that enforces Pod Security "restricted".
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddpjob import Client, DDPJob, LogLine
from ddpjob.api import names
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import until
from tests.e2e.trials import Trial, Trials
from tests.kind import images

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]

ATTEMPTS, LINES = 4, 300
# Lines of one second, of several and without a line feed at the end. A pod lives longer than a look at it takes.
SCRIPT = f"""
for i in $(seq {LINES}); do echo "line $i"; [ $((i % 100)) -gt 0 ] || sleep 1; done
printf 'the end'
[ "$DDPJOB_ATTEMPT" -ge {ATTEMPTS} ]
"""


class Followed(NamedTuple):
    lines: list[LogLine]
    job: DDPJob
    again: list[LogLine]


def followed_logs(trial: Trial) -> Followed:
    """Follow the logs of a job that restarts three times, and read those of its last attempt again."""
    policy = {"maxRestarts": ATTEMPTS, "backoff": {"initialSeconds": 1, "maxSeconds": 1}}
    job = DDPJob.from_manifest(shell_job(trial.name, SCRIPT, restartPolicy=policy, podRetention="All"))
    with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:
        made = client.submit(job)
        lines = list(client.logs(made, follow=True))
        return Followed(lines, client.wait(made, timeout=60), list(client.logs(made, tail=2)))


# In the first attempt it fails on node 1, after it has written into its working directory on both.
PACKAGE = {
    "train.py": """
import os, sys
from pkg import word
attempt, node = int(os.environ["DDPJOB_ATTEMPT"]), int(os.environ["NODE_RANK"])
assert not os.path.exists("written"), "a new attempt has new files"
open("written", "w").close()
print(word.WORD, os.getcwd(), sys.argv[1], os.path.exists("big.bin"), flush=True)
sys.exit(attempt == 1 and node == 1)
""",
    "pkg/word.py": "WORD = 'sent'",
    "big.bin": "x",
    ".gitignore": "*.bin",
}
READ_ONLY = """[{name: trainer, securityContext: {readOnlyRootFilesystem: true},
                  volumeMounts: [{name: tmp, mountPath: /tmp}]}]"""


class Submitted(NamedTuple):
    code: int
    output: str
    job: DDPJob
    lines: list[LogLine]
    owners: list[str]


def submitted_package(trial: Trial) -> Submitted:
    """Submit a package, wait for its end with the command line, and delete it with its files."""
    trial.cluster.load_image(images.TORCH_TAG)
    kubeconfig = trial.cluster.kubeconfig
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PACKAGE.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        fields = (
            'env=[{name: DDPJOB_INPLACE_RESTARTS, value: "0"}]',
            "podRetention=All",
            f"template.spec.containers={READ_ONLY}",
            "template.spec.volumes=[{name: tmp, emptyDir: {}}]",
        )
        command = [
            *(sys.executable, "-m", "ddpjob.cli.main", "submit", f"{folder}/train.py", "--workdir", folder),
            *("--name", trial.name, "--image", images.TORCH_TAG, "--nodes", "2", "--nproc", "1"),
            *(word for field in fields for word in ("--set", field)),
            *("--namespace", trial.kubectl.namespace, "--wait", "--timeout", "400", "--", "--epochs=3"),
        ]
        env = os.environ | {"KUBECONFIG": str(kubeconfig)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    with Client.cluster(kubeconfig=kubeconfig, namespace=trial.kubectl.namespace) as client:
        job = client.get(trial.name)
        lines = [line for n in (1, 2) for line in client.logs(job, attempt=n, all_nodes=True)]
        owners = [owner["uid"] for files in _files(trial) for owner in files["metadata"].get("ownerReferences", ())]
        client.delete(job)
    until("the files are deleted with the job", lambda: not _files(trial), seconds=120)
    return Submitted(done.returncode, done.stdout + done.stderr, job, lines, owners)


def _files(trial: Trial) -> list[Any]:
    return trial.kubectl.objects("secrets", "--selector", f"{names.LABEL_JOB_NAME}={trial.name}")


TRIALS = Trials.of(2, followed_logs, submitted_package)


def test_followed_logs_have_each_line_of_four_attempts_once(trials: Mapping[str, Future[Any]]) -> None:
    followed: Followed = trials["followed_logs"].result()
    assert followed.job.succeeded
    texts = [*(f"line {number}" for number in range(1, LINES + 1)), "the end"]
    for attempt in range(1, ATTEMPTS + 1):
        assert [line.text for line in followed.lines if line.attempt == attempt] == texts
    assert {line.rank for line in followed.lines} == {0}
    assert [line.text for line in followed.again] == texts[-2:]


def test_a_package_is_submitted_without_an_image_of_its_own(trials: Mapping[str, Future[Any]]) -> None:
    submitted: Submitted = trials["submitted_package"].result()
    assert submitted.code == 0, submitted
    assert (submitted.job.state, submitted.job.status.restarts) == ("Succeeded", 1)
    # Each line begins with the rank, as the launcher writes it.
    words = [(line.attempt, line.node, line.text.partition("] ")[2]) for line in submitted.lines]
    printed = [(attempt, node, text) for attempt, node, text in words if text.startswith("sent")]
    # Node 0 of the first attempt may be stopped before it prints.
    assert {(1, 1), (2, 0), (2, 1)} <= {(attempt, node) for attempt, node, _ in printed}
    assert {text for _, _, text in printed} == {"sent /workdir --epochs=3 False"}
    assert submitted.owners == [submitted.job.uid]
