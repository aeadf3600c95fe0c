"""The jobs as one watch keeps them, for all pages at once."""

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ddpjob.client.base import Client, Jobs
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, StoppedError

_AGAIN = 5.0  # seconds until a watch that has ended is opened again


@dataclass
class WatchedJobs:
    """The jobs of a client, in a thread that watches them.

    Attributes:
        jobs: by namespace and name; None before the first answer.
        version: grows with each change.
        trouble: the error while they cannot be read.
        since: when that began.
    """

    client: Client
    all_namespaces: bool = False
    jobs: Jobs | None = None
    version: int = 0
    trouble: DDPJobError | None = None
    since: datetime | None = None
    _answered: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._watch, name="ddpjob-ui-watch", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait for the first answer, or the first error."""
        self._answered.wait(seconds)

    def job(self, namespace: str, name: str) -> DDPJob | None:
        """Return the job as it was seen last; None if there is none."""
        return next((job for job in self.jobs or () if (job.namespace, job.name) == (namespace, name)), None)

    def _watch(self) -> None:
        while True:
            try:
                for jobs in self.client.watch_list(all_namespaces=self.all_namespaces, on_trouble=self._on_trouble):
                    self.jobs = jobs
                    self.version += 1
                    self._answered.set()
            except StoppedError:
                return
            except DDPJobError as error:
                self._on_trouble(error)
            except Exception as error:  # of a record of any form; without this thread all pages are old
                self._on_trouble(DDPJobError(f"the jobs cannot be read: {type(error).__name__}: {error}"))
            time.sleep(_AGAIN)

    def _on_trouble(self, error: DDPJobError | None) -> None:
        if (error is None) != (self.trouble is None):
            self.since = None if error is None else datetime.now(UTC)
        if str(error) != str(self.trouble):
            self.version += 1
        self.trouble = error
        if error is not None:
            self._answered.set()
