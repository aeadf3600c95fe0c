"""The last parsed jobs, so that a plan of an unchanged spec neither validates nor hashes it again."""

from collections import OrderedDict

from ddpjob.api.objects import Json, levels
from ddpjob.engine.desired import Job

MAX_VALUES = 50_000
"""JSON values of all kept specs together: about 500 ordinary jobs, and at most some 30 MB."""


class ParsedJobs:
    """Parses jobs, and keeps the last ones by uid and generation."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, tuple[Job, int]] = OrderedDict()
        self._values = 0

    def parse(self, body: Json) -> Job:
        """Return ``Job.of(body)``, perhaps an earlier result for the same spec."""
        uid = body["metadata"]["uid"]
        known, _ = self._jobs.get(uid, (None, 0))
        # The generation does not count the defaults that a new CustomResourceDefinition adds to a stored spec.
        if known and known.generation == body["metadata"].get("generation") and known.stored_spec == body["spec"]:
            self._jobs.move_to_end(uid)
            return known
        self.forget(uid)
        job = Job.of(body)
        values = sum(map(len, levels(job.stored_spec)))
        self._jobs[uid] = job, values
        self._values += values
        while self._values > MAX_VALUES:
            self.forget(next(iter(self._jobs)))
        return job

    def forget(self, uid: str) -> None:
        """Drop the job with this uid."""
        _, values = self._jobs.pop(uid, (None, 0))
        self._values -= values
