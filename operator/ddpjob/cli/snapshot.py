"""One moment of a job, as the live table, the plain lines and the JSON output show it.

Text of other programs is sanitized here and in ``card``, so that no output can forget to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ddpjob.api.objects import Json
from ddpjob.cli.card import news, progress_facts, restarts_text, troubles
from ddpjob.cli.text import number_of, one_line
from ddpjob.client.job import DDPJob
from ddpjob.client.timeline import JobPod, job_pods


@dataclass(frozen=True)
class Moment:
    """A job at one moment, and the pods of its attempt."""

    job: DDPJob
    pods: list[JobPod]

    @property
    def state(self) -> str:
        return one_line(self.job.state)

    @property
    def news(self) -> str:
        """What keeps the job from running as usual; empty at its end, which says it with what to do."""
        return news(self.job)

    def job_facts(self) -> list[str]:
        """Return what is known about the job's pods, one fact per entry."""
        status = self.job.status
        facts = [
            f"nodes {status.nodes_ready or '0/' + str(self.job.manifest['spec']['numNodes'])}",
            number_of(status.world.world_size, "rank") if status.world else "",
            f"attempt {status.attempt}" if (status.attempt or 0) > 1 else "",
            restarts_text(self.job),
        ]
        return [one_line(fact) for fact in facts if fact]

    def training_facts(self) -> list[str]:
        """Return the progress of the training, one fact per entry; none if the program reports no progress."""
        status, facts = self.job.status, []
        if saved := status.checkpoint:
            facts.append(f"checkpoint of step {saved.step}")
            facts += [f"resumed from step {saved.resumed_from_step}"] if saved.resumed_from_step is not None else []
        return [*progress_facts(status), *facts, *troubles(self.job, datetime.now(UTC))]


def moment_of(job: DDPJob, pods: Sequence[Json]) -> Moment:
    """Return the moment of an admitted job and its pods."""
    return Moment(job, [pod for pod in job_pods(pods) if pod.attempt == (job.status.attempt or 0)])
