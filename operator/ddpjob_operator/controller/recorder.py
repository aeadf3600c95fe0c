"""Write the status of a job with the resourceVersion that the decision is based on, and send the events about it.

The schema of a CustomResourceDefinition of another release refuses statuses. Until an administrator applies the CRD of
this release, no decision about the job is recorded, so none is carried out. /readyz and an event on the job report it.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob.api.text import shorten
from ddpjob.engine.actions import Note, Plan, patch_between
from ddpjob.version import __version__
from ddpjob_operator.cluster.base import Cluster, ClusterError, Conflict, Forbidden, Invalid, NotFound
from ddpjob_operator.controller import logs
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.events import EventSender
from ddpjob_operator.controller.health import Verdict
from ddpjob_operator.controller.listing import read_into
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.workqueue import WorkQueue

logger = logging.getLogger(__name__)

COSMETIC_SECONDS = 0.25
MAX_CONFLICTS = 20
"""How many conflicts in a row a new plan follows at once: each has the same chance, however often others edit the job.
With growing delays, 34 edits of the metadata a second delayed a restart by 10 s, and 25 by four writers by a minute."""
MAX_REFUSAL = 512
"""Characters of the API server's message in an event: it may quote the object."""

MAX_FIELDS = 3  # in a message; one is enough to find the cause

_REFUSES = f"the CustomResourceDefinition {names.DDPJOBS.plural}.{names.GROUP} refuses"
_REMEDY = f"apply manifests/crd.yaml of release {__version__} (Helm does so unless crds.install is false)"
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')


@dataclass
class Written:
    """What is known of the writes of one job's status.

    patched_at: monotonic time of the last status patch. conflicts: how many met a conflict since.
    unannounced: status before and after a patch whose response was lost, and its events.
    failed: the last status write failed, so nothing is done before the next one has succeeded.
    refused: the event about the status that was refused last, so that it is sent once; empty after one was written.
    wrong: the fields of it that the CRD's schema refuses; empty if it was refused for another reason.
    rival: the log says that another operator writes the status.
    """

    patched_at: float = float("-inf")
    conflicts: int = 0
    unannounced: tuple[Json, Json, Plan] | None = None
    failed: bool = False
    refused: str = ""
    wrong: str = ""
    rival: bool = False


@dataclass
class Recorder:
    """Writes statuses. clock: monotonic seconds.

    may_begin: whether this process wrote some status, and the last one was not refused.
    """

    cluster: Cluster
    cache: Cache
    queue: WorkQueue
    events: EventSender
    metrics: Metrics
    clock: Callable[[], float]
    may_begin: bool = field(default=False, init=False)

    def observe(self, job: Json, written: Written) -> None:
        """Announce a write whose response was lost, if the job shows that it took place."""
        if written.unannounced is not None:
            before, status, plan = written.unannounced
            written.unannounced = None
            if job.get("status") == status:
                self.metrics.observe_status(job, before, status)
                self.announce(job, plan)

    def wait(self, plan: Plan, written: Written) -> float:
        """Return for how many seconds to delay a status that is not urgent, to combine it with the next one."""
        if plan.status is None or plan.urgent:
            return 0.0
        return max(written.patched_at + COSMETIC_SECONDS - self.clock(), 0.0)

    async def record(self, key: Key, job: Json, plan: Plan, written: Written) -> Json | None:
        """Write the status if it changed; return None if the job changed since the plan was made, or is gone."""
        patch = patch_between(job.get("status") or {}, plan.status) if plan.status is not None else {}
        if not patch:
            written.wrong = ""
            return job
        body = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, "status": patch}
        written.unannounced = job.get("status") or {}, dict(plan.status or {}), plan
        written.failed = True
        try:
            recorded = await self.cluster.patch_status(names.DDPJOBS, *key, body)
        except Conflict:
            await self._conflicted(key, job, written)
            return None
        except NotFound:
            self.cache.remove(names.DDPJOBS, *key, job["metadata"]["uid"])  # which queues the job: it is forgotten
            return None
        except (Forbidden, Invalid) as error:
            raise self._refused(job, written, error) from error
        written.unannounced, written.failed, written.conflicts, written.refused, written.wrong = None, False, 0, "", ""
        written.patched_at = self.clock()
        self.may_begin = True
        return recorded if self._take(key, job, recorded, plan) else None

    def _take(self, key: Key, job: Json, recorded: Json, plan: Plan) -> bool:
        """Put the answer to a patch into the cache; return False if it changed nothing."""
        if recorded["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"]:
            # The cached status lacked fields, because it was read while the CRD was replaced.
            self.cache.put(names.DDPJOBS, recorded, wake=False, same_version=True)
            self.queue.retry(key)
            return False
        self.metrics.observe_status(job, job.get("status") or {}, recorded["status"])
        # A decision is followed by another plan. What only shows the state follows from what was planned already.
        self.cache.put(names.DDPJOBS, recorded, wake=False)
        if plan.urgent:
            self.queue.add(key)
        logs.set_attempt(recorded["status"].get("attempt", 0))
        return True

    async def _conflicted(self, key: Key, job: Json, written: Written) -> None:
        """Read the job again, and plan again: at once, or later after many conflicts in a row.

        If the status has changed, another operator has written it, because users have no right to: log this once.
        """
        await read_into(self.cache, self.cluster, names.DDPJOBS, key, self.cache.job_uid(key) or "")
        found = self.cache.job(key) or job
        is_same_job = found["metadata"]["uid"] == job["metadata"]["uid"]
        if is_same_job and found.get("status") != job.get("status") and not written.rival:
            written.rival = True
            logger.warning(
                "another operator writes the status of this job; two serve a namespace during an upgrade only"
            )
        written.conflicts += 1
        if written.conflicts <= MAX_CONFLICTS:
            self.queue.add(key)
        else:
            self.queue.retry(key)

    def _refused(self, job: Json, written: Written, error: ClusterError) -> ClusterError:
        """Report a status that the CRD's schema or an admission plugin refuses, in an event: the status cannot show it.

        Returns the error, without the object in its text if it is the schema's.
        """
        self.may_begin = False
        if fields := refused_fields(error):
            written.wrong = ", ".join(fields[:MAX_FIELDS])
            text = f"{_REFUSES} {written.wrong}, so nothing is done for this job: {_REMEDY}"
            error = Invalid(f"the schema refuses {', '.join(fields)}", code=error.code)
        else:
            written.wrong = ""
            text = f"the status cannot be written, so nothing is done for this job: {shorten(str(error), MAX_REFUSAL)}"
        if written.refused != text:
            written.refused = text
            self.events.send(job, Note("Warning", "StatusRefused", text))
        return error

    def announce(self, job: Json, plan: Plan) -> None:
        """Send the events of a plan."""
        for note in plan.events:
            # Only the reason: a message may contain the end of the user's log, and with it a secret.
            logger.info("event %s", note.reason)
            self.events.send(job, note)


def readiness(refused: Sequence[tuple[Key, str]]) -> Verdict:
    """Return whether the schema refuses no status; if it does, the line names the CRD, the fields and the remedy."""
    if not refused:
        return True, "ok"
    key, fields = refused[0]
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    return False, f"{_REFUSES} {fields} of {key.namespace}/{key.name}{more}: {_REMEDY}"


def refused_fields(error: ClusterError) -> list[str]:
    """Return the fields that the schema refused; none if the request failed for another reason, such as its size."""
    # With fieldValidation=Strict. Before it, the message has the whole object, which contains text of the user.
    unknown = _UNKNOWN.findall(str(error).rpartition("strict decoding error:")[2])
    causes = [str(cause.get("field") or "") for cause in error.details.get("causes") or ()]
    wrong = [field for field in causes if field.startswith(("status", "spec"))]
    return list(dict.fromkeys([*unknown, *wrong]))
