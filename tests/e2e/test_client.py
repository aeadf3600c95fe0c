"""The Python API on a real cluster: the logs of pods, which a kubelet sends, and a job that the operator runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from ddpjob import Client, DDPJob, LogLine
from tests.e2e.jobs import shell_job
from tests.e2e.trials import Trial, Trials

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


TRIALS = Trials({"followed_logs": followed_logs}, 1, has_claim=False)


def test_followed_logs_have_each_line_of_four_attempts_once(trials: Mapping[str, Future[Any]]) -> None:
    followed: Followed = trials["followed_logs"].result()
    assert followed.job.succeeded
    texts = [*(f"line {number}" for number in range(1, LINES + 1)), "the end"]
    for attempt in range(1, ATTEMPTS + 1):
        assert [line.text for line in followed.lines if line.attempt == attempt] == texts
    assert {line.rank for line in followed.lines} == {0}
    assert [line.text for line in followed.again] == texts[-2:]
